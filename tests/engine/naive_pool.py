"""What a block pool that knows sessions means: five lists and a naive queue."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tests.engine.naive_queue import NaiveQueue, zone_of
from vllm_agent_hint.sessions.blockmeta import BlockMetaUpdateResult
from vllm_agent_hint.settings import Placement

NULL = 0


class NaivePool:
    """Block 0 is the null block. Hashes are opaque; a block's first is its own.

    Args:
        num_blocks: The null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self.ref_cnt = [0] * num_blocks
        self.hashes: list[list[Any]] = [[] for _ in range(num_blocks)]
        self.count = [0] * num_blocks
        self.deadline = [0.0] * num_blocks
        self.cached: dict[Any, list[int]] = {}
        self.queue = NaiveQueue(range(1, num_blocks))
        self.reported: list[tuple[Any, ...]] = []
        """What an observer has been told."""
        self.overrides = Counter[str]()

    @property
    def ids(self) -> range:
        return range(len(self.ref_cnt))

    @property
    def zones(self) -> dict[int, str]:
        return {i: zone_of(self.count[i], self.deadline[i]) for i in self.ids}

    # -- stock's operations ----------------------------------------------------------------------

    def get_new_blocks(self, n: int) -> list[int]:
        if n > len(self.queue.order):
            raise ValueError
        taken = self.queue.popleft_n(n)
        for i in taken:
            self._drop_hashes(i)
            self.ref_cnt[i] += 1
        retained = [i for i in taken if self.zones[i] != "A"]
        self.overrides.update(self.zones[i] for i in retained)
        self._content_left(retained)
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        for i in block_ids:
            self.queue.remove(i)
            self.ref_cnt[i] += 1

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        released = []
        for i in block_ids:
            self.ref_cnt[i] -= 1
            if self.ref_cnt[i] == 0:
                released.append(i)
        self.queue.prepend_n([i for i in released if not self.hashes[i]])
        self.queue.append_n([i for i in released if self.hashes[i]], self.zones)

    def cache(self, block_id: int, block_hash: Any) -> None:
        if block_hash not in self.hashes[block_id]:
            self.hashes[block_id].append(block_hash)
            self.cached.setdefault(block_hash, []).append(block_id)

    def cached_block(self, block_hash: Any) -> tuple[int, Any] | None:
        holders = self.cached.get(block_hash)
        return (holders[0], self.hashes[holders[0]][0]) if holders else None

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        retained = [i for i in block_ids if self.zones[i] != "A"]
        for i in block_ids:
            self._drop_hashes(i)
        self._content_left(retained)
        free = [i for i in retained if i in self.queue.order]
        self.queue.enter(free, self.zones, Placement.FRONT)

    def move_block_hashes(self, source: int, target: int) -> None:
        hashes = list(self.hashes[source])
        self._drop_hashes(source)
        for block_hash in hashes:
            self.cache(target, block_hash)
        if self.zones[source] == "A":
            return
        self.count[target], self.deadline[target] = self.count[source], self.deadline[source]
        self.count[source], self.deadline[source] = 0, 0.0
        free = [i for i in (source, target) if i in self.queue.order]
        self.queue.enter(free, self.zones, Placement.BACK)
        self.reported.append(("moved", source, target))

    def reset_prefix_cache(self) -> bool:
        if any(self.ref_cnt):
            return False
        for i in self.ids:
            self._drop_hashes(i)
            self.count[i], self.deadline[i] = 0, 0.0
        self.queue.fold()
        self.reported.append(("reset",))
        return True

    def _drop_hashes(self, block_id: int) -> None:
        for block_hash in self.hashes[block_id]:
            self.cached[block_hash].remove(block_id)
        self.hashes[block_id] = []

    def _content_left(self, block_ids: Sequence[int]) -> None:
        for i in block_ids:
            self.count[i], self.deadline[i] = 0, 0.0
        if block_ids:
            self.reported.append(("reused", *block_ids))

    # -- the two scalars -------------------------------------------------------------------------

    def why_refused(self, block_id: int, expected: Any, delta: int) -> BlockMetaUpdateResult:
        if block_id not in self.ids:
            return BlockMetaUpdateResult.UNKNOWN_BLOCK
        if block_id == NULL:
            return BlockMetaUpdateResult.NULL_BLOCK
        if not self.hashes[block_id] or self.hashes[block_id][0] != expected:
            return BlockMetaUpdateResult.STALE_HASH
        if self.count[block_id] + delta < 0:
            return BlockMetaUpdateResult.NEGATIVE_COUNT
        return BlockMetaUpdateResult.UPDATED

    def update_blocks_meta(
        self,
        block_ids: Sequence[int],
        expected: Sequence[Any],
        delta: int,
        deadlines: Sequence[float | None],
        placement: Placement = Placement.BACK,
    ) -> list[BlockMetaUpdateResult]:
        """Mark blocks; those that are free and change zone enter the new one together."""
        before = self.zones
        results = []
        for i, block_hash, deadline in zip(block_ids, expected, deadlines, strict=True):
            results.append(self.why_refused(i, block_hash, delta))
            if results[-1] is BlockMetaUpdateResult.UPDATED:
                self.count[i] += delta
                if deadline is not None:
                    self.deadline[i] = deadline
        moved = [
            i
            for i, result in zip(block_ids, results, strict=True)
            if result is BlockMetaUpdateResult.UPDATED
            and self.zones[i] != before[i]
            and i in self.queue.order
        ]
        self.queue.enter(moved, self.zones, placement)
        return results
