"""What vLLM's ``OffloadingConnector`` builds from ``kv_connector_extra_config``."""

from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import OffloadingManager, OffloadingWorker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from vllm_agent_hint.pooling.tier.files import namespace
from vllm_agent_hint.pooling.tier.folder import ChunkFolder
from vllm_agent_hint.pooling.tier.manager import SessionAwareOffloadingManager
from vllm_agent_hint.pooling.tier.options import TierOptions
from vllm_agent_hint.pooling.tier.worker import TorchTierWorker


class AgentHintOffloadingSpec(CPUOffloadingSpec):
    """vLLM's CPU tier with a manager that knows sessions, on any platform.

    Stock's spec works out how large a chunk is and how many there are. On a GPU, and without a
    directory or a throttle, its own worker does the copying; everywhere else ours does, since
    stock's refuses the CPU platform and knows no files.
    """

    def __init__(self, config: Any) -> None:
        self.options = TierOptions.read(config.extra_config)
        super().__init__(config)
        self._session_manager: SessionAwareOffloadingManager | None = None
        self._torch_worker: TorchTierWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """See ``OffloadingSpec``."""
        if self._session_manager is None:
            self._session_manager = SessionAwareOffloadingManager(self._num_chunks, self._folder())
        return self._session_manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """See ``OffloadingSpec``."""
        if self._is_plain and super()._uses_shared_region():
            return super().get_worker(kv_caches)
        if self._torch_worker is None:
            self._torch_worker = TorchTierWorker(
                kv_caches,
                blocks_per_chunk=self.blocks_per_chunk,
                num_chunks=self._num_chunks,
                rank=self.config.parallel.rank,
                load_bytes_per_second=self.options.load_bytes_per_second,
                save_bytes_per_second=self.options.save_bytes_per_second,
            )
        return self._torch_worker

    def _uses_shared_region(self) -> bool:
        return self._is_plain and super()._uses_shared_region()

    @property
    def _is_plain(self) -> bool:
        """Whether stock's own worker could do all that is asked for."""
        options = self.options
        throttles = (options.load_bytes_per_second, options.save_bytes_per_second)
        return options.directory is None and throttles == (None, None)

    @property
    def _num_chunks(self) -> int:
        # Called num_blocks before vLLM knew chunks.
        found = getattr(self, "num_chunks", None)
        return int(self.num_blocks if found is None else found)

    def _folder(self) -> ChunkFolder | None:
        if self.options.directory is None:
            return None
        config, parallel = self.config, self.config.parallel
        group = namespace(
            {
                "model": (config.model.name, config.model.dtype),
                "groups": [(g.tokens_per_block, g.layer_names) for g in config.groups],
                "bytes": config.worker_kv_bytes_per_block,
                "blocks_per_chunk": config.cache.blocks_per_chunk,
                "tokens_per_hash": config.cache.tokens_per_hash,
                "parallel": (parallel.tp_size, parallel.pp_size, parallel.dcp_size),
                "layout": config.kv_cache_layout,
            }
        )
        root = Path(self.options.directory)
        root.mkdir(parents=True, exist_ok=True)
        return ChunkFolder(root, group, parallel.world_size, self.options.directory_bytes)
