"""KV connectors of vLLM on its real scheduler: each saves, loses and brings back a context."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import get_group_id

from tests.engine import ascend_rig
from tests.engine.pooling_rig import PoolingEngine
from tests.engine.rig import BLOCK, Clock, hinted, prompt
from tests.engine.simple_cpu_rig import simple_cpu_engine
from tests.engine.vllm_tier_rig import engine_over
from tests.serve.lmcache_rig import lmcache_environment, why_no_lmcache
from tests.stores import ASCEND
from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.pooling.adapters.simple_cpu import SimpleCPUStore
from vllm_agent_hint.settings import Settings

pytestmark = pytest.mark.usefixtures("clock")

WHOLE = 20 * BLOCK
CONTEXT = prompt(1, WHOLE + 3)
SAVES_LITTLE_BY_ITSELF: dict[str, Any] = {"lazy": True, "max_num_batched_tokens": BLOCK}
"""Lazy, and the next step takes a block at most."""


def loadable(engine: PoolingEngine, session: int = 0) -> int:
    """Tokens of a session's latest context that its store could load."""
    key = list(engine.remote.spm.tracker)[session]
    content = engine.remote.spm.tracker.get(key).latest
    return int(engine.remote.spm.store.loadable_tokens(content))


# -- SimpleCPUOffloadConnector ---------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_simple_cpu_brings_back_what_was_offloaded_as_it_was_written(
    lazy: bool, asynchronous: bool
) -> None:
    engine = simple_cpu_engine(lazy=lazy, asynchronous=asynchronous)
    assert isinstance(engine.remote.spm.store, SimpleCPUStore)
    engine.serve(CONTEXT, hint=hinted("a", 60.0), max_tokens=BLOCK)

    (parked,) = engine.done("a", "offload")
    engine.flood()
    lost = engine.cached_ids(CONTEXT)
    (fetched,) = engine.done("a", "prefetch")
    found = engine.serve([*CONTEXT, *[7] * BLOCK, 9], hint=hinted("a", 60.0))

    assert (parked["status"], parked["tokens"]) == ("applied", WHOLE + BLOCK)
    assert lost == [None] * 20
    assert (fetched["status"], fetched["tokens"]) == ("applied", WHOLE + BLOCK)
    assert found == WHOLE + BLOCK
    assert not any(request_id.startswith("agent-hint") for request_id in engine.ran)
    engine.assert_nothing_is_left()


def test_simple_cpu_saves_anew_what_its_pool_has_reused_meanwhile() -> None:
    """It saves each block once, when it is computed: only an offload can save it again."""
    engine = simple_cpu_engine(copies=25)
    engine.serve(CONTEXT, hint=hinted("a", 600.0))
    engine.serve(prompt(2, 10 * BLOCK + 1))
    assert loadable(engine) < WHOLE

    (parked,) = engine.done("a", "offload")

    assert (parked["status"], parked["tokens"]) == ("applied", WHOLE)
    assert loadable(engine) == WHOLE
    engine.serve(prompt(3, WHOLE + 1))
    assert loadable(engine) == 4 * BLOCK, "it goes from its end, once what was free is used"
    engine.assert_nothing_is_left()


def test_a_turn_while_its_context_is_saved_saves_no_second_copy() -> None:
    engine = simple_cpu_engine(copies=41)
    engine.serve(CONTEXT, hint=hinted("a", 600.0))
    engine.remote.spm.store.delete(engine.remote.spm.tracker.owned_alone(engine.session("a").key))
    engine.faults.is_silent = True
    engine.ask("a", "offload")

    engine.step_until_it_ends(engine.add([*CONTEXT[:WHOLE], 5], hint=hinted("a", 600.0)))

    assert engine.copies.get_num_free_blocks() == 40 - 20
    engine.faults.is_silent = False
    engine.run()
    engine.assert_nothing_is_left()


