"""Engines whose ``OffloadingConnector`` is over a tier of vLLM's own."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.engine.pooling_rig import PoolingEngine, pooling_engine


@dataclass
class VllmTierEngine(PoolingEngine):
    """An engine that gives the threads of a tier the time that they need."""

    def step(self) -> None:
        super().step()
        time.sleep(0.002)

    def run(self, limit: int = 10_000) -> None:
        super().run(limit)

    def _assert_that_the_tier_rests(self) -> None:
        """No chunk is held, and nobody has a question open."""
        top = getattr(self.tier, "primary_tier", self.tier)
        assert not getattr(self.tier, "_req_state", {})
        assert not getattr(self.tier, "_request_load_sources", {})
        held = top._num_allocated_chunks - len(top._free_list) - top._num_evictable_cache_chunks
        assert held == 0


@contextmanager
def engine_over(
    spec: str, extra: dict[str, Any] | None = None, **more: Any
) -> Iterator[PoolingEngine]:
    """An engine over one of ``tests.vllm_tiers``.

    Args:
        spec: Its name.
        extra: Options of the spec.
        more: For ``pooling_engine``.
    """
    where = {"spec_name": spec, "spec_module_path": "tests.vllm_tiers"}
    engine = pooling_engine(extra={**where, **(extra or {})}, engine_cls=VllmTierEngine, **more)
    try:
        yield engine
    finally:
        engine.tier.shutdown()
