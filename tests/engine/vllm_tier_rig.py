"""Engines whose ``OffloadingConnector`` is over a tier of vLLM's own."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.engine.pooling_rig import PoolingEngine, pooling_engine
from vllm_agent_hint.kvcache.block import Zone


@contextmanager
def engine_over(spec: str, extra: dict[str, Any] | None = None, **more: Any) -> Iterator[Any]:
    """An engine over one of ``tests.vllm_tiers``.

    Args:
        spec: Its name.
        extra: Options of the spec.
        more: For ``pooling_engine``.
    """
    where = {"spec_name": spec, "spec_module_path": "tests.vllm_tiers"}
    engine = pooling_engine(extra={**where, **(extra or {})}, **more)
    try:
        yield engine
    finally:
        engine.tier.shutdown()


def finish(engine: PoolingEngine, session_id: str, edit: str, seconds: float = 20.0) -> Any:
    """Run an edit to its end, giving the threads of a tier the time that they need."""
    engine.ask(session_id, edit)
    until = time.monotonic() + seconds
    while engine.results()[0]["status"] == "pending":
        assert time.monotonic() < until, engine.results()
        engine.step()
        time.sleep(0.002)
    rest(engine)
    return engine.results()[0]


def rest(engine: PoolingEngine, seconds: float = 20.0) -> None:
    """Step until the tier, its threads included, has nothing to do."""
    until = time.monotonic() + seconds
    while engine.scheduler.has_requests():
        assert time.monotonic() < until
        engine.step()
        time.sleep(0.002)


def serve(engine: PoolingEngine, tokens: list[int], **more: Any) -> int:
    """As ``Engine.serve``, giving the threads of a tier the time that they need."""
    request_id = engine.add(tokens, **more)
    rest(engine)
    return engine.cached[request_id]


def assert_nothing_is_left(engine: PoolingEngine) -> None:
    """No block and no chunk is held, and nobody has a question open."""
    side, remote = engine.scheduler.connector.connector_scheduler, engine.remote
    top = getattr(engine.tier, "primary_tier", engine.tier)
    assert remote.loads.num_loading == remote.loads.num_waiting == 0
    assert remote.spm.num_open == 0
    assert not engine.scheduler.requests
    assert not side._jobs
    assert not side._req_status
    assert not getattr(engine.tier, "_req_state", {})
    assert not getattr(engine.tier, "_request_load_sources", {})
    held = top._num_allocated_chunks - len(top._free_list) - top._num_evictable_cache_chunks
    assert held == 0
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    engine.sam.free_all_sessions()
    assert engine.pool.num_blocks_in[Zone.TTL] == engine.pool.num_blocks_in[Zone.SESSION] == 0