def test_an_offload_to_simple_cpu_is_pending_until_its_worker_reports_the_copies() -> None:
    engine = simple_cpu_engine(**SAVES_LITTLE_BY_ITSELF)
    engine.serve(CONTEXT, hint=hinted("a", 60.0))
    assert loadable(engine) == 0
    engine.faults.is_silent = True

    assert [r["status"] for r in engine.ask("a", "offload")] == ["pending"]
    engine.steps(5)
    assert engine.pool.num_blocks_in[Zone.TTL] == 20
    assert engine.pool.get_num_free_blocks() == 39 - 18, "copied ones are held"
    assert loadable(engine) == 0
    engine.faults.is_silent = False
    engine.run()

    assert [r["status"] for r in engine.results()] == ["applied"]
    assert engine.pool.num_blocks_in[Zone.TTL] == 0
    engine.assert_nothing_is_left()


def test_a_pool_too_small_for_a_context_keeps_its_beginning_and_says_partial() -> None:
    engine = simple_cpu_engine(copies=9)
    engine.serve(CONTEXT, hint=hinted("a", 60.0))
    engine.serve(prompt(2, 8 * BLOCK + 1))
    assert loadable(engine) == 0

    (parked,) = engine.done("a", "offload")

    assert (parked["status"], parked["tokens"]) == ("partial", 8 * BLOCK)
    assert engine.pool.num_blocks_in[Zone.TTL] == 20
    engine.assert_nothing_is_left()


def test_a_save_never_takes_the_room_of_what_is_saved_already() -> None:
    engine = simple_cpu_engine(copies=13)
    engine.serve(CONTEXT, hint=hinted("a", 60.0))
    assert loadable(engine) == 12 * BLOCK

    (parked,) = engine.done("a", "offload")

    assert (parked["status"], parked["tokens"]) == ("partial", 12 * BLOCK)
    engine.assert_nothing_is_left()


def test_an_evict_deletes_the_copies_that_the_session_alone_has() -> None:
    engine = simple_cpu_engine()
    engine.serve(CONTEXT, hint=hinted("a", 60.0))
    engine.serve([*CONTEXT[: 8 * BLOCK], *prompt(4, 40)], hint=hinted("b", 60.0))
    engine.run()

    (result,) = engine.done("a", "evict")

    assert "12 blocks were deleted from the store" in result["reason"]
    assert loadable(engine) == 10 * BLOCK
    engine.assert_nothing_is_left()


def test_an_evict_deletes_copies_that_are_being_written_once_they_are() -> None:
    engine = simple_cpu_engine()
    engine.faults.is_silent = True
    engine.step_until_it_ends(engine.add(CONTEXT, hint=hinted("a", 60.0)))
    (content,) = (engine.remote.spm.tracker.get(k).latest for k in engine.remote.spm.tracker)

    engine.ask("a", "evict")
    engine.steps(3)
    engine.faults.is_silent = False
    engine.run()

    assert "20 blocks were deleted from the store" in engine.results()[0]["reason"]
    assert engine.remote.spm.store.loadable_tokens(content) == 0
    engine.assert_nothing_is_left()


def test_an_offload_takes_back_the_deletion_of_copies_that_are_being_written() -> None:
    engine = simple_cpu_engine()
    engine.faults.is_silent = True
    engine.step_until_it_ends(engine.add(CONTEXT, hint=hinted("a", 60.0)))
    engine.ask("a", "evict")
    engine.step_until_it_ends(engine.add(CONTEXT, hint=hinted("a", 60.0)))

    engine.ask("a", "offload")
    engine.faults.is_silent = False
    engine.run()

    assert engine.results()[0]["status"] == "applied"
    assert loadable(engine) == WHOLE
    engine.assert_nothing_is_left()


def test_keep_alive_makes_the_copies_of_a_live_session_the_last_to_go(
    clock: Clock,
) -> None:
    engine = simple_cpu_engine(copies=41, settings=Settings(prefetch_reserve=0.0))
    engine.serve(CONTEXT, hint=hinted("a", 600.0))
    engine.serve(prompt(2, WHOLE + 1))
    clock.advance(60)
    engine.remote.look()

    engine.serve(prompt(3, 10 * BLOCK + 1))

    assert engine.remote.spm.counters.keep_alives == 20
    assert loadable(engine) == WHOLE
    engine.assert_nothing_is_left()


