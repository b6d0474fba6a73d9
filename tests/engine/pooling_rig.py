"""vLLM's real scheduler and OffloadingConnector over the tier, with a KV cache that can be read.

The stand-in for the model writes each token that it is given into the cache, and checks what it
finds there of the tokens before: content that got lost on its way is an error at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.outputs import KVConnectorOutput

from tests.engine.rig import BLOCK, Engine, make_scheduler
from vllm_agent_hint.cli.bench.engine import SAMPLED_TOKEN, model_output
from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.pooling.tier.worker import TorchTierWorker
from vllm_agent_hint.settings import Settings

CHUNK_BYTES = 4_096
"""vLLM rounds up to it what a chunk of the rig's tiny blocks would take."""


@dataclass
class Faults:
    """What goes wrong in the store."""

    is_silent: bool = False
    """Transfers are made and their end is never reported."""
    loads_to_lose: int = 0
    """So many loads end without having brought anything, and say so."""


@dataclass
class PoolingEngine(Engine):
    """An engine whose connector really copies."""

    faults: Faults = field(default_factory=Faults)
    cache: Any = None
    side: Any = None
    worker: Any = None
    ran: list[str] = field(default_factory=list)
    """Requests that the model was given tokens of."""

    def _executed(self, output: Any) -> tuple[Any, ...]:
        self.side.handle_preemptions(output.kv_connector_metadata)
        self._forward(output)
        self.side.start_kv_transfers(output.kv_connector_metadata)
        self.side.prepare_store_kv(output.kv_connector_metadata)
        return output, self._sampling(output), self._transfers(output)

    def _transfers(self, output: Any) -> KVConnectorOutput:
        result = KVConnectorOutput()
        if self.faults.is_silent:
            return result
        if self.faults.loads_to_lose:
            for job in self.worker._jobs:
                if job.is_load and job.pieces:
                    self.faults.loads_to_lose -= 1
                    lost = {block for piece in job.pieces for block in piece.block_ids}
                    self.worker.failed_loads[job.job_id] = lost
                    job.pieces = []
        # What it reads from files is there in the next step, however slow the disk is.
        self.worker._reader.submit(bool).result()
        _, result.finished_recving = self.side.get_finished(output.finished_req_ids)
        for blocks in self.worker.take_failed_loads().values():
            result.invalid_block_ids |= blocks
        result.kv_connector_worker_meta = self.side.build_connector_worker_meta()
        return result

    def _forward(self, output: Any) -> None:
        """Writes and checks the first group, which is always one of full attention."""
        for request_id, count in output.num_scheduled_tokens.items():
            self.ran.append(request_id)
            request = self.scheduler.requests[request_id]
            # The scheduler has counted what it has just scheduled.
            end = request.num_computed_tokens
            # With two steps in flight it does not know yet what it will sample.
            ahead = [SAMPLED_TOKEN] * self.depth
            tokens = [*request.all_token_ids, *ahead][:end]
            blocks = self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            for position, token in enumerate(tokens):
                page = self.cache[blocks[position // BLOCK]]
                if position >= end - count:
                    page[position % BLOCK] = token % 127
                else:
                    assert page[position % BLOCK] == token % 127, (
                        f"{request_id} reads another token than was written at {position}"
                    )

    def _return(self, output: Any, sampling: set[str], transfers: Any = None) -> None:
        ids = list(output.num_scheduled_tokens)
        answer = model_output(ids, [[SAMPLED_TOKEN] if r in sampling else [] for r in ids])
        answer.kv_connector_output = transfers
        self.scheduler.update_from_output(output, answer)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step_until_it_ends(self, request_id: str) -> None:
        """A connector may go on for longer than the request."""
        while request_id in self.scheduler.requests:
            self.step()

    def _wants_steps(self) -> bool:
        return bool(self.scheduler.has_requests())

    # -- what tests ask ------------------------------------------------------------------------

    @property
    def remote(self) -> Any:
        assert self.scheduler.agent_hint.remote is not None
        return self.scheduler.agent_hint.remote

    @property
    def tier(self) -> Any:
        return self.scheduler.connector.connector_scheduler.manager

    def ask(self, session_id: str, *edits: str | dict[str, Any], operation_id: str = "op") -> Any:
        """A management call. Returns its results as they are when it answers."""
        wire = [{"type": e} if isinstance(e, str) else e for e in edits]
        answer = self.call("edit", session_id=session_id, edits=wire, operation_id=operation_id)
        return answer["results"]

    def results(self, operation_id: str = "op") -> list[dict[str, Any]]:
        """What an operation has come to."""
        found = self.call("operation", operation_id=operation_id)["operation"]
        assert found is not None
        return list(found["results"])

    def done(self, session_id: str, *edits: str | dict[str, Any]) -> list[dict[str, Any]]:
        """Run edits to their end."""
        self.ask(session_id, *edits)
        self.run()
        return self.results()

    def flood(self, family: int = 90, requests: int = 2) -> None:
        """One-shot traffic that fills the pool."""
        room = (self.pool.num_gpu_blocks - 4) * BLOCK
        for k in range(requests):
            self.serve([11 + (family + k) * 3 + i % 7 for i in range(room)])

    def assert_nothing_is_left(self) -> None:
        """No block is held, nothing waits, and with the sessions every count goes."""
        remote = self.remote
        assert remote.loads.num_loading == remote.loads.num_waiting == 0
        assert remote.spm.num_open == 0
        assert not remote.spm._saves
        assert self.sam.num_open_edits == 0
        assert not self.scheduler.requests
        self._assert_that_the_connector_rests()
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        self.sam.free_all_sessions()
        assert len(remote.spm.tracker) == remote.spm.tracker.num_tracked == 0
        assert remote.spm.tracker.num_shared == 0
        assert self.pool.num_blocks_in[Zone.TTL] == self.pool.num_blocks_in[Zone.SESSION] == 0

    def _assert_that_the_connector_rests(self) -> None:
        side = self.scheduler.connector.connector_scheduler
        assert not side._jobs
        assert not side._req_status
        self._assert_that_the_tier_rests()

    def _assert_that_the_tier_rests(self) -> None:
        assert self.tier.num_busy == 0


def pooling_engine(
    *,
    num_blocks: int = 40,
    chunks: int = 400,
    settings: Settings | None = None,
    policy: str = "recompute",
    asynchronous: bool = False,
    extra: dict[str, Any] | None = None,
    engine_cls: type[PoolingEngine] = PoolingEngine,
    **more: Any,
) -> PoolingEngine:
    """An engine over one group of full attention and a tier of so many chunks.

    Args:
        num_blocks: Of the GPU cache.
        chunks: Of the tier's host memory.
        settings: The plugin's.
        policy: vLLM's ``kv_load_failure_policy``.
        asynchronous: Async scheduling, two steps in flight.
        extra: Options of the tier.
        engine_cls: What is built.
        more: For ``make_scheduler``.
    """
    config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={
            "spec_name": "AgentHintOffloadingSpec",
            "spec_module_path": "vllm_agent_hint.pooling.tier",
            "cpu_bytes_to_use": chunks * CHUNK_BYTES,
            **(extra or {}),
        },
    )
    scheduler = make_scheduler(
        plugged=True,
        num_blocks=num_blocks,
        settings=settings or Settings(prefetch_reserve=0.0, protected_share=1.0),
        asynchronous=asynchronous,
        kv_transfer_config=config,
        **{"max_num_batched_tokens": 512, **more},
    )
    cache = torch.zeros((num_blocks, BLOCK), dtype=torch.int8)
    spec = OffloadingSpecFactory.create_spec(
        build_offloading_config(scheduler.vllm_config, scheduler.kv_cache_config)
    )
    side = OffloadingConnectorWorker(spec, scheduler.vllm_config, scheduler.kv_cache_config)
    side._init_worker(
        CanonicalKVCaches(
            [CanonicalKVCacheTensor(cache, BLOCK)],
            [[CanonicalKVCacheRef(0, BLOCK)] for _ in scheduler.kv_cache_config.kv_cache_groups],
        )
    )
    assert isinstance(side.worker, TorchTierWorker)
    # Nobody takes the counters while a test runs, so that it can read them.
    scheduler.agent_hint.remote.statistics = lambda: None
    engine = engine_cls(scheduler, depth=2 if asynchronous else 1)
    engine.cache, engine.side, engine.worker = cache, side, side.worker
    return engine


def whole(tokens: Sequence[int]) -> int:
    return len(tokens) // BLOCK * BLOCK
