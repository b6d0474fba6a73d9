"""One adapter per KV connector of vLLM; the only files that know what a connector looks like."""

from functools import partial
from typing import Any

from vllm_agent_hint.pooling.store import Store


def store_for(scheduler: Any, connector: Any) -> Store | None:
    """The adapter for a connector of vLLM's own; None if it is none that we know.

    Args:
        scheduler: vLLM's, which owns the connector.
        connector: Its scheduler side.
    """
    names = {cls.__name__ for cls in type(connector).__mro__}
    if "OffloadingConnector" in names:
        from vllm_agent_hint.pooling.adapters.offloading import OffloadingStore

        return OffloadingStore(scheduler, connector)
    if "MooncakeStoreConnector" in names:
        from vllm_agent_hint.pooling.adapters.mooncake import MooncakeStore

        return MooncakeStore(scheduler, connector)
    if "SimpleCPUOffloadConnector" in names:
        from vllm_agent_hint.pooling.adapters.simple_cpu import SimpleCPUStore

        return SimpleCPUStore(scheduler, connector)
    if "LMCacheMPConnector" in names:
        from vllm_agent_hint.pooling.adapters.lmcache_mp import LMCacheMPStore

        return LMCacheMPStore(scheduler, connector)
    if "AscendStoreConnector" in names:
        from vllm_agent_hint.pooling.adapters.ascend_store import AscendStore

        return AscendStore(scheduler, connector)
    if "MultiConnector" in names:
        from vllm_agent_hint.pooling.adapters.multi import multi_store

        return multi_store(connector._connectors, partial(store_for, scheduler))
    return None
