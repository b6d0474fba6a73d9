"""vLLM's ``MooncakeStoreConnector``: a pool of KV blocks that many servers share."""

from typing import Any

from vllm.v1.core import kv_cache_utils

from vllm_agent_hint.pooling.adapters.mooncake_pages import MooncakePages
from vllm_agent_hint.pooling.adapters.write_through import WriteThroughStore
from vllm_agent_hint.pooling.capability import Content, Operation
from vllm_agent_hint.pooling.manifest import SessionManifest
from vllm_agent_hint.pooling.probe import PROBE_ID
from vllm_agent_hint.pooling.tier.files import namespace


class MooncakeStore(WriteThroughStore):
    """See ``Store``.

    Mooncake's look-up grants what it finds a lease and makes it the most recently used. Generated
    tokens are saved only with ``save_decode_cache`` in the connector's own configuration: without
    it an offload of a turn that has generated a block is ``partial``.

    Args:
        scheduler: vLLM's.
        connector: A ``MooncakeStoreConnector`` of the scheduler's side.
    """

    def __init__(self, scheduler: Any, connector: Any) -> None:
        super().__init__(scheduler, connector)
        self._side = connector.connector_scheduler
        self._config = scheduler.vllm_config
        self.manifest = self._open_manifest()

    def _open_manifest(self) -> SessionManifest | None:
        """Beside the blocks, under a name that only servers share whose blocks are exchangeable.

        ``"agent_hint_manifest": false`` in the connector's configuration does without the client
        that it takes.
        """
        options = self._config.kv_transfer_config.kv_connector_extra_config
        if not options.get("agent_hint_manifest", True):
            return None
        parts = {
            "model": self._config.model_config.model.rstrip("/").split("/")[-1],
            "cache_prefix": options.get("cache_prefix", ""),
        }
        return SessionManifest(MooncakePages(f"agent-hint@{namespace(parts)}"), self._hash_scheme)

    def _hash_scheme(self) -> str:
        return namespace(
            {
                "algorithm": self._config.cache_config.prefix_caching_hash_algo,
                "begins_with": kv_cache_utils.NONE_HASH.hex(),
                "unit": self._tokens_per_hash,
            }
        )

    def why_not(self, operation: Operation) -> str:
        """See ``Store``."""
        if not self._side.enable_lookup:
            return "enable_lookup is off in the connector's configuration"
        if operation is Operation.PREFETCH and not self._side.load_async:
            return "load_async is off in the connector's configuration"
        return super().why_not(operation)

    def loadable_tokens(self, content: Content) -> int | None:
        """See ``Store``. A round trip to the store, as for each request that vLLM looks up."""
        if not content.hashes:
            return 0
        found = self._side.client.lookup(
            PROBE_ID, content.num_tokens + 1, list(content.hashes), non_block=False
        )
        return 0 if found is None else int(getattr(found, "hit_length", found))

    @property
    def _tokens_per_hash(self) -> int:
        return int(self._side._hash_block_size)
