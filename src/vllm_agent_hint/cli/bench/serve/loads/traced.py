"""A fleet of coding agents as a trace recorded it, and the part of it whose gaps have long tails.

A trace holds no text. Each of its blocks becomes a few random tokens that depend on the block's id
alone, so that prompts share exactly the prefixes that the recorded ones shared: growth, rewound
branches and compaction included. The model's answers are not fed back; the trace's own next prompt
holds what stood for them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Final

from vllm_agent_hint.cli.bench.serve.scale import Scale
from vllm_agent_hint.cli.bench.serve.script import Actor, Piece, Script, Turn
from vllm_agent_hint.cli.demo.client import Traffic
from vllm_agent_hint.cli.demo.measure import quantile
from vllm_agent_hint.traces.model import Trace, TracedRequest

FEWEST_SESSIONS: Final = 10
TURNS: Final = 8
FEWEST_TURNS: Final = 4
PLAY_SECONDS: Final = 12.0
"""What the gaps of the median session add up to."""
LONGEST_GAP_PART: Final = 0.5
"""Of that; longer ones are cut, and the report says how many."""
LONGEST_PLAY_SECONDS: Final = 1.5 * PLAY_SECONDS
"""Windows whose gaps add up to more are left out: everybody would wait for them."""
CACHE_PART: Final = 0.45
"""Of all contexts at their longest."""
LONGEST_PART_OF_CACHE: Final = 0.4
"""A given cache is full of about five contexts: ten sessions keep it under pressure."""
FITTING_PART: Final = 0.8
"""Of the windows, those that lengths are scaled for; the others are left out."""
FEWEST_REPLY_TOKENS: Final = 8
MOST_REPLY_TOKENS: Final = 32
ANSWERED: Final = "end_turn"
"""The agent waits for its user, of whom nobody knows whether he comes back."""
TTL_QUANTILE: Final = 0.9
"""A turn that ends otherwise asks for as long as so many of the trace's gaps after such turns."""
TAILED_PART: Final = 0.1
"""The windows that the long tail is drawn from: those with the longest gap by the median one."""
SHORTEST_MEDIAN_GAP: Final = 1.0


@dataclass(frozen=True, slots=True)
class Window:
    """Requests of one session that follow one another.

    Args:
        gaps: Seconds from each answer to the next request: one fewer than requests.
    """

    session: str
    requests: tuple[TracedRequest, ...]
    gaps: tuple[float, ...]

    @property
    def blocks(self) -> int:
        """Of its longest prompt."""
        return max(len(request.blocks) for request in self.requests)

    @property
    def tail(self) -> float:
        """Its longest gap by its median one."""
        return max(self.gaps) / max(SHORTEST_MEDIAN_GAP, median(self.gaps))


class TraceTooSmallError(ValueError):
    """A trace without enough sessions of enough requests."""


