"""vLLM's free queue with two boundaries: ordinary blocks, session blocks, protected blocks."""

from collections.abc import Callable, Iterator
from typing import Final

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from vllm_agent_hint.kvcache.block import AgentKVCacheBlock, Zone
from vllm_agent_hint.settings import Placement

_CHOOSE_AT_LEAST: Final = 128
"""Blocks. A choice looks at every class of sessions once."""

_CHOOSE_AT_LEAST_OF: Final = 64
"""Of a pool of fewer than so many times those, its part: what was chosen is not weighed again."""


class AgentFreeKVCacheBlockQueue(FreeKVCacheBlockQueue):
    """One linked list, ``head -> A -> | -> B -> | -> C -> end``, in the order of reuse.

    The first boundary is the node that stock code knows as the tail of its list. So as long as
    no session holds a block, zone A is stock's whole list and stock's own methods run on it;
    ``remove`` and ``prepend_n`` are stock's at all times.

    Every operation is O(1) per block that it names.
    """

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        super().__init__(blocks)
        self.has_sessions = False
        """Whether a block of the pool is in zone B or C by its scalars, free or not."""
        self.has_bare_deadlines = True
        """Whether a block may have a deadline and no session. False spares a look per block."""
        self.on_shortage: Callable[[int], object] | None = None
        """Called with the number of blocks that zone A falls short of, before B is touched."""
        self.on_choice: Callable[[Zone, int], int] | None = None
        """Called with a zone from which so many blocks are to be taken, to bring those to its front
        that are to go first; says how many it brought."""
        self._choose_at_least = max(1, min(_CHOOSE_AT_LEAST, len(blocks) // _CHOOSE_AT_LEAST_OF))
        self._brought = {Zone.SESSION: 0, Zone.TTL: 0}
        """How many of them are still at the front, if nobody came back for them."""
        self.taken: list[AgentKVCacheBlock] = []
        """Blocks of zones B and C that were given out and that the pool has not reported yet."""
        self._boundary = KVCacheBlock(block_id=-1)
        self._end = KVCacheBlock(block_id=-1)
        _link(self.fake_free_list_tail, self._boundary)
        _link(self._boundary, self._end)

    # -- taking --------------------------------------------------------------------------------

    def popleft(self) -> KVCacheBlock:
        """See ``FreeKVCacheBlockQueue.popleft``."""
        if not self.has_sessions or not self.num_free_blocks:
            return super().popleft()
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take n blocks: A first, then B, then C. On the path of every allocation.

        Raises:
            AssertionError: Fewer than n blocks are free.
        """
        if not self.has_sessions:
            return super().popleft_n(n)
        assert self.num_free_blocks >= n
        blocks = self._take(self.fake_free_list_head, self.fake_free_list_tail, n)
        if len(blocks) < n:
            self._take_retained(blocks, n)
        return blocks

    def _take_retained(self, blocks: list[KVCacheBlock], n: int) -> None:
        if self.on_shortage is not None:
            self.on_shortage(n - len(blocks))
            blocks += self._take(
                self.fake_free_list_head, self.fake_free_list_tail, n - len(blocks)
            )
        for zone in (Zone.SESSION, Zone.TTL):
            # Those that were chosen before are worth less than any that are chosen now.
            self._take_from(zone, blocks, min(self._brought[zone], n - len(blocks)))
            if len(blocks) == n:
                return
            if self.on_choice is not None and not self._is_empty(zone):
                # Some more than are missing: decodes take one block at a time.
                wanted = max(n - len(blocks), self._choose_at_least)
                self._brought[zone] = self.on_choice(zone, wanted)
            self._take_from(zone, blocks, n - len(blocks))
        if len(blocks) < n:
            # Choosing has failed: every block is an ordinary one now.
            blocks += self._take(
                self.fake_free_list_head, self.fake_free_list_tail, n - len(blocks)
            )

    def _is_empty(self, zone: Zone) -> bool:
        start, end = self._bounds[zone]
        return start.next_free_block is end

    def _take_from(self, zone: Zone, blocks: list[KVCacheBlock], n: int) -> None:
        retained = self._take(*self._bounds[zone], n)
        self._brought[zone] = max(0, self._brought[zone] - len(retained))
        self.taken += retained
        blocks += retained

    def _take(self, start: KVCacheBlock, end: KVCacheBlock, n: int) -> list[KVCacheBlock]:
        """Unlink at most n blocks between two nodes, from the front."""
        taken: list[KVCacheBlock] = []
        block = start.next_free_block
        for _ in range(n):
            if block is end:
                break
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        _link(start, block)
        self.num_free_blocks -= len(taken)
        return taken

    # -- giving back ---------------------------------------------------------------------------

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the back of its zone."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put blocks at the back of their zones, in this order. On the path of every free."""
        if self.has_sessions:
            if self.has_bare_deadlines:
                retained = [b for b in blocks if b._session_ref_cnt or b._ttl_expire_at]
            else:
                retained = [b for b in blocks if b._session_ref_cnt]
            if retained:
                protected = [b for b in retained if b._ttl_expire_at]
                if protected:
                    self._append_before(self._end, protected)
                if len(protected) < len(retained):
                    held = [b for b in retained if not b._ttl_expire_at]
                    self._append_before(self._boundary, held)
                if len(retained) == len(blocks):
                    return
                blocks = [b for b in blocks if not (b._session_ref_cnt or b._ttl_expire_at)]
        super().append_n(blocks)

    def enter(
        self,
        blocks: list[AgentKVCacheBlock],
        placement: Placement,
        zone: Zone | None = None,
    ) -> None:
        """Move free blocks that have changed zone into the one that their scalars name.

        Args:
            blocks: In the order in which they should be reused.
            placement: The end of the zone at which they enter.
            zone: What the scalars of all of them name; None to look.
        """
        for block in blocks:
            _link(block.prev_free_block, block.next_free_block)
        self.num_free_blocks -= len(blocks)
        entering: tuple[list[AgentKVCacheBlock], ...] = ([], [], [])
        if zone is None:
            for block in blocks:
                entering[block.zone].append(block)
        else:
            entering[zone].extend(blocks)
        for (start, end), into in zip(self._bounds, entering, strict=True):
            if into and placement is Placement.BACK:
                self._append_before(end, into)
            elif into:
                self._append_before(start.next_free_block, into)

    def fold(self) -> None:
        """Make every free block ordinary, in the order in which they lie. O(1)."""
        for node in (self.fake_free_list_tail, self._boundary):
            _link(node.prev_free_block, node.next_free_block)
            _link(self._end.prev_free_block, node)
            _link(node, self._end)
        self.has_sessions = False
        self.taken = []
        self._brought = dict.fromkeys(self._brought, 0)

    def _append_before(self, end: KVCacheBlock, blocks: list[KVCacheBlock]) -> None:
        """Put blocks, in this order, in front of a node. On the path of every free."""
        last = end.prev_free_block
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        _link(last, end)
        self.num_free_blocks += len(blocks)

    # -- looking -------------------------------------------------------------------------------

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Every free block in the order of reuse, zone after zone. For tests."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Free blocks in the order of reuse after a block, or all. Never yields a boundary."""
        block = (self.fake_free_list_head if cursor is None else cursor).next_free_block
        while block is not None and block is not self._end:
            if block is not self.fake_free_list_tail and block is not self._boundary:
                yield block
            block = block.next_free_block

    def iter_zone(self, zone: Zone) -> Iterator[KVCacheBlock]:
        """The free blocks that lie between a zone's boundaries. For tests."""
        start, end = self._bounds[zone]
        block = start.next_free_block
        while block is not end:
            yield block
            block = block.next_free_block

    @property
    def _bounds(self) -> tuple[tuple[KVCacheBlock, KVCacheBlock], ...]:
        """The nodes before and after each zone."""
        first, second = self.fake_free_list_tail, self._boundary
        return (self.fake_free_list_head, first), (first, second), (second, self._end)


class ShadowFreeKVCacheBlockQueue(AgentFreeKVCacheBlockQueue):
    """Stock's order, whatever the scalars of the blocks say; only ``taken`` is kept.

    Zones B and C stay empty, so that what is given out is exactly what stock would give. A block
    that a session asked to keep is then an ordinary one with its scalars set.
    """

    def popleft(self) -> KVCacheBlock:
        """See ``FreeKVCacheBlockQueue.popleft``."""
        block = FreeKVCacheBlockQueue.popleft(self)
        self._note_taken([block])
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """See ``FreeKVCacheBlockQueue.popleft_n``."""
        blocks = FreeKVCacheBlockQueue.popleft_n(self, n)
        self._note_taken(blocks)
        return blocks

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """See ``FreeKVCacheBlockQueue.append_n``."""
        FreeKVCacheBlockQueue.append_n(self, blocks)

    def enter(
        self,
        blocks: list[AgentKVCacheBlock],
        placement: Placement,
        zone: Zone | None = None,
    ) -> None:
        """Leave the blocks where they are."""

    def _note_taken(self, blocks: list[AgentKVCacheBlock]) -> None:
        """Remember what a session asked to keep. What is due by now is let go of first."""
        if not self.has_sessions or all(block.zone is Zone.ORDINARY for block in blocks):
            return
        if self.on_shortage is not None:
            self.on_shortage(len(blocks))
        self.taken += [block for block in blocks if block.zone is not Zone.ORDINARY]


def _link(first: KVCacheBlock, second: KVCacheBlock) -> None:
    first.next_free_block = second
    second.prev_free_block = first
