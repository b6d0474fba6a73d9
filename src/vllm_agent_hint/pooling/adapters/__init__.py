"""One adapter per KV connector of vLLM; the only files that know what a connector looks like."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from vllm_agent_hint.pooling.store import Store

_UNSUITED: Final[Mapping[str, str]] = {
    "ExampleConnector": "it loads only for a request that the model runs",
    "LMCacheConnectorV1": "it loads only within a step of the model, and its look-up pins what it "
    "finds until a request has used it; LMCacheMPConnector can",
}
"""Why there is no adapter for a connector that we have looked at."""


def why_no_store(connector: Any) -> str:
    """Why sessions can't be kept through a connector for which ``store_for`` has no adapter."""
    name = type(connector).__name__
    reasons = (_UNSUITED.get(cls.__name__) for cls in type(connector).__mro__)
    reason = next(filter(None, reasons), "")
    return f"there is no adapter for {name}" + (f": {reason}" if reason else "")


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
