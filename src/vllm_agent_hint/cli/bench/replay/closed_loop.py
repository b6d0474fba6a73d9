"""The closed loop: a miss takes time, and delays the turn after it."""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from vllm_agent_hint.cli.bench.replay.caches import Running, StockCache
from vllm_agent_hint.cli.bench.replay.report import shares
from vllm_agent_hint.cli.bench.replay.workload import Arrival, PlayedSession, Traffic, Workload

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class TimeModel:
    """How long things take.

    One prompt is computed at a time, first come, first served; whatever has been computed is
    decoded beside the others, each at the same rate.

    Args:
        prefill_rate: Prompt tokens computed per second.
        decode_rate: Tokens generated per second and request.
        hours: How long the fleet is watched.
        transfer_rate: Tokens per second that come back from an unbounded host tier, where
            everything is that was ever computed; None for no such tier.
    """

    prefill_rate: float
    decode_rate: float
    hours: float
    transfer_rate: float | None = None


@dataclass(slots=True)
class _Turn:
    """A request that has arrived."""

    arrival: Arrival
    came_at: float
    running: Running | None = None


@dataclass(slots=True)
class _Tally:
    """What has been seen of turns that had their first token."""

    prompts: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    reloaded: list[int] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)


class ClosedLoop:
    """A fleet that waits for its answers.

    A session's next turn comes as long after the end of the one before as it did in the trace; a
    user's next session when the one before is over. Sub-agents start when their parent has got as
    far as it had.

    Args:
        workload: Which sessions, and who plays them.
        cache: On what.
        model: How long things take.
        on_progress: Called with the number of turns done since the last call.
    """

    def __init__(
        self,
        workload: Workload,
        cache: StockCache,
        model: TimeModel,
        on_progress: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._cache = cache
        self._model = model
        self._on_progress = on_progress
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = count()
        self._waiting: deque[_Turn] = deque()
        self._is_computing = False
        self._tally = _Tally()
        self._block_size = workload.block_size
        self._known = np.zeros(workload.num_ids, dtype=bool)
        """Chain ids that were ever computed."""
        self.began: dict[int, float] = {}
        """By number of a session: when its first request came."""
        self._durations: list[float] = []
        self.arrived = self.ended = self.refused = self.in_flight = 0
        """Turns so far; refused are those that would not fit into an empty cache."""
        self._children: dict[tuple[str, int], list[tuple[float, PlayedSession]]] = defaultdict(list)
        """By name and turn of the parent: how long after that turn's end a child starts."""
        self._queues: dict[int, deque[PlayedSession]] = defaultdict(deque)
        """What each user will play next."""
        self._left: dict[str, int] = {}
        """By the name of its root: sessions of a family that are still to end."""
        self._root: dict[str, PlayedSession] = {}
        """Of sessions that users play: the one that its family began with."""
        self._prepare(workload)

    def _prepare(self, workload: Workload) -> None:
        by_name = {session.name: session for session in workload.sessions}
        for session in workload.sessions:
            if session.user is None:
                self._at(session.starts_at, self._starter(session))
                continue
            parent = by_name.get(session.parent or "")
            root = session if parent is None else self._root[parent.name]
            self._root[session.name] = root
            self._left[root.name] = self._left.get(root.name, 0) + 1
            if parent is None:
                self._queues[session.user].append(session)
            else:
                turn, delay = _start_of_child(session, parent)
                self._children[parent.name, turn].append((delay, session))
        for queue in self._queues.values():
            first = queue.popleft()
            self._at(first.starts_at, self._starter(first))

    # -- events --------------------------------------------------------------------------------

    def _at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._serial), what))

    def run(self) -> dict[str, Any]:
        """Watch the fleet for so many hours.

        Returns:
            Figures of the turns that had their first token by then, and of the sessions that ended.
        """
        until = self._model.hours * SECONDS_PER_HOUR
        while self._events and self._events[0][0] <= until:
            now, _, what = heapq.heappop(self._events)
            self._cache.advance(now)
            what(now)
        return self._figures()

    def _starter(self, session: PlayedSession) -> Callable[[float], None]:
        return lambda now: self._arrive(session, 0, now)

    def _arrive(self, session: PlayedSession, turn: int, now: float) -> None:
        self.began.setdefault(session.number, now)
        self.arrived += 1
        arrival = Arrival(now, session, turn)
        if not self._cache.can_ever_hold(arrival):
            self.refused += 1
            self._go_on(arrival, now)
            return
        self._waiting.append(_Turn(arrival, now))
        self._compute_next(now)

    def _compute_next(self, now: float) -> None:
        """Take the first in the queue, if there is room for it and nothing else is computed."""
        if self._is_computing or not self._waiting:
            return
        turn = self._waiting[0]
        turn.running = self._cache.begin(turn.arrival, now)
        if turn.running is None:
            return
        self._waiting.popleft()
        self._is_computing = True
        self.in_flight += 1
        request = turn.arrival.request
        hit = turn.running.hit_tokens
        reloaded = self._reloadable(turn.arrival, hit)
        seconds = (request.prompt_tokens - hit - reloaded) / self._model.prefill_rate
        if reloaded:
            assert self._model.transfer_rate is not None
            seconds += reloaded / self._model.transfer_rate
        self._known[request.blocks] = True
        self._at(now + seconds, lambda then: self._first_token(turn, reloaded, then))

    def _reloadable(self, arrival: Arrival, hit_tokens: int) -> int:
        """Tokens behind the hit that the host tier has; never the last one."""
        if self._model.transfer_rate is None:
            return 0
        request = arrival.request
        known = self._known[request.blocks]
        blocks = len(known) if known.all() else int(known.argmin())
        blocks = min(blocks, (request.prompt_tokens - 1) // self._block_size)
        return max(0, blocks * self._block_size - hit_tokens)

    def _first_token(self, turn: _Turn, reloaded: int, now: float) -> None:
        assert turn.running is not None
        request, tally = turn.arrival.request, self._tally
        tally.prompts.append(request.prompt_tokens)
        tally.hits.append(turn.running.hit_tokens)
        tally.reloaded.append(reloaded)
        tally.ttfts.append(now - turn.came_at)
        tally.traffic.append(turn.arrival.session.traffic)
        self._is_computing = False
        decoding = request.output_tokens / self._model.decode_rate
        self._at(now + decoding, lambda then: self._end(turn, then))
        self._compute_next(now)

    def _end(self, turn: _Turn, now: float) -> None:
        assert turn.running is not None
        self._cache.end(turn.running, now)
        self.ended += 1
        self.in_flight -= 1
        self._on_progress(1)
        self._go_on(turn.arrival, now)
        self._compute_next(now)

    def _go_on(self, arrival: Arrival, now: float) -> None:
        """A turn is over: what comes after it."""
        session = arrival.session
        for delay, child in self._children.pop((session.name, arrival.turn), ()):
            self._at(now + delay, self._starter(child))
        if not arrival.is_last:
            following = session.requests[arrival.turn + 1]
            before = arrival.request
            think = following.at - before.at - (before.service_seconds or 0.0)
            turn = arrival.turn + 1
            self._at(now + max(0.0, think), lambda then: self._arrive(session, turn, then))
            return
        self._durations.append(now - self.began[session.number])
        root = self._root.get(session.name)
        if root is None or root.user is None:
            return
        self._left[root.name] -= 1
        queue = self._queues[root.user]
        if not self._left[root.name] and queue:
            self._at(now, self._starter(queue.popleft()))

    # -- figures -------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Turns that have arrived and have no blocks yet."""
        return len(self._waiting)

    def _figures(self) -> dict[str, Any]:
        tally = self._tally
        traffic = np.array(tally.traffic)
        prompts, hits = np.array(tally.prompts), np.array(tally.hits)
        ttfts = np.array(tally.ttfts)
        figures = shares(prompts, hits) | _ttft(ttfts)
        figures["classes"] = {
            str(each): shares(prompts[traffic == each], hits[traffic == each])
            | _ttft(ttfts[traffic == each])
            for each in Traffic
            if (traffic == each).any()
        }
        durations, reloaded = self._durations, sum(tally.reloaded)
        return figures | {
            "closed_loop": {
                "prefill_rate": self._model.prefill_rate,
                "decode_rate": self._model.decode_rate,
                "transfer_rate": self._model.transfer_rate,
                "hours": self._model.hours,
            },
            "sessions_done": len(durations),
            "turns_per_hour": self.ended / self._model.hours,
            "session_mean": float(np.mean(durations)) if durations else None,
            "session_p99": float(np.percentile(durations, 99)) if durations else None,
            "reloaded_tokens": reloaded,
            "recomputed_tokens": figures["recomputed_tokens"] - reloaded,
            "refused": self.refused,
            "waiting_at_end": self.num_waiting,
            **self._cache.figures(),
        }


def _ttft(seconds: Any) -> dict[str, float | None]:
    """Times to first token, in seconds."""
    if not len(seconds):
        return dict.fromkeys(("ttft_mean", "ttft_p50", "ttft_p95", "ttft_p99", "ttft_max"))
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99))
    return {
        "ttft_mean": float(np.mean(seconds)),
        "ttft_p50": float(p50),
        "ttft_p95": float(p95),
        "ttft_p99": float(p99),
        "ttft_max": float(np.max(seconds)),
    }


def _start_of_child(child: PlayedSession, parent: PlayedSession) -> tuple[int, float]:
    """After which of its parent's turns a sub-agent starts, and how long after that turn's end."""
    begins = child.after_parent
    turn = 0
    for number, request in enumerate(parent.requests):
        if request.at > begins:
            break
        turn = number
    before = parent.requests[turn]
    return turn, max(0.0, begins - before.at - (before.service_seconds or 0.0))
