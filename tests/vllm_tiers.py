"""vLLM's own tiers behind its ``OffloadingConnector``, on a machine without a GPU.

Specs, managers, policies and the tier of files are vLLM's. Only its worker needs CUDA: ours copies
in its stead, into the memory in which vLLM's managers look for the chunks.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from vllm_agent_hint.pooling.tier.worker import TorchTierWorker


class TorchWorker(TorchTierWorker):
    """Copies what vLLM's managers say, which know no files of ours."""

    def _pieces(self, gpu: Any, tier: Any) -> Iterator[Any]:
        return super()._pieces(gpu, SimpleNamespace(block_ids=tier.block_ids, files=[]))


class CPUTier(CPUOffloadingSpec):
    """vLLM's tier of host memory."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            self._worker = _worker_of(self, kv_caches)
        return self._worker


class DiskTier(TieringOffloadingSpec):
    """vLLM's tier of host memory with tiers below it."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            worker = _worker_of(self, kv_caches)
            worker._host = [
                region.create_next_worker_view(self.blocks_per_chunk * tensor.page_size_bytes).view(
                    self.num_chunks, self.blocks_per_chunk, tensor.page_size_bytes
                )
                for tensor in kv_caches.tensors
            ]
            self._worker = worker
        return self._worker


def _worker_of(spec: Any, kv_caches: Any) -> TorchWorker:
    return TorchWorker(
        kv_caches,
        blocks_per_chunk=spec.blocks_per_chunk,
        num_chunks=spec.num_chunks,
        rank=spec.config.parallel.rank,
    )
