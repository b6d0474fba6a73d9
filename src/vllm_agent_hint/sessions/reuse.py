"""How soon a resting session comes back, and what its blocks are worth until then.

The worth of a session is its *reuse index*: over all horizons u, the best ratio of the chance
that it returns within u to the mean time for which its blocks are held until it does, or until u
is over. It is the Gittins index of keeping it: the rate at which a held block brings hits.
A tool call a moment ago has a high one, a final message a low one, and both fall with time.

Gaps are heavy-tailed, so nothing is averaged: each class of turns has a histogram of its gaps,
over bins that grow by the square root of two. A class that has seen little leans on the one above
it, and all of them on the cold-start table, which was counted on real traces. Old observations
fade.
"""

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from operator import mul
from typing import Final, NamedTuple

EDGES: Final[tuple[float, ...]] = (0.0, *(2.0 ** (k / 2) for k in range(25)))
"""Where the bins of a gap begin, in seconds; the last one is 4,096 s and more, or never."""

NEVER: Final = len(EDGES) - 1
"""The bin of a session that did not come back."""

GAP_EDGES: Final = (8.0, 15.0, 30.0, 60.0, 300.0)
"""Where the classes of a session's last gap are cut, in seconds."""

OUTPUT_EDGES: Final = (150, 500, 1500)
"""Where the classes of a turn's output are cut, in tokens."""

TURN_EDGES: Final = (3, 4, 5, 6, 7)
"""Where the classes of a conversation are cut, by its turns."""

PROMPT_EDGES: Final = (2_000, 8_000, 32_000)
"""Where the classes of a conversation are cut, by the tokens of its prompt."""

CONVERSATION: Final = "conversation"
"""The ending of a conversation's turns: nobody says how they end."""

LEANINGS: Final = (2.0, 20.0, 200.0)
"""Pseudo-observations with which a class may lean on what is known beside it. Which of them
foretold its gaps best is learnt as well."""

TABLE_LEANS_BY: Final = 20.0
"""The same for a cell of the cold-start table, which leans on all turns of its ending."""

LEAST_BELIEF: Final = 1e-3
"""Below which no leaning falls, so that it can be believed again."""

FADES_AT: Final = 2_000.0
"""Observations of a class at which all of them are halved."""

REFRESH_AT_PART: Final = 1 / 8
"""The index of a class is worked out anew when so large a part of its observations is new."""

MAX_CLASSES: Final = 4_096
"""Classes with observations of their own; that of which no turn has ended for longest is forgotten.
"""


ANY: Final = -1
"""In a class of turns: whatever it was."""


class TurnClass(NamedTuple):
    """Turns whose sessions are expected back alike.

    Args:
        tenant: Whose; no tenant learns from another.
        ended: See ``TurnFacts``.
        detail: The tool that was called last; of a conversation how far it has come, the bins in
            ``TURN_EDGES`` and ``PROMPT_EDGES``; empty where nobody knows.
        gap: Of the session's last gap: 0 for a first turn, else 1 + the bin in ``GAP_EDGES``;
            or ``ANY``.
        output: Of the turn's output: the bin in ``OUTPUT_EDGES``; or ``ANY``.
    """

    tenant: str
    ended: str
    detail: str | tuple[int, int]
    gap: int
    output: int

    @property
    def parent(self) -> "TurnClass | None":
        """The same whatever the detail; of that, whatever the last gap and the output."""
        if self.detail:
            return self._replace(detail="")
        return None if self.gap == ANY else self._replace(gap=ANY, output=ANY)

    @property
    def num_sources(self) -> int:
        """On how many it may lean: its parent; the table; or the table, with and without it."""
        return 1 if self.detail or self.gap == ANY else 2


def turn_class(
    tenant: str,
    ended: str,
    detail: str | tuple[int, int],
    last_gap: float | None,
    output_tokens: int,
) -> TurnClass:
    """The class of a turn that is over.

    Args:
        tenant: Whose.
        ended: See ``TurnFacts``.
        detail: See ``TurnClass``.
        last_gap: Seconds between the turn's arrival and the end of the one before; None for a
            first turn.
        output_tokens: That it made.
    """
    gap = 0 if last_gap is None else 1 + bisect_right(GAP_EDGES, last_gap)
    return TurnClass(tenant, ended, detail, gap, bisect_right(OUTPUT_EDGES, output_tokens))


def conversation_class(
    tenant: str, num_turns: int, prompt_tokens: int, last_gap: float | None, output_tokens: int
) -> TurnClass:
    """The class of a conversation whose turn is over.

    Args:
        tenant: Whose.
        num_turns: So far.
        prompt_tokens: Of the turn.
        last_gap: See ``turn_class``.
        output_tokens: See ``turn_class``.
    """
    detail = bisect_right(TURN_EDGES, num_turns), bisect_right(PROMPT_EDGES, prompt_tokens)
    return turn_class(tenant, CONVERSATION, detail, last_gap, output_tokens)


def bin_of(seconds: float) -> int:
    """The bin of a gap. O(log bins)."""
    return bisect_right(EDGES, seconds) - 1


