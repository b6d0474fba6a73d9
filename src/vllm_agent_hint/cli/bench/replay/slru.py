"""Segmented LRU: what has been hit once is kept apart from what has not. Knows no hint."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

from vllm.v1.core.kv_cache_utils import KVCacheBlock

PROTECTED_SHARE: Final = 0.8
"""Of the pool's blocks that may lie in the protected part; the oldest of them fall back."""


class SegmentedFreeQueue:
    """Stands in for vLLM's free queue.

    A block that is taken out by ``remove`` has been hit, and comes back into the protected part;
    one that is given out has new content, and comes back on probation. Probation is used up
    first, oldest first. Blocks without content go before all of them, as with stock.

    Args:
        blocks: All free ones.
    """

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        self._empty = list(reversed(blocks))
        self._probation: OrderedDict[int, KVCacheBlock] = OrderedDict()
        self._protected: OrderedDict[int, KVCacheBlock] = OrderedDict()
        self._was_hit: set[int] = set()
        self._max_protected = int(PROTECTED_SHARE * len(blocks))

    @property
    def num_free_blocks(self) -> int:
        return len(self._empty) + len(self._probation) + len(self._protected)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Give out n blocks."""
        assert n <= self.num_free_blocks
        return [self.popleft() for _ in range(n)]

    def popleft(self) -> KVCacheBlock:
        """Give out the block that is worth least."""
        if self._empty:
            return self._empty.pop()
        block = (self._probation or self._protected).popitem(last=False)[1]
        self._was_hit.discard(block.block_id)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """A block is hit."""
        if self._probation.pop(block.block_id, None) is None:
            del self._protected[block.block_id]
        self._was_hit.add(block.block_id)

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Blocks with content come back."""
        for block in blocks:
            into = self._protected if block.block_id in self._was_hit else self._probation
            into[block.block_id] = block
        while len(self._protected) > self._max_protected:
            block_id, block = self._protected.popitem(last=False)
            self._was_hit.discard(block_id)
            self._probation[block_id] = block

    def append(self, block: KVCacheBlock) -> None:
        """One block comes back."""
        self.append_n([block])

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Blocks without content come back."""
        self._was_hit.difference_update(block.block_id for block in blocks)
        self._empty += reversed(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All of them, in the order of reuse."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """All of them; nobody here asks for a part."""
        assert cursor is None
        yield from reversed(self._empty)
        yield from self._probation.values()
        yield from self._protected.values()


def lay_under(pool: Any) -> None:
    """Make a fresh block pool reuse its blocks as segmented LRU."""
    pool.free_block_queue = SegmentedFreeQueue(pool.free_block_queue.get_all_free_blocks())
