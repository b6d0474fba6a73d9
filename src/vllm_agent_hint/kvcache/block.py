"""A KV cache block with two scalars more."""

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Zone(IntEnum):
    """Where a block's scalars place it in the free queue; allocation takes the lowest first."""

    ORDINARY = 0
    SESSION = 1
    TTL = 2


@dataclass(slots=True, repr=False, eq=False)
class AgentKVCacheBlock(KVCacheBlock):
    """``KVCacheBlock`` and what sessions want of it.

    ``_session_ref_cnt`` counts the sessions that record the block, apart from ``ref_cnt``, which
    counts running requests. ``_ttl_expire_at`` is the latest deadline that one of them gives it,
    in monotonic seconds, 0.0 for none. Only ``AgentBlockPool`` writes them.
    """

    _session_ref_cnt: int = 0
    _ttl_expire_at: float = 0.0

    @property
    def zone(self) -> Zone:
        """A function of the two scalars alone, never of the clock."""
        if self._ttl_expire_at:
            return Zone.TTL
        return Zone.SESSION if self._session_ref_cnt else Zone.ORDINARY


HAS_POOL_FIELD = any(f.name == "pool" for f in fields(KVCacheBlock))
"""vLLM 0.30 and later tell a block its pool."""


def make_block(block_id: int, pool: Any) -> AgentKVCacheBlock:
    """Build a block as this version of vLLM's pool does."""
    if HAS_POOL_FIELD:
        return AgentKVCacheBlock(block_id, pool=pool)
    return AgentKVCacheBlock(block_id)