class TracedLoads:
    """The two loads of one trace.

    Raises:
        TraceTooSmallError: Nothing could be played from it.
    """

    def __init__(self, trace: Trace) -> None:
        self._name = trace.name
        self._block_size = trace.block_size
        self._windows = windows_of(trace)
        sessions = {window.session for window in self._windows}
        if len(sessions) < FEWEST_SESSIONS:
            raise TraceTooSmallError(
                f"{trace.name}: has {len(sessions)} sessions of {FEWEST_TURNS} requests or more; "
                f"{FEWEST_SESSIONS} are needed"
            )
        self._tailed = sorted(self._windows, key=lambda window: window.tail, reverse=True)[
            : max(2 * FEWEST_SESSIONS, int(len(self._windows) * TAILED_PART))
        ]
        gaps = [
            gap
            for window in self._windows
            for request, gap in zip(window.requests, window.gaps, strict=False)
            if request.stop != ANSWERED
        ]
        self._ttl = quantile(gaps, TTL_QUANTILE)

    def fleet(self, scale: Scale, seed: str) -> Script:
        """Sessions at random, side by side from the start."""
        return self._script("fleet", self._windows, scale, seed)

    def long_tail(self, scale: Scale, seed: str) -> Script:
        """Those in which one gap is very much longer than the others."""
        return self._script("long-tail", self._tailed, scale, seed)

    def _script(self, load: str, windows: Sequence[Window], scale: Scale, seed: str) -> Script:
        """Sizes come from all windows, so that they are the same in every repetition."""
        longest = scale.longest_prompt
        if scale.cache_tokens is not None:
            longest = min(longest, int(scale.cache_tokens * LONGEST_PART_OF_CACHE))
        tokens_per_block = max(
            1, int(longest / quantile([window.blocks for window in windows], FITTING_PART))
        )
        in_time = PLAY_SECONDS / max(1.0, median(sum(window.gaps) for window in windows))
        cut_at = PLAY_SECONDS * LONGEST_GAP_PART
        paced = _paced(in_time, cut_at)
        fitting = [
            window
            for window in windows
            if (window.blocks + 1) * tokens_per_block <= longest
            and sum(map(paced, window.gaps)) <= LONGEST_PLAY_SECONDS
        ]
        mean_context = fmean(window.blocks for window in fitting) * tokens_per_block
        cache = scale.cache_tokens or round(FEWEST_SESSIONS * mean_context * CACHE_PART)
        sessions = max(FEWEST_SESSIONS, round(cache / (mean_context * CACHE_PART)))
        dice = random.Random(f"{seed}/{load}")
        chosen = _of_different_sessions(fitting, dice)[:sessions]
        actors = [
            self._actor(f"{seed}/{load}", number, window, tokens_per_block, paced, dice)
            for number, window in enumerate(chosen)
        ]
        gaps = [gap for window in chosen for gap in window.gaps]
        return Script(
            load,
            tuple(actors),
            cache,
            0,
            f"{len(chosen)} sessions of {self._name}, {len(gaps) + len(chosen)} requests of "
            f"{mean_context:,.0f} tokens in the mean and {longest:,} at most, "
            f"{tokens_per_block / self._block_size:.4f} of the recorded lengths (longer and slower "
            f"ones are left out); gaps {in_time:.4f} of the recorded ones, "
            f"{sum(gap * in_time > cut_at for gap in gaps)} of {len(gaps)} cut at {cut_at:g} s; "
            f"in a cache of {cache:,} tokens",
        )

    def _actor(
        self,
        seed: str,
        number: int,
        window: Window,
        tokens_per_block: int,
        paced: Callable[[float], float],
        dice: random.Random,
    ) -> Actor:
        turns = []
        for index, request in enumerate(window.requests):
            pieces = [Piece(f"{seed}/{block}", tokens_per_block) for block in request.blocks]
            # What the incomplete block held, and what makes the request one of its own.
            pieces.append(Piece(f"{seed}/{window.session}/{number}/{index}", tokens_per_block))
            reply = round(request.output_tokens * tokens_per_block / self._block_size)
            turns.append(
                Turn(
                    tuple(pieces),
                    keeps_context=False,
                    gap_seconds=paced(window.gaps[index - 1]) if index else 0.0,
                    reply_tokens=min(MOST_REPLY_TOKENS, max(FEWEST_REPLY_TOKENS, reply)),
                    ttl_seconds=0.0 if request.stop == ANSWERED else paced(self._ttl),
                )
            )
        return Actor(f"agent-{number}", Traffic.AGENTS, dice.uniform(0.0, 1.0), tuple(turns))


def windows_of(trace: Trace) -> list[Window]:
    """Each session cut into windows; what is left over at its end is no window if it is short."""
    found = []
    for session in trace.sessions:
        requests = [request for request in session.requests if len(request.blocks)]
        for start in range(0, len(requests), TURNS):
            part = tuple(requests[start : start + TURNS])
            if len(part) >= FEWEST_TURNS:
                gaps = tuple(
                    max(0.0, later.at - earlier.at - (earlier.service_seconds or 0.0))
                    for earlier, later in pairwise(part)
                )
                found.append(Window(session.name, part, gaps))
    return found


def _of_different_sessions(windows: Sequence[Window], dice: random.Random) -> list[Window]:
    """In random order; two windows of one session would share what nobody shared."""
    by_session: dict[str, Window] = {}
    for window in dice.sample(list(windows), k=len(windows)):
        by_session.setdefault(window.session, window)
    return list(by_session.values())


def _paced(in_time: float, cut_at: float) -> Callable[[float], float]:
    return lambda seconds: min(seconds * in_time, cut_at)