def reuse_index(chances: Sequence[float]) -> tuple[float, ...]:
    """The reuse index at the start of each bin.

    Args:
        chances: Of a gap in each bin; they sum to 1.

    Returns:
        Returns per second for which a block is held. O(bins), 15 us.
    """
    returned, held = [0.0], [0.0]
    survival = 1.0
    for i in range(NEVER):
        after = max(0.0, survival - chances[i])
        returned.append(1.0 - after)
        held.append(held[-1] + (survival + after) / 2 * (EDGES[i + 1] - EDGES[i]))
        survival = after
    # The best ratio is the steepest way from a bin to a later one, so it leads along the upper
    # hull of what lies behind it.
    indices = [0.0] * len(EDGES)
    hull = [NEVER]
    for i in range(NEVER - 1, -1, -1):
        while len(hull) > 1 and _slope(returned, held, i, hull[-2]) >= _slope(
            returned, held, i, hull[-1]
        ):
            hull.pop()
        indices[i] = _slope(returned, held, i, hull[-1])
        hull.append(i)
    return tuple(indices)


def index_at(index: Sequence[float], resting: float) -> float:
    """The reuse index of a session that has rested for some seconds. O(log bins).

    Args:
        index: At the start of each bin.
        resting: Seconds.
    """
    where = bisect_right(EDGES, resting) - 1
    if where == NEVER:
        return index[NEVER]
    # In between, so that within a bin, too, it is known which way the worth goes.
    part = (resting - EDGES[where]) / (EDGES[where + 1] - EDGES[where])
    return index[where] + part * (index[where + 1] - index[where])


def _slope(returned: Sequence[float], held: Sequence[float], start: int, end: int) -> float:
    seconds = held[end] - held[start]
    return (returned[end] - returned[start]) / seconds if seconds > 0.0 else 0.0