def test_what_is_kept_alive_goes_from_its_end() -> None:
    engine = simple_cpu_engine(copies=21)
    engine.serve(CONTEXT, hint=hinted("a", 600.0))
    engine.done("a", "offload")

    engine.serve(prompt(2, 5 * BLOCK + 1))

    assert loadable(engine) == 15 * BLOCK
    engine.assert_nothing_is_left()


def test_copies_of_a_session_that_has_ended_go_before_older_ones() -> None:
    engine = simple_cpu_engine(copies=41)
    engine.serve(prompt(2, WHOLE + 1), hint=hinted("older", 600.0))
    engine.serve(CONTEXT, hint=hinted("ended", 600.0))
    engine.sam.free_session(next(k for k in engine.sam.sessions if k.session_id == "ended"))

    engine.serve(prompt(3, WHOLE + 1))

    assert loadable(engine) == WHOLE
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("kind", ["window", "state", "all"])
def test_simple_cpu_brings_back_windows_and_states_with_the_attention(kind: str) -> None:
    engine = simple_cpu_engine(num_blocks=100, kind=kind)
    engine.serve(CONTEXT, hint=hinted("a", 60.0))
    engine.run()
    keys = {copy.block_hash for copy in engine.copies.blocks if copy.block_hash}
    assert len({get_group_id(key) for key in keys}) == (3 if kind == "all" else 2)

    (parked,) = engine.done("a", "offload")
    for family in range(20, 35):
        engine.serve(prompt(family, 10 * BLOCK))
    assert engine.remote.residency(engine.session("a").key)["local"] == 0
    (fetched,) = engine.done("a", "prefetch")
    found = engine.serve([*CONTEXT, *prompt(5, 40)], hint=hinted("a", 60.0))

    assert (parked["status"], parked["tokens"]) == ("applied", WHOLE)
    assert (fetched["status"], fetched["tokens"]) == ("applied", WHOLE)
    assert found == WHOLE
    engine.done("a", "evict")
    assert not any(engine.copies.cached_block_hash_to_block.get_one_block(key) for key in keys)
    engine.assert_nothing_is_left()


def test_a_pause_while_simple_cpu_loads_ends_the_prefetch_and_frees_its_blocks() -> None:
    engine = simple_cpu_engine()
    engine.serve(CONTEXT, hint=hinted("a", 60.0))
    engine.done("a", "offload")
    engine.flood()
    engine.faults.is_silent = True
    engine.ask("a", "prefetch")
    engine.steps(3)
    assert engine.remote.loads.num_loading == 1

    engine.remote.loads.abort_all("vLLM was paused")
    engine.steps(2)
    assert engine.results()[0]["status"] == "rejected"
    engine.faults.is_silent = False
    engine.run()

    assert engine.serve(CONTEXT) == WHOLE
    engine.assert_nothing_is_left()


def test_a_reset_of_the_connector_while_it_saves_fails_the_offload_and_keeps_nothing() -> None:
    engine = simple_cpu_engine(**SAVES_LITTLE_BY_ITSELF)
    engine.serve(CONTEXT, hint=hinted("a", 60.0))
    assert loadable(engine) == 0
    engine.faults.is_silent = True
    engine.ask("a", "offload")
    engine.steps(2)

    engine.scheduler.connector.reset_cache()
    engine.step()
    assert engine.results()[0]["status"] == "failed"
    engine.faults.is_silent = False
    engine.steps(3)
    engine.run()

    assert loadable(engine) == 0
    engine.assert_nothing_is_left()


# -- OffloadingConnector over vLLM's own tiers -----------------------------------------------------


