"""vllm-ascend's ``AscendStoreConnector`` on vLLM's real scheduler, where its source can be had.

``make stores`` fetches it. Its scheduler's side, its metadata and its look-up over a socket are
the vendor's own classes. What needs an NPU is not there: ``torch_npu`` and Mooncake's client are
empty modules, and in place of the vendor's worker a stand-in does what the metadata say and
reports it as that worker does.
"""

import importlib
import importlib.machinery
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from vllm.config import KVTransferConfig
from vllm.v1.outputs import KVConnectorOutput

from tests.engine.pooling_rig import PoolingEngine
from tests.engine.rig import BLOCK, make_scheduler
from tests.stores import ASCEND
from vllm_agent_hint.settings import Settings

_CONNECTOR = "vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store.ascend_store_connector"
_BACKEND = "vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store.backend.mooncake_backend"
_NOT_HERE = ("torch_npu", "torch_npu.npu", "mooncake", "mooncake.store", "mooncake.engine")


class _EmptyModule(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


@dataclass
class PoolWorker:
    """In place of the vendor's: pages by block hash, as its metadata name them."""

    cache: torch.Tensor
    pages: dict[str, torch.Tensor] = field(default_factory=dict)
    is_silent: bool = False
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    events: dict[int, int] = field(default_factory=dict)

    def lookup_scheduler(
        self, token_len: int, hashes: list[str], kv_group_ids: list[int], **more: Any
    ) -> int:
        found = 0
        for h in hashes[: token_len // BLOCK]:
            if h not in self.pages:
                break
            found += BLOCK
        return found

    def run(self, metadata: Any) -> None:
        for request in metadata.requests:
            (blocks,) = request.block_ids_by_group
            hashes = [h.hex() for h in request.block_hashes]
            load = request.load_spec
            if load is not None and load.can_load:
                for k in range(
                    load.vllm_cached_tokens // BLOCK, load.kvpool_cached_tokens // BLOCK
                ):
                    self.cache[blocks[k]] = self.pages[hashes[k]]
                self.received.add(request.req_id)
            if request.can_save:
                for k in range(request.save_start_token // BLOCK, request.save_end_token // BLOCK):
                    self.pages[hashes[k]] = self.cache[blocks[k]].clone()
            if request.event_id is not None:
                self.events[request.event_id] = 1
        self.sent |= metadata.delayed_free_req_ids


@dataclass
class AscendEngine(PoolingEngine):
    """An engine whose connector is an ``AscendStoreConnector``."""

    def _executed(self, output: Any) -> tuple[Any, ...]:
        self._forward(output)
        self.worker.run(output.kv_connector_metadata)
        return output, self._sampling(output), self._transfers(output)

    def _transfers(self, output: Any) -> KVConnectorOutput:
        worker, result = self.worker, KVConnectorOutput()
        if worker.is_silent:
            return result
        data = sys.modules[_CONNECTOR].AscendStoreKVConnectorWorkerMetadata
        result.kv_connector_worker_meta = data(completed_events=worker.events)
        result.finished_sending = {r for r in worker.sent if r in self.scheduler.requests}
        result.finished_recving = worker.received
        worker.events, worker.sent, worker.received = {}, set(), set()
        return result

    def _assert_that_the_connector_rests(self) -> None:
        assert not self.scheduler.connector.connector_scheduler.load_specs


@contextmanager
def _without_an_npu() -> Iterator[None]:
    sys.modules.update({name: _EmptyModule(name) for name in _NOT_HERE})
    try:
        yield
    finally:
        for name in [*_NOT_HERE, *(n for n in sys.modules if n.split(".")[0] == "vllm_ascend")]:
            sys.modules.pop(name, None)


def _end(server: Any, scheduler: Any) -> None:
    """Let the thread behind the socket go. Collected while it waits, it would block us for ever."""
    side = scheduler.connector.connector_scheduler
    client = side.client or sys.modules[type(side).__module__].LookupKeyClient(
        scheduler.vllm_config
    )
    server.running = False
    try:
        client.lookup(0, [])
        server.thread.join(10)
    finally:
        # Whatever has failed: with something left to send, it would wait for ever as well.
        for each in (client, server):
            each.ctx.destroy(linger=0)


@contextmanager
def ascend_engine(**options: Any) -> Iterator[AscendEngine]:
    """An engine over a pool without bounds.

    Args:
        options: Of the connector.
    """
    with (
        tempfile.TemporaryDirectory() as sockets,
        _without_an_npu(),
        patch.dict(os.environ, {"VLLM_RPC_BASE_PATH": sockets}),
        patch.object(sys, "path", [str(ASCEND), *sys.path]),
        patch.object(torch, "npu", MagicMock(), create=True),
    ):
        backend = importlib.import_module(_BACKEND)
        backend.MooncakeBackend.create_scheduler_client = lambda parallel_config: None
        config = KVTransferConfig(
            kv_connector="AscendStoreConnector",
            kv_connector_module_path=_CONNECTOR,
            kv_role="kv_both",
            kv_connector_extra_config={"load_async": True, **options},
        )
        scheduler = make_scheduler(
            plugged=True,
            num_blocks=40,
            settings=Settings(prefetch_reserve=0.0, protected_share=1.0),
            kv_transfer_config=config,
            max_num_batched_tokens=512,
        )
        cache = torch.zeros((40, BLOCK), dtype=torch.int8)
        worker = PoolWorker(cache)
        server = sys.modules[_CONNECTOR].LookupKeyServer(worker, scheduler.vllm_config)
        scheduler.agent_hint.remote.statistics = lambda: None
        engine = AscendEngine(scheduler)
        engine.cache, engine.worker = cache, worker
        try:
            yield engine
        finally:
            _end(server, scheduler)
