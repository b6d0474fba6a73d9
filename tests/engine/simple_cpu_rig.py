"""vLLM's real scheduler and both real sides of its SimpleCPUOffloadConnector, but for the copying.

The connector's worker copies between CUDA streams, which there are none of here: what it is told to
copy is copied between two tensors instead, and everything else of it is vLLM's own class.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

from tests.engine.pooling_rig import Faults, PoolingEngine
from tests.engine.rig import BLOCK, make_scheduler
from vllm_agent_hint.cli.bench import engine as bench_engine
from vllm_agent_hint.settings import Settings


class TensorBackend:
    """In place of vLLM's ``DmaCopyBackend``: copies at once, is done when it is said to be."""

    def __init__(self, gpu: torch.Tensor, cpu: torch.Tensor, faults: Faults) -> None:
        self._gpu, self._cpu, self._faults = gpu, cpu, faults

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[Any],
        wait_event: Any = None,
    ) -> None:
        source, target = (self._gpu, self._cpu) if is_store else (self._cpu, self._gpu)
        target[dst_blocks] = source[src_blocks]
        done = SimpleNamespace(query=lambda: not self._faults.is_silent, synchronize=lambda: None)
        events_list.append((event_idx, done))


@dataclass
class SimpleCPUEngine(PoolingEngine):
    """An engine whose connector is a ``SimpleCPUOffloadConnector``."""

    def _executed(self, output: Any) -> tuple[Any, ...]:
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        self.worker.handle_preemptions(output.kv_connector_metadata)
        self._forward(output)
        self.worker.start_load_kv()
        with patch.object(torch.cuda, "current_stream", lambda: None):
            self.worker.wait_for_save()
        executed = output, self._sampling(output), self._transfers(output)
        self.worker.clear_connector_metadata()
        return executed

    def _transfers(self, output: Any) -> KVConnectorOutput:
        _, received = self.worker.get_finished(output.finished_req_ids)
        return KVConnectorOutput(
            finished_recving=received,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )

    @property
    def copies(self) -> Any:
        """The connector's block pool."""
        return self.scheduler.connector.scheduler_manager.cpu_block_pool

    def _assert_that_the_connector_rests(self) -> None:
        store, side = self.remote.spm.store, self.scheduler.connector.scheduler_manager
        assert not store._saves
        assert not store._doomed
        assert not side._reqs_to_load
        assert not side._reqs_to_store
        assert not side._pending_cpu_hits
        assert not side._in_flight_store_gpu_blocks
        assert not side.has_pending_stores()
        assert self.copies.get_num_free_blocks() == self.copies.num_gpu_blocks - 1


def simple_cpu_engine(
    *,
    num_blocks: int = 40,
    copies: int = 400,
    lazy: bool = False,
    settings: Settings | None = None,
    asynchronous: bool = False,
    **more: Any,
) -> SimpleCPUEngine:
    """An engine over a connector with room for so many copies.

    Args:
        num_blocks: Of the GPU cache.
        copies: Of the connector's pool, the null block included.
        lazy: The connector's ``lazy_offload``: it saves only what is about to be reused.
        settings: The plugin's.
        asynchronous: Async scheduling, two steps in flight.
        more: For ``make_scheduler``.
    """
    plain = bench_engine.cache_config_of

    def with_a_tensor(specs: Any, num_blocks: int) -> Any:
        config = plain(specs, num_blocks)
        page = max(spec.page_size_bytes for spec in specs)
        size = page * num_blocks
        config.kv_cache_tensors.append(KVCacheTensor(size, ["layer0"], size, page))
        return config

    page = bench_engine.full_attention()[0].page_size_bytes
    config = KVTransferConfig(
        kv_connector="SimpleCPUOffloadConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": copies * page, "lazy_offload": lazy},
    )
    with patch.object(bench_engine, "cache_config_of", with_a_tensor):
        scheduler = make_scheduler(
            plugged=True,
            num_blocks=num_blocks,
            settings=settings or Settings(prefetch_reserve=0.0, protected_share=1.0),
            asynchronous=asynchronous,
            kv_transfer_config=config,
            **{"max_num_batched_tokens": 512, **more},
        )
    side = scheduler.connector.scheduler_manager
    assert side.num_cpu_blocks == copies
    # Nobody takes the counters while a test runs, so that it can read them.
    scheduler.agent_hint.remote.statistics = lambda: None
    engine = SimpleCPUEngine(scheduler, depth=2 if asynchronous else 1)
    engine.cache = torch.zeros((num_blocks, BLOCK), dtype=torch.int8)
    engine.worker = SimpleCPUOffloadWorker(
        scheduler.vllm_config, scheduler.kv_cache_config, copies * page
    )
    engine.worker._backend = TensorBackend(
        engine.cache, torch.zeros((copies, BLOCK), dtype=torch.int8), engine.faults
    )
    engine.worker._store_compute_done = SimpleNamespace(record=lambda stream: None)
    return engine
