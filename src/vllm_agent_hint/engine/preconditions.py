"""Whether what vLLM has built is what retention can work with: the third ring of failing open."""

from typing import Any

from vllm_agent_hint.kvcache.block import AgentKVCacheBlock
from vllm_agent_hint.kvcache.manager import KVCacheManagerMixin
from vllm_agent_hint.kvcache.pool import AgentBlockPool
from vllm_agent_hint.kvcache.queue import AgentFreeKVCacheBlockQueue


def why_unfit(manager: Any, parallel_config: Any) -> str:
    """Why a scheduler has to go on without sessions; empty if it need not.

    Args:
        manager: The KV cache manager that it has built.
        parallel_config: vLLM's; None where it is not known.
    """
    return _why_not_with(manager) or _why_not_alone(parallel_config)


def _why_not_with(manager: Any) -> str:
    """Why retention can't work with what the scheduler has built; empty if it can."""
    if not isinstance(manager, KVCacheManagerMixin):
        return f"the scheduler built its own KV cache manager, {type(manager).__name__}"
    if getattr(manager.kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        return "HiSparse orders the free queue itself"
    pool = manager.block_pool
    if not isinstance(pool, AgentBlockPool):
        return f"the coordinator built its own block pool, {type(pool).__name__}"
    if not pool.enable_caching:
        return "prefix caching is off"
    queue = pool.free_block_queue
    if type(queue) is not AgentFreeKVCacheBlockQueue:
        return f"the pool has another free queue, {type(queue).__name__}"
    if any(type(block) is not AgentKVCacheBlock for block in pool.blocks):
        return "the pool holds blocks of another class"
    if queue.num_free_blocks != len(pool.blocks) - 1:
        return "the pool does not start with every block free"
    return ""


def _why_not_alone(parallel_config: Any) -> str:
    """Why this scheduler must not decide by its own clock; empty if it may."""
    backend = getattr(parallel_config, "distributed_executor_backend", None)
    if backend == "external_launcher" and parallel_config.world_size > 1:
        return (
            "with external_launcher every rank has a scheduler of its own and all must decide the "
            "same, which expiry by the clock can't promise"
        )
    return ""
