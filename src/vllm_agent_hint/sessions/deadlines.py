"""How long several chains together protect each block of a prefix that they share."""

from bisect import bisect_right
from collections.abc import Iterable

from vllm_agent_hint.sessions.lineage import Chain


class DeadlineSteps:
    """The latest deadline that some chains give a block: a staircase that falls with its index.

    What an edit has ended, and not released yet, counts on: heirs may be about to get it.

    Args:
        chains: Of one KV cache group. O(their leases), and sorted where leases have ends.
        block_size: Of that group.
    """

    __slots__ = ("_ends", "_latest")

    def __init__(self, chains: Iterable[Chain], block_size: int) -> None:
        whole = 0.0
        partial: list[tuple[float, float]] = []
        for chain in chains:
            given = [(lease.end_token, lease.deadline) for lease in chain.lineage.leases]
            for end_token, deadline in (*given, *chain.lineage.bequest):
                if end_token is not None:
                    partial.append((-(-end_token // block_size), deadline))
                elif deadline > whole:
                    whole = deadline
        self._ends: list[float] = []
        """Where the steps but the last end, rising; in blocks."""
        self._latest = [whole]
        """The deadline of each step, falling."""
        if partial:
            self._ends, self._latest = _staircase(partial, whole)

    @property
    def flat(self) -> float | None:
        """The deadline of every block, if they have the same."""
        return None if self._ends else self._latest[0]

    def at(self, logical: int) -> float:
        """The deadline of a block; 0.0 if no lease covers it."""
        return self._latest[bisect_right(self._ends, logical)]


def _staircase(partial: list[tuple[float, float]], whole: float) -> tuple[list[float], list[float]]:
    ends: list[float] = []
    latest = [whole]
    for end, deadline in sorted(partial, reverse=True):
        if deadline > latest[-1]:
            ends.append(end)
            latest.append(deadline)
    return ends[::-1], latest[::-1]
