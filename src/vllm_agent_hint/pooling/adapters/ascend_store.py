"""vllm-ascend's ``AscendStoreConnector``: a pool of KV blocks beside NPUs."""

from typing import Any

from vllm_agent_hint.pooling.adapters.write_through import WriteThroughStore
from vllm_agent_hint.pooling.capability import Operation


class AscendStore(WriteThroughStore):
    """See ``Store``.

    Generated tokens are saved only with ``save_decode_cache`` in the connector's own configuration.
    Of its backends, Mooncake's look-up grants what it finds a lease; what others do is unknown.

    Args:
        scheduler: vLLM's.
        connector: An ``AscendStoreConnector`` of the scheduler's side.
    """

    def __init__(self, scheduler: Any, connector: Any) -> None:
        super().__init__(scheduler, connector)
        self._side = connector.connector_scheduler

    def why_not(self, operation: Operation) -> str:
        """See ``Store``."""
        if operation is Operation.PREFETCH:
            if self._side.use_layerwise:
                return "with use_layerwise it loads only for a request that the model runs"
            if not self._side.load_async:
                return "load_async is off in the connector's configuration"
        if operation is Operation.KEEP_ALIVE and self._side.backend_name != "mooncake":
            return f"whether a look-up in {self._side.backend_name} keeps alive is unknown"
        return super().why_not(operation)

    def _forget(self, request: Any) -> None:
        """Else the next look-up of a request would find what this one has noted."""
        self._side.load_specs.pop(request.request_id, None)
        self._side._request_trackers.pop(request.request_id, None)

    @property
    def _tokens_per_hash(self) -> int:
        return int(self._side.hash_block_size)
