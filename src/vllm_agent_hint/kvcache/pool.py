"""vLLM's block pool, whose blocks remember the sessions that want them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_agent_hint.kvcache.block import AgentKVCacheBlock, Zone, make_block
from vllm_agent_hint.kvcache.queue import (
    AgentFreeKVCacheBlockQueue,
    ShadowFreeKVCacheBlockQueue,
)
from vllm_agent_hint.sessions.blockmeta import BlockMetaUpdateResult, BulkMetaUpdate
from vllm_agent_hint.settings import Placement

_ORDINARY, _SESSION, _TTL = Zone
"""Globals: an attribute of an enum costs as much as all else that is done for a block."""


class PoolObserver(Protocol):
    """Who is told what becomes of retained blocks."""

    def blocks_reused(self, block_ids: Sequence[int]) -> None:
        """Their content is gone and their scalars are zero."""

    def block_moved(self, old_id: int, new_id: int) -> None:
        """Content and scalars now lie in another block."""

    def pool_short(self, num_blocks: int) -> None:
        """Zone A lacks so many blocks for an allocation: release what is due."""

    def blocks_wanted(self, zone: Zone, num_blocks: int) -> int:
        """So many blocks of a zone of sessions are to be taken: bring the first to its front.

        Returns how many were brought there.
        """

    def pool_reset(self) -> None:
        """The prefix cache was emptied and every scalar is zero."""


class AgentBlockPool(BlockPool):
    """Stock's pool over ``AgentKVCacheBlock`` and ``AgentFreeKVCacheBlockQueue``.

    Adds ``update_block_meta`` and ``update_blocks_meta``, the only writers of the two scalars,
    and reports to an observer when a retained block's content goes away. It never changes a
    hash, a reference count, or whether an allocation succeeds.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks[:] = [make_block(i, self) for i in range(len(self.blocks))]
        self.free_block_queue: AgentFreeKVCacheBlockQueue = AgentFreeKVCacheBlockQueue(self.blocks)
        self.free_block_queue.has_bare_deadlines = False
        self.free_block_queue.on_shortage = self._report_shortage
        self.free_block_queue.on_choice = self._report_choice
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        self.observer: PoolObserver | None = None
        self.num_blocks_in = Counter[Zone]()
        """Blocks in zones B and C by their scalars, active ones included."""
        self.pressure_overrides = Counter[Zone]()
        """Blocks of zones B and C given out for want of ordinary ones, since last taken; in shadow
        those that stock's order gave out."""

    @property
    def num_retained_blocks(self) -> int:
        return self.num_blocks_in[Zone.SESSION] + self.num_blocks_in[Zone.TTL]

    def ttl_expire_at(self, block_id: int) -> float:
        """See ``BlockMetaPort``."""
        deadline: float = self.blocks[block_id]._ttl_expire_at
        return deadline

    def are_free(self, block_ids: Sequence[int], *, leased: bool) -> list[bool]:
        """See ``BlockMetaPort``."""
        return [
            block.prev_free_block is not None and (block._ttl_expire_at != 0.0) is leased
            for block in map(self.blocks.__getitem__, block_ids)
        ]

    def reuse_next(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """See ``BlockMetaPort``."""
        free = [
            block
            for block_id, block_hash in blocks
            if (block := self.blocks[block_id])._block_hash == block_hash
            and block.prev_free_block is not None
        ]
        self.free_block_queue.enter(free, Placement.FRONT)

    def cached_block(self, block_hash: bytes) -> tuple[int, bytes] | None:
        """See ``BlockMetaPort``."""
        block = self.cached_block_hash_to_block.get_one_block(block_hash)
        if block is None or block.block_hash is None:
            return None
        return block.block_id, block.block_hash

    # -- the only writers of the two scalars -----------------------------------------------------

    def update_block_meta(
        self,
        *,
        block_id: int,
        expected_block_hash: bytes | None = None,
        session_ref_delta: int = 0,
        ttl_expire_at: float | None = None,
    ) -> BlockMetaUpdateResult:
        """Mark one block (RFC #52113, section 5).

        Args:
            block_id: Physical id.
            expected_block_hash: The hash that the block must still hold; None skips the check.
            session_ref_delta: Added to the session count.
            ttl_expire_at: The new deadline in monotonic seconds, 0.0 for none; None leaves it.

        Returns:
            UPDATED, or the reason for which nothing was changed.
        """
        if not 0 <= block_id < len(self.blocks):
            return BlockMetaUpdateResult.UNKNOWN_BLOCK
        if expected_block_hash is None:
            expected_block_hash = self.blocks[block_id].block_hash
            if expected_block_hash is None:
                return self._why_refused(self.blocks[block_id])
        done = self.update_blocks_meta(
            (block_id,),
            (expected_block_hash,),
            session_ref_delta=session_ref_delta,
            ttl_expire_at=ttl_expire_at,
        )
        return done.refused[0][1] if done.refused else BlockMetaUpdateResult.UPDATED

    def update_blocks_meta(
        self,
        block_ids: Sequence[int],
        expected_block_hashes: Sequence[bytes | None],
        *,
        session_ref_delta: int = 0,
        ttl_expire_at: float | Sequence[float] | None = None,
        placement: Placement = Placement.BACK,
    ) -> BulkMetaUpdate:
        """Mark many blocks; see ``BlockMetaPort``. On the path of each block of a hinted turn."""
        done = BulkMetaUpdate()
        entering: dict[Zone, list[AgentKVCacheBlock]] = {}
        changes: dict[tuple[Zone, Zone], int] = {}
        blocks = self.blocks
        each = ttl_expire_at if isinstance(ttl_expire_at, Sequence) else None
        deadline = ttl_expire_at if not isinstance(ttl_expire_at, Sequence) else None
        is_renewal = not session_ref_delta
        for k, block_id in enumerate(block_ids):
            block = blocks[block_id]
            expected = expected_block_hashes[k]
            if each is not None:
                deadline = each[k]
            old = block._ttl_expire_at
            if (
                is_renewal
                and deadline
                and old
                and block._block_hash is expected
                and expected is not None
            ):
                block._ttl_expire_at = deadline
                continue
            if block._block_hash != expected or expected is None or block.is_null:
                done.refused.append((block_id, self._why_refused(block)))
                continue
            held = block._session_ref_cnt
            count = held + session_ref_delta
            if count < 0:
                done.refused.append((block_id, BlockMetaUpdateResult.NEGATIVE_COUNT))
                continue
            new = old if deadline is None else deadline
            block._session_ref_cnt = count
            block._ttl_expire_at = new
            if new and not count:
                self.free_block_queue.has_bare_deadlines = True
            # As ``block.zone`` says; three thousand look-ups in a slice are its whole cost.
            before = _TTL if old else _SESSION if held else _ORDINARY
            after = _TTL if new else _SESSION if count else _ORDINARY
            if before is not after:
                changes[before, after] = changes.get((before, after), 0) + 1
                if block.prev_free_block is not None:
                    entering.setdefault(after, []).append(block)
        done.updated = len(block_ids) - len(done.refused)
        for (before, after), number in changes.items():
            self._count(before, after, number)
        for zone, moved in entering.items():
            self.free_block_queue.enter(moved, placement, zone)
        done.made_ordinary = len(entering.get(Zone.ORDINARY, ()))
        self.free_block_queue.has_sessions = self.num_retained_blocks > 0
        return done

    @staticmethod
    def _why_refused(block: AgentKVCacheBlock) -> BlockMetaUpdateResult:
        if block.is_null:
            return BlockMetaUpdateResult.NULL_BLOCK
        return BlockMetaUpdateResult.STALE_HASH

    def _count(self, before: Zone, after: Zone, number: int = 1) -> None:
        if before is not Zone.ORDINARY:
            self.num_blocks_in[before] -= number
        if after is not Zone.ORDINARY:
            self.num_blocks_in[after] += number

    def drop_all_meta(self) -> None:
        """Zero every scalar and make the queue plain LRU again, in its present order."""
        for block in self.blocks:
            block._session_ref_cnt = 0
            block._ttl_expire_at = 0.0
        self.num_blocks_in.clear()
        self.free_block_queue.fold()

    def keep_stock_order(self) -> None:
        """Shadow mode, before the first allocation: mark blocks and reuse them as stock does."""
        self.free_block_queue.__class__ = ShadowFreeKVCacheBlockQueue

    def stand_down(self) -> None:
        """Be stock's pool again: the scheduler has built something that ours can't work with."""
        self.__class__ = BlockPool

    # -- where stock's content goes away -----------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """As stock; then report what was taken from sessions. On the path of every allocation."""
        blocks = super().get_new_blocks(num_blocks)
        if self.free_block_queue.taken:
            taken, self.free_block_queue.taken = self.free_block_queue.taken, []
            self._content_left(taken, self.pressure_overrides)
        return blocks

    def evict_blocks(self, block_ids: set[int]) -> None:
        """As stock; a free block that a session held is then the next to be reused."""
        retained = [self.blocks[i] for i in block_ids if i < len(self.blocks)]
        retained = [block for block in retained if block.zone is not Zone.ORDINARY]
        super().evict_blocks(block_ids)
        self._content_left(retained)
        free = [block for block in retained if block.prev_free_block is not None]
        if free:
            self.free_block_queue.enter(free, Placement.FRONT)

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As stock; a partial block that becomes full has other content than was recorded."""
        if not self.free_block_queue.has_sessions:
            super().cache_full_blocks(
                request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs
            )
            return
        new = blocks[num_cached_blocks:num_full_blocks]
        rehashed = [b for b in new if b._session_ref_cnt or b._ttl_expire_at]
        hashes = [block.block_hash for block in rehashed]
        super().cache_full_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs
        )
        self._rehashed(rehashed, hashes)

    def cache_partial_block(
        self, request: Any, block: KVCacheBlock, *args: Any, **kwargs: Any
    ) -> bytes | None:
        """As stock; the block may have been given other content than was recorded."""
        before = block.block_hash
        block_hash: bytes | None = super().cache_partial_block(request, block, *args, **kwargs)
        if block.zone is not Zone.ORDINARY:
            self._rehashed([block], [before])
        return block_hash

    def move_block_hashes(self, src_block: KVCacheBlock, dst_block: KVCacheBlock) -> None:
        """As stock; sessions follow the content."""
        super().move_block_hashes(src_block, dst_block)
        before = src_block.zone
        if before is Zone.ORDINARY:
            return
        dst_block._session_ref_cnt = src_block._session_ref_cnt
        dst_block._ttl_expire_at = src_block._ttl_expire_at
        src_block._session_ref_cnt = 0
        src_block._ttl_expire_at = 0.0
        changed = [b for b in (src_block, dst_block) if b.prev_free_block is not None]
        self.free_block_queue.enter(changed, Placement.BACK)
        if self.observer is not None:
            self.observer.block_moved(src_block.block_id, dst_block.block_id)

    def reset_prefix_cache(self) -> bool:
        """As stock; if it succeeds, no session holds a block any more."""
        done: bool = super().reset_prefix_cache()
        if done:
            self.drop_all_meta()
            if self.observer is not None:
                self.observer.pool_reset()
        return done

    def _rehashed(
        self, blocks: Sequence[AgentKVCacheBlock], before: Sequence[bytes | None]
    ) -> None:
        changed = [b for b, h in zip(blocks, before, strict=True) if b.block_hash != h]
        if changed:
            self._content_left(changed)
            free = [block for block in changed if block.prev_free_block is not None]
            self.free_block_queue.enter(free, Placement.BACK)

    def _content_left(
        self, blocks: Iterable[AgentKVCacheBlock], counter: Counter[Zone] | None = None
    ) -> None:
        """Zero the scalars of blocks whose content is gone, and say so.

        Args:
            blocks: Which; all in zone B or C.
            counter: Counts them by zone.
        """
        gone: list[int] = []
        num_protected = 0
        for block in blocks:
            num_protected += block._ttl_expire_at != 0.0
            block._session_ref_cnt = 0
            block._ttl_expire_at = 0.0
            gone.append(block.block_id)
        for zone, number in ((_TTL, num_protected), (_SESSION, len(gone) - num_protected)):
            self._count(zone, _ORDINARY, number)
            if counter is not None and number:
                counter[zone] += number
        if gone:
            self.free_block_queue.has_sessions = self.num_retained_blocks > 0
            if self.observer is not None:
                self.observer.blocks_reused(gone)

    def _report_shortage(self, num_blocks: int) -> None:
        if self.observer is not None:
            self.observer.pool_short(num_blocks)

    def _report_choice(self, zone: Zone, num_blocks: int) -> int:
        return 0 if self.observer is None else self.observer.blocks_wanted(zone, num_blocks)