@pytest.fixture
def on_disk(tmp_path: Path) -> dict[str, Any]:
    """Options of a tier of host memory with one of files below it."""
    return {"secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}]}


def chunks_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*.bin"))


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_vllm_s_cpu_tier_brings_back_what_was_offloaded_and_can_t_delete_it(
    asynchronous: bool, policy: str
) -> None:
    extra = {"eviction_policy": policy}
    with engine_over("CPUTier", extra, asynchronous=asynchronous) as engine:
        assert type(engine.tier).__module__.startswith("vllm.")
        engine.serve(CONTEXT, hint=hinted("a", 60.0), max_tokens=BLOCK)

        (parked,) = engine.done("a", "offload")
        engine.flood()
        lost = engine.cached_ids(CONTEXT)
        (fetched,) = engine.done("a", "prefetch")
        found = engine.serve([*CONTEXT, *[7] * BLOCK, 9], hint=hinted("a", 60.0))
        (evicted,) = engine.done("a", "evict")

        assert (parked["status"], parked["tokens"]) == ("applied", WHOLE + BLOCK)
        assert lost == [None] * 20
        assert (fetched["status"], fetched["tokens"]) == ("applied", WHOLE + BLOCK)
        assert found == WHOLE + BLOCK
        assert "CPUOffloadingManager can't delete" in evicted["reason"]
        engine.assert_nothing_is_left()


def test_what_vllm_s_cpu_tier_has_lost_makes_a_prefetch_missing() -> None:
    with engine_over("CPUTier", chunks=25) as engine:
        engine.serve(CONTEXT, hint=hinted("a", 600.0))
        engine.done("a", "offload")
        engine.serve(prompt(2, WHOLE + 1))
        engine.serve(prompt(3, WHOLE + 1))
        engine.flood()

        assert engine.done("a", "prefetch")[0]["status"] == "missing"
        engine.assert_nothing_is_left()


def test_keep_alive_touches_the_chunks_of_vllm_s_cpu_tier(clock: Clock) -> None:
    with engine_over("CPUTier", chunks=41) as engine:
        engine.serve(CONTEXT, hint=hinted("a", 600.0))
        engine.serve(prompt(2, WHOLE + 1))
        clock.advance(60)
        engine.remote.look()

        engine.serve(prompt(3, 10 * BLOCK + 1))

        counters = engine.remote.spm.counters
        assert (counters.keep_alives, counters.keep_alive_losses) == (20, 0)
        assert loadable(engine) == WHOLE
        engine.assert_nothing_is_left()


def test_keep_alive_counts_what_vllm_s_cpu_tier_has_lost(clock: Clock) -> None:
    with engine_over("CPUTier", chunks=20) as engine:
        engine.serve(CONTEXT, hint=hinted("a", 600.0))
        engine.serve(prompt(2, 5 * BLOCK + 1))
        clock.advance(60)
        engine.remote.look()

        counters = engine.remote.spm.counters
        assert (counters.keep_alives, counters.keep_alive_losses) == (15, 5)


def test_a_prefetch_brings_up_from_vllm_s_disk_what_its_host_memory_has_lost(
    on_disk: dict[str, Any], tmp_path: Path
) -> None:
    with engine_over("DiskTier", on_disk, chunks=25) as engine:
        assert type(engine.tier).__name__ == "TieringOffloadingManager"
        engine.serve(CONTEXT, hint=hinted("a", 600.0))
        (parked,) = engine.done("a", "offload")
        for family in (2, 3):
            engine.serve(prompt(family, WHOLE + 1))
        assert len(chunks_in(tmp_path)) == 60
        assert engine.cached_ids(CONTEXT) == [None] * 20

        (fetched,) = engine.done("a", "prefetch")
        found = engine.serve(CONTEXT, hint=hinted("a", 600.0))

        assert (parked["status"], parked["tokens"]) == ("applied", WHOLE)
        assert (fetched["status"], fetched["tokens"]) == ("applied", WHOLE)
        assert found == WHOLE
        assert not any(request_id.startswith("agent-hint") for request_id in engine.ran)
        engine.assert_nothing_is_left()


def test_what_vllm_s_disk_has_lost_too_is_missing(on_disk: dict[str, Any], tmp_path: Path) -> None:
    with engine_over("DiskTier", on_disk, chunks=25) as engine:
        engine.serve(CONTEXT, hint=hinted("a", 600.0))
        engine.done("a", "offload")
        for family in (2, 3):
            engine.serve(prompt(family, WHOLE + 1))
        for chunk in chunks_in(tmp_path):
            chunk.unlink()

        assert engine.done("a", "prefetch")[0]["status"] == "missing"
        engine.assert_nothing_is_left()


def test_keep_alive_over_vllm_s_disk_brings_nothing_up(
    on_disk: dict[str, Any], clock: Clock
) -> None:
    with engine_over("DiskTier", on_disk, chunks=25) as engine:
        engine.serve(CONTEXT, hint=hinted("a", 600.0))
        for family in (2, 3):
            engine.serve(prompt(family, WHOLE + 1))
        before = set(engine.tier.primary_tier._policy.chunks)
        for _ in range(3):
            clock.advance(60)
            engine.remote.look()
            engine.steps(3)
            time.sleep(0.05)

        assert set(engine.tier.primary_tier._policy.chunks) == before
        assert not engine.tier.secondary_tiers[0]._lookup_manager._req_keys
        assert engine.remote.spm.counters.keep_alive_losses == 0
        engine.assert_nothing_is_left()


# -- AscendStore -----------------------------------------------------------------------------------

needs_ascend = pytest.mark.skipif(
    not ASCEND.exists(), reason="vllm-ascend's source is not here: make stores"
)


@needs_ascend
def test_ascend_store_s_scheduler_side_brings_back_what_its_metadata_had_saved() -> None:
    with ascend_rig.ascend_engine() as engine:
        engine.serve(CONTEXT, hint=hinted("a", 600.0))
        (parked,) = engine.done("a", "offload")
        engine.flood()
        lost = engine.cached_ids(CONTEXT)
        (fetched,) = engine.done("a", "prefetch")
        found = engine.serve(CONTEXT, hint=hinted("a", 600.0))
        (evicted,) = engine.done("a", "evict")

        assert type(engine.scheduler.connector).__module__.startswith("vllm_ascend.")
        assert (parked["status"], parked["tokens"]) == ("applied", WHOLE), parked
        assert lost == [None] * 20
        assert (fetched["status"], fetched["tokens"]) == ("applied", WHOLE), fetched
        assert found == WHOLE
        assert "no delete" in evicted["reason"]
        engine.assert_nothing_is_left()


@needs_ascend
def test_what_the_ascend_pool_has_lost_makes_a_prefetch_partial_and_then_missing() -> None:
    with ascend_rig.ascend_engine() as engine:
        engine.serve(CONTEXT, hint=hinted("a", 600.0))
        engine.done("a", "offload")
        engine.flood()
        saved = list(engine.worker.pages)
        key = next(iter(engine.remote.spm.tracker))
        hashes = [h.hex() for h in engine.remote.spm.tracker.get(key).latest.hashes]
        assert set(hashes) <= set(saved)

        del engine.worker.pages[hashes[12]]
        (partial,) = engine.done("a", "prefetch")
        assert engine.scheduler.reset_prefix_cache()
        engine.worker.pages.clear()
        (missing,) = engine.done("a", "prefetch")

        assert (partial["status"], partial["tokens"]) == ("partial", 12 * BLOCK)
        assert missing["status"] == "missing"


@needs_ascend
def test_without_load_async_ascend_store_can_only_confirm() -> None:
    with ascend_rig.ascend_engine(load_async=False) as engine:
        engine.serve(CONTEXT, hint=hinted("a", 600.0))

        (parked,) = engine.done("a", "offload")
        (fetched,) = engine.done("a", "prefetch")

        assert parked["status"] == "applied"
        assert fetched["status"] == "unsupported"
        assert "load_async is off" in fetched["reason"]


# -- those that can't ------------------------------------------------------------------------------


def test_lmcache_v1_answers_unsupported_with_the_reason_and_everything_else_is_local(
    tmp_path: Path,
) -> None:
    """LMCache's own scheduler side on vLLM's scheduler."""
    if why_no_lmcache(tmp_path):
        pytest.skip(why_no_lmcache(tmp_path))
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.lmcache_v1"],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, **lmcache_environment(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(ran.stdout.splitlines()[-1])
    offload, prefetch, evict = told["results"]
    assert told["hits"] == [0, 48]
    assert offload["status"] == prefetch["status"] == "unsupported"
    assert "loads only within a step" in offload["reason"]
    assert (evict["status"], evict["blocks"]) == ("applied", 4)
