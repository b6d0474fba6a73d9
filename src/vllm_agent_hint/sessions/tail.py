"""The last records of a context in the order of reuse, without a look at the rest."""

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice

from vllm_agent_hint.sessions.lineage import Chain, GroupLayout

Record = tuple[Chain, int]
"""A chain and a position in it."""

_Place = tuple[float, int, int, int]
"""Sort key, group and position of a record; see ``eviction_order``."""


def tail_first(
    layouts: Sequence[GroupLayout],
    chains: Sequence[Chain],
    *,
    limit: int | None = None,
    floor_token: int = 0,
) -> list[tuple[int, int]]:
    """The order of ``eviction_order``, from the tail of the chains, as far as it is wanted.

    Each chain lies in that order already. So the chains are merged from their ends, in
    O(limit) and the length of a window.

    Args:
        layouts: One per group.
        chains: One per group.
        limit: At most so many records.
        floor_token: Leave out records that begin before this token.

    Returns:
        ``(group, position)``, first to be reused first.
    """
    places = islice(_merged(layouts, chains, floor_token), limit)
    return [(group, position) for _, _, group, position in places]


def iter_tail_first(layouts: Sequence[GroupLayout], chains: Sequence[Chain]) -> Iterator[Record]:
    """The same one by one, for as long as nothing is added to the chains.

    Their tails may end in the meantime, so that some of what it yields is there no more.
    """
    if len(chains) == 1 and not layouts[0].is_checkpoint:
        for position in range(len(chains[0]) - 1, -1, -1):
            yield chains[0], position
        return
    for _, _, group, position in _merged(layouts, chains, 0):
        yield chains[group], position


def _merged(
    layouts: Sequence[GroupLayout], chains: Sequence[Chain], floor_token: int
) -> Iterator[_Place]:
    return merge(
        *(
            _checkpoints(chain, layout, floor_token)
            if layout.is_checkpoint
            else _attention(chain, layout, floor_token)
            for chain, layout in zip(chains, layouts, strict=True)
        )
    )


def _attention(chain: Chain, layout: GroupLayout, floor_token: int) -> Iterator[_Place]:
    size, group = layout.block_size, chain.group
    for position in range(len(chain) - 1, -1, -1):
        if position >= len(chain):
            continue
        index = chain.logical_index(position)
        if index * size < floor_token:
            return
        yield -(index + 1) * size, 0, group, position


def _checkpoints(chain: Chain, layout: GroupLayout, floor_token: int) -> Iterator[_Place]:
    """A run of window blocks, or a state, takes its place from the end of the one before it."""
    size, group = layout.block_size, chain.group
    last = len(chain) - 1
    while (last := min(last, len(chain) - 1)) >= 0:
        first = last if layout.stands_alone else _begin_of_run(chain, last)
        usable_without = (chain.logical_index(first - 1) + 1) * size if first else 0
        for position in range(last, first - 1, -1):
            if position >= len(chain):
                continue
            index = chain.logical_index(position)
            if index * size < floor_token:
                return
            yield -(usable_without + 0.5), -(index + 1) * size, group, position
        last = first - 1


def _begin_of_run(chain: Chain, position: int) -> int:
    while position and chain.logical_index(position - 1) + 1 == chain.logical_index(position):
        position -= 1
    return position