class _Histogram:
    """What a class has seen, and how far it believes in what else is known.

    Args:
        num_sources: What it may lean on.
    """

    __slots__ = (
        "above",
        "above_editions",
        "beliefs",
        "counts",
        "edition",
        "index",
        "news",
        "total",
    )

    def __init__(self, num_sources: int) -> None:
        self.counts = [0.0] * len(EDGES)
        self.total = 0.0
        ways = num_sources * len(LEANINGS)
        self.beliefs = [1 / ways] * ways
        """In each of ``LEANINGS`` on each of what the class may lean on; they sum to 1."""
        self.index: tuple[float, ...] | None = None
        """Worked out when it is asked for; None after enough news."""
        self.news = 0
        self.edition = 0
        """How often there has been enough news."""
        self.above: _Histogram | None = None
        """That of the class on which the index leans, if it leans on one that learns."""
        self.above_editions = 0
        """Editions of it, and of all above it, when the index was worked out."""

    @property
    def editions(self) -> int:
        """Of this one and of all above it."""
        return self.edition + (0 if self.above is None else self.above.editions)

    @property
    def is_stale(self) -> bool:
        """Whether there is no index, or it leans on one that has changed since."""
        return self.index is None or (
            self.above is not None and self.above.editions != self.above_editions
        )

    def add(self, where: int, expected: Sequence[float]) -> None:
        """
        Args:
            where: The bin of a gap.
            expected: The chance of that bin, in each of what the class may lean on.
        """
        count, total = self.counts[where], self.total
        ways = [(chance, leaning) for chance in expected for leaning in LEANINGS]
        foretold = [
            belief * (count + leaning * chance) / (total + leaning)
            for belief, (chance, leaning) in zip(self.beliefs, ways, strict=True)
        ]
        least = LEAST_BELIEF * sum(foretold)
        foretold = [max(least, each) for each in foretold]
        scale = sum(foretold)
        self.beliefs = [each / scale for each in foretold]
        self.counts[where] += 1.0
        self.total += 1.0
        self.news += 1
        if self.news >= self.total * REFRESH_AT_PART:
            self.news = 0
            self.edition += 1
            self.index = None
        if self.total >= FADES_AT:
            self.counts = [count / 2 for count in self.counts]
            self.total /= 2

    @property
    def weights(self) -> tuple[float, list[float]]:
        """In a chance: of each observation, and of each of what the class leans on."""
        total = self.total
        own = 0.0
        rest = []
        of_each = iter(self.beliefs)
        for _ in range(len(self.beliefs) // len(LEANINGS)):
            of_source = 0.0
            for leaning in LEANINGS:
                weight = next(of_each) / (total + leaning)
                own += weight
                of_source += weight * leaning
            rest.append(of_source)
        return own, rest


class ReuseEstimator:
    """Learns from the gaps of sessions that came back, and of those that did not."""

    def __init__(self) -> None:
        self._seen: OrderedDict[TurnClass, _Histogram] = OrderedDict()

    def observe(self, turns: TurnClass, gap: float | None) -> None:
        """A session came back.

        Args:
            turns: The class of the turn after which it rested.
            gap: Seconds until it came back; None if it did not.
        """
        where = NEVER if gap is None else bin_of(max(0.0, gap))
        learning: TurnClass | None = turns
        # From below: no class is taught by one that has learnt from the same gap.
        while learning is not None:
            self._learn(learning, self._histogram(learning), where)
            learning = learning.parent

    def _learn(self, turns: TurnClass, histogram: _Histogram, where: int) -> None:
        was_asked_for = histogram.index is not None
        histogram.add(where, [*self._expected_in(where, turns)])
        if was_asked_for and histogram.index is None:
            self._work_out(turns, histogram)

    def note(self, turns: TurnClass) -> None:
        """A session rests after a turn of a class: news of the class above it counts from now on.

        So an index is worked out at the end of a turn, and hardly ever when blocks run out.
        """
        histogram = self._histogram(turns)
        if histogram.is_stale:
            self._work_out(turns, histogram)

    def worth(self, turns: TurnClass, resting: float) -> float:
        """The reuse index of a session.

        Args:
            turns: The class of the turn after which it rests.
            resting: Seconds for which it has.

        Returns:
            Returns per second. O(log bins); asked of each class when blocks run out.
        """
        histogram = self._seen.get(turns) or self._histogram(turns)
        return index_at(histogram.index or self._work_out(turns, histogram), resting)

    def _work_out(self, turns: TurnClass, histogram: _Histogram) -> tuple[float, ...]:
        found = histogram.index = reuse_index(self._chances(turns, histogram))
        return found

    def _chances(self, turns: TurnClass, histogram: _Histogram) -> list[float]:
        own, rest = histogram.weights
        chances = [own * count for count in histogram.counts]
        for weight, source in zip(rest, self._expected(turns, histogram), strict=True):
            chances = [a + weight * b for a, b in zip(chances, source, strict=True)]
        return chances

    def _expected(self, turns: TurnClass, histogram: _Histogram) -> list[Sequence[float]]:
        """What a class may lean on: the chance of a gap in each bin."""
        table = cold_start(turns.ended, turns.gap, turns.output)
        parent = turns.parent
        if parent is None:
            return [table]
        above = self._histogram(parent)
        chances = self._chances(parent, above)
        histogram.above, histogram.above_editions = above, above.editions
        if turns.detail:
            return [chances]
        # The table knows how the class differs from all turns of its ending, and those how the
        # tenant differs from the table.
        tilted = [*map(mul, chances, _tilt(turns.ended, turns.gap, turns.output))]
        scale = sum(tilted)
        return [table, [chance / scale for chance in tilted]]

    def _expected_in(self, where: int, turns: TurnClass) -> list[float]:
        """``_expected`` of one bin: for each observation, so without going through all bins."""
        chance = cold_start(turns.ended, turns.gap, turns.output)[where]
        parent = turns.parent
        if parent is None:
            return [chance]
        above = self._histogram(parent)
        own, rest = above.weights
        of_parent = own * above.counts[where] + sum(
            map(mul, rest, self._expected_in(where, parent))
        )
        if turns.detail:
            return [of_parent]
        tilt = _tilt(turns.ended, turns.gap, turns.output)
        of_all_bins: float = own * sum(map(mul, above.counts, tilt)) + rest[0]
        return [chance, of_parent * tilt[where] / of_all_bins]

    def _histogram(self, turns: TurnClass) -> _Histogram:
        found = self._seen.get(turns)
        if found is None:
            found = self._seen[turns] = _Histogram(turns.num_sources)
            if len(self._seen) > MAX_CLASSES:
                self._seen.popitem(last=False)
        else:
            self._seen.move_to_end(turns)
        return found


@cache
def cold_start(ended: str, gap: int, output: int) -> tuple[float, ...]:
    """What is expected of turns that nobody has seen yet.

    Args:
        ended: See ``TurnFacts``; one that the table does not know counts as ``unknown``.
        gap: See ``TurnClass``; ``ANY`` for all turns of the ending.
        output: See ``TurnClass``; the same.

    Returns:
        The chance of a gap in each bin.
    """
    table = _cold_start_table()
    of_kind = table.get(ended, table["unknown"])
    whole = of_kind["all"]
    base = [(count + 0.5) / (sum(whole) + 0.5 * len(whole)) for count in whole]
    if gap == ANY:
        return tuple(base)
    cell = of_kind.get(f"{gap}/{output}", [0] * len(base))
    scale = sum(cell) + TABLE_LEANS_BY
    return tuple(
        (count + TABLE_LEANS_BY * chance) / scale for count, chance in zip(cell, base, strict=True)
    )


@cache
def _tilt(ended: str, gap: int, output: int) -> tuple[float, ...]:
    """In the table: the chance of each bin in a class by that in all turns of its ending."""
    whole = cold_start(ended, ANY, ANY)
    return tuple(a / b for a, b in zip(cold_start(ended, gap, output), whole, strict=True))


@cache
def _cold_start_table() -> Mapping[str, Mapping[str, Sequence[int]]]:
    """``ended -> "all" | "gap/output" -> observations per bin``; see benchmarks/cold_start.py."""
    text = files(__package__).joinpath("cold_start.json").read_text(encoding="utf-8")
    table: Mapping[str, Mapping[str, Sequence[int]]] = json.loads(text)
    return table
