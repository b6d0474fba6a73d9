"""The only thing that the session core knows of KV cache blocks: how to mark them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from vllm_agent_hint.settings import Placement


class BlockMetaUpdateResult(Enum):
    """Outcome of ``update_block_meta``. Anything but UPDATED has changed nothing."""

    UPDATED = "updated"
    STALE_HASH = "the block no longer holds the expected content"
    NEGATIVE_COUNT = "the session count would fall below zero"
    NULL_BLOCK = "the null block is never retained"
    UNKNOWN_BLOCK = "no such block in this pool"


@dataclass(slots=True)
class BulkMetaUpdate:
    """Outcome of ``update_blocks_meta``.

    Args:
        updated: Blocks whose scalars now hold what was asked for.
        made_ordinary: Free blocks that entered zone A, where allocation looks first.
        refused: ``(block id, reason)`` of the others.
    """

    updated: int = 0
    made_ordinary: int = 0
    refused: list[tuple[int, BlockMetaUpdateResult]] = field(default_factory=list)


class BlockMetaPort(Protocol):
    """What the session core asks of a block pool; ``kvcache`` implements it on vLLM's."""

    num_gpu_blocks: int

    @property
    def num_retained_blocks(self) -> int:
        """Blocks in zones B and C, active ones included, each once."""

    def ttl_expire_at(self, block_id: int) -> float:
        """The deadline that a block carries; 0.0 if none."""

    def are_free(self, block_ids: Sequence[int], *, leased: bool) -> Sequence[bool]:
        """Of each block, whether no request uses it and it has a deadline, or has none."""

    def reuse_next(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Bring free blocks to the front of the zone that they are in.

        Args:
            blocks: Ids, and the hash that each must still hold, in the order of reuse.
        """

    def cached_block(self, block_hash: bytes) -> tuple[int, bytes] | None:
        """The block that a prefix match would return for this hash, and its own hash object."""

    def update_blocks_meta(
        self,
        block_ids: Sequence[int],
        expected_block_hashes: Sequence[bytes],
        *,
        session_ref_delta: int = 0,
        ttl_expire_at: float | Sequence[float] | None = None,
        placement: Placement = Placement.BACK,
    ) -> BulkMetaUpdate:
        """Mark blocks, in the order in which they should be reused.

        Args:
            block_ids: Physical ids.
            expected_block_hashes: The hash that each must still hold.
            session_ref_delta: Added to each block's session count.
            ttl_expire_at: Monotonic seconds, 0.0 for none; one for all or one each.
                None leaves the deadlines alone.
            placement: The end of the new zone at which a free block enters, if its zone changes.
        """
