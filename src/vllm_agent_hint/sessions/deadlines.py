"""How long other chains protect the blocks of a prefix that they share."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

from vllm_agent_hint.sessions.index import BlockIndex, Holders
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


class DeadlinesOfOthers:
    """What the other owners of a chain's blocks give them, in one operation.

    Works the deadlines out once for each distinct set of owners: blocks of a shared prefix have
    the same. So it lives no longer than until a lease or an owner changes.

    Args:
        index: Who records which block.
        block_size: Of the chain's KV cache group.
        chain: Whose blocks; its own deadlines don't count.
    """

    def __init__(self, index: BlockIndex, block_size: int, chain: Chain) -> None:
        self._index = index
        self._block_size = block_size
        self._chain = chain
        self._known: dict[Holders, DeadlineSteps] = {}

    def of(self, block_id: int) -> float:
        """The latest deadline that others give a block, whether or not the chain records it."""
        return self.of_all((block_id,))[0]

    def of_all(self, block_ids: Sequence[int]) -> list[float]:
        """The same for many blocks. O(owners + blocks), 100 ns a block."""
        deadlines: list[float] = []
        last: Holders = None
        steps, flat = _NOBODYS, _NOBODYS.flat
        for held, logical in self._index.entries(block_ids):
            if held is not last:
                last = held
                steps = self._known.get(held) or self._work_out(held)
                flat = steps.flat
            deadlines.append(steps.at(logical) if flat is None else flat)
        return deadlines

    def _work_out(self, holders: Holders) -> DeadlineSteps:
        others = self._index.chains_of(self._index.others(self._chain, holders))
        self._known[holders] = steps = DeadlineSteps(others, self._block_size)
        return steps


_NOBODYS: Final = DeadlineSteps((), 1)
