"""A block pool in plain Python, which holds the session core to its contract."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from vllm_agent_hint.sessions.blockmeta import BlockMetaUpdateResult, BulkMetaUpdate
from vllm_agent_hint.settings import Placement

NULL = 0


def content_hash(group: int, tokens: Sequence[object]) -> bytes:
    """The hash of a block, which stands for everything up to its end. A new object each time."""
    return blake2b(repr((group, *tokens)).encode(), digest_size=16).digest()


@dataclass
class PlainBlock:
    """A block's content and its two scalars."""

    hash: bytes | None = None
    count: int = 0
    deadline: float = 0.0
    users: int = 0

    @property
    def is_retained(self) -> bool:
        return self.count > 0 or self.deadline != 0.0


class PlainPort:
    """Implements ``BlockMetaPort``. Asserts what the session core must not get wrong.

    Args:
        num_blocks: The null block included.
        is_strict: Whether a stale hash or a negative count is the session core's fault. It is
            as long as the core is told of every content that goes away.
    """

    def __init__(self, num_blocks: int, *, is_strict: bool = True) -> None:
        self.num_gpu_blocks = num_blocks
        self.is_strict = is_strict
        self.blocks = [PlainBlock() for _ in range(num_blocks)]
        self.cached: dict[bytes, list[int]] = {}
        """Block ids of each content; a prefix match returns the first."""
        self.free = list(range(1, num_blocks))
        """Block ids that no request uses, first freed first."""
        self.fronted: list[int] = []
        """Block ids that entered a zone before all others there, first to be reused first."""
        self.on_reuse: Callable[[list[int]], None] = lambda _: None
        """Told of retained blocks whose content is gone, as the session core is."""
        self.on_gone: Callable[[int], None] = lambda _: None
        """Told of every block whose content is gone."""
        self.on_shortage: Callable[[int], None] = lambda _: None
        self.on_choice: Callable[[int, int], object] = lambda _zone, _number: None

    # -- BlockMetaPort -----------------------------------------------------------------------------

    @property
    def num_retained_blocks(self) -> int:
        return sum(block.is_retained for block in self.blocks)

    def ttl_expire_at(self, block_id: int) -> float:
        return self.blocks[block_id].deadline

    def are_free(self, block_ids: Sequence[int], *, leased: bool) -> list[bool]:
        return [i in self.free and bool(self.blocks[i].deadline) is leased for i in block_ids]

    def reuse_next(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        chosen = [block_id for block_id, _ in blocks]
        assert len(set(chosen)) == len(chosen), "a block was named twice"
        for block_id, block_hash in blocks:
            assert self.blocks[block_id].hash == block_hash, "the content is another"
            assert self.blocks[block_id].is_retained
            assert block_id in self.free
        self.free = chosen + [i for i in self.free if i not in chosen]

    def cached_block(self, block_hash: bytes) -> tuple[int, bytes] | None:
        holders = self.cached.get(block_hash)
        if not holders:
            return None
        own_hash = self.blocks[holders[0]].hash
        assert own_hash is not None
        return holders[0], own_hash

    def update_blocks_meta(
        self,
        block_ids: Sequence[int],
        expected_block_hashes: Sequence[bytes],
        *,
        session_ref_delta: int = 0,
        ttl_expire_at: float | Sequence[float] | None = None,
        placement: Placement = Placement.BACK,
    ) -> BulkMetaUpdate:
        assert len(block_ids) == len(expected_block_hashes)
        assert len(set(block_ids)) == len(block_ids), "a block was named twice"
        done = BulkMetaUpdate()
        for k, block_id in enumerate(block_ids):
            assert NULL < block_id < self.num_gpu_blocks
            block = self.blocks[block_id]
            if self.is_strict:
                assert block.hash == expected_block_hashes[k], "the content is another"
                assert block.count + session_ref_delta >= 0, "a count below zero"
            elif block.hash != expected_block_hashes[k]:
                done.refused.append((block_id, BlockMetaUpdateResult.STALE_HASH))
                continue
            zone = _zone(block)
            block.count += session_ref_delta
            if ttl_expire_at is not None:
                each = isinstance(ttl_expire_at, Sequence)
                block.deadline = ttl_expire_at[k] if each else ttl_expire_at
                assert block.deadline >= 0.0
            done.updated += 1
            if _zone(block) != zone:
                done.made_ordinary += not block.users and not block.is_retained
                if placement is Placement.FRONT:
                    self.fronted.append(block_id)
        return done

    # -- what requests do --------------------------------------------------------------------------

    def allocate(self, block_hash: bytes) -> int | None:
        """A block for new content: ordinary ones first, then held ones, then protected ones."""
        if not self.free:
            return None
        if all(self.blocks[i].is_retained for i in self.free):
            self.on_shortage(1)
        zone = min(_zone(self.blocks[i]) for i in self.free)
        if zone:
            self.on_choice(zone, 1)
        block_id = min(self.free, key=lambda i: _zone(self.blocks[i]))
        self.lose(block_id)
        self.blocks[block_id].hash = block_hash
        self.cached.setdefault(block_hash, []).append(block_id)
        self.use(block_id)
        return block_id

    def use(self, block_id: int) -> None:
        self.blocks[block_id].users += 1
        if block_id in self.free:
            self.free.remove(block_id)

    def give_back(self, block_id: int) -> None:
        self.blocks[block_id].users -= 1
        if not self.blocks[block_id].users:
            self.free.append(block_id)

    def lose(self, block_id: int, *, unseen: bool = False) -> None:
        """A block's content goes away; its marks go with it, and the session core is told."""
        block = self.blocks[block_id]
        if block.hash is not None:
            self.cached[block.hash].remove(block_id)
        was_retained = block.is_retained
        block.hash, block.count, block.deadline = None, 0, 0.0
        self.on_gone(block_id)
        if was_retained and not unseen:
            self.on_reuse([block_id])

    def move(self, source: int, target: int) -> None:
        """Content and marks now lie in another block, which was empty."""
        old, new = self.blocks[source], self.blocks[target]
        assert old.hash is not None
        assert new.hash is None
        self.cached[old.hash].remove(source)
        self.cached[old.hash].append(target)
        new.hash, new.count, new.deadline = old.hash, old.count, old.deadline
        old.hash, old.count, old.deadline = None, 0, 0.0

    def reset(self) -> None:
        """Every content is gone, as after new weights."""
        for block in self.blocks:
            assert not block.users
            block.hash, block.count, block.deadline = None, 0, 0.0
        self.cached.clear()


def _zone(block: PlainBlock) -> int:
    return 2 if block.deadline else 1 if block.count else 0
