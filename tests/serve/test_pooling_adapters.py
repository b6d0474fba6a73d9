"""Other KV connectors of vLLM, each on a real server that uses it."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.lmcache_rig import lmcache_environment, lmcache_server, why_no_lmcache
from tests.serve.mooncake_rig import MooncakeMaster
from tests.serve.pooling_rig import HINT, KINDS, away, edit, flood, round_trip, tier, with_connector
from tests.serve.rig import Serve, TestServer, tokens

CONTEXT = tokens(2_000, 1)


def example(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def assert_its_end_costs_the_prefetch_alone(
    store: subprocess.Popen[bytes], server: TestServer
) -> None:
    """The store dies while it has a session; requests go on as they would."""
    said = away(server, CONTEXT).token_ids
    store.kill()

    (fetched,) = edit(server, "agent", "prefetch")

    assert fetched["status"] in ("missing", "failed"), fetched
    assert server.complete(CONTEXT, HINT).token_ids == said


def test_a_connector_without_an_adapter_is_unsupported_by_name_and_serves_as_before(
    serve: Serve, tmp_path: Path
) -> None:
    folder = {"shared_storage_path": str(tmp_path)}
    server = serve("qwen3-small", with_connector(40, "ExampleConnector", folder))
    server.complete(CONTEXT, HINT)

    results = edit(server, "agent", "offload", "prefetch", "evict")

    assert [r["status"] for r in results] == ["unsupported", "unsupported", "applied"]
    assert "ExampleConnector" in results[0]["reason"]


def test_the_connectors_within_a_multi_connector_do_what_each_can(
    serve: Serve, tmp_path: Path
) -> None:
    inner = [
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": tier(),
        },
        example(tmp_path),
    ]
    server = serve("qwen3-small", with_connector(40, "MultiConnector", {"connectors": inner}))
    first = server.complete(CONTEXT, HINT, max_tokens=200)

    trip = round_trip(server, [*CONTEXT, *first.token_ids])

    trip.assert_came_back_whole(2_176)
    assert trip.evicted["status"] == "applied"
    assert "no adapter for ExampleConnector" in trip.evicted["reason"]


# -- vLLM's own tiers ------------------------------------------------------------------------------


def vllm_tier(spec: str, host_bytes: int, **options: Any) -> dict[str, Any]:
    """A tier of vLLM's with a worker that copies without a GPU; see ``tests.vllm_tiers``."""
    where = {"spec_name": spec, "spec_module_path": "tests.vllm_tiers"}
    return {**where, "cpu_bytes_to_use": host_bytes, **options}


def with_tests_importable() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))}


@pytest.mark.parametrize("kind", ["dense", "window"])
def test_vllm_s_cpu_tier_parks_a_session_and_gives_it_back(serve_in_full: Serve, kind: str) -> None:
    model, blocks = KINDS[kind]
    args = with_connector(blocks, extra=vllm_tier("CPUTier", 200_000_000))
    server = serve_in_full(model, args, with_tests_importable())
    server.complete(CONTEXT, HINT)

    trip = round_trip(server, [*CONTEXT, *tokens(100, 3)])

    trip.assert_came_back_whole(1_920)
    assert "CPUOffloadingManager can't delete" in trip.evicted["reason"]


def test_a_prefetch_reaches_what_only_vllm_s_disk_tier_still_has(
    serve_in_full: Serve, tmp_path: Path
) -> None:
    """Its host memory holds two prompts of the flood, so that the session lies on the disk."""
    extra = vllm_tier(
        "DiskTier", 12_000_000, secondary_tiers=[{"type": "fs", "root_dir": str(tmp_path)}]
    )
    server = serve_in_full("qwen3-small", with_connector(40, extra=extra), with_tests_importable())
    said = server.complete(CONTEXT, HINT).token_ids

    trip = round_trip(server, CONTEXT)

    assert list(tmp_path.rglob("*.bin"))
    trip.assert_came_back_whole(1_920)
    assert trip.resumed.token_ids == said


# -- Mooncake --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_mooncake_store_parks_a_session_and_gives_it_back(
    serve_in_full: Serve, mooncake: MooncakeMaster, kind: str
) -> None:
    environment, _ = mooncake
    model, blocks = KINDS[kind]
    args = with_connector(blocks, "MooncakeStoreConnector", {"save_decode_cache": True})
    server = serve_in_full(model, args, environment)
    server.complete(CONTEXT, HINT)

    trip = round_trip(server, [*CONTEXT, *tokens(100, 3)])

    trip.assert_came_back_whole(1_920)
    assert "no delete" in trip.evicted["reason"]


def test_a_mooncake_master_that_dies_costs_transfers_and_no_request(
    serve_in_full: Serve, mooncake: MooncakeMaster
) -> None:
    environment, process = mooncake
    server = serve_in_full(
        "qwen3-small", with_connector(40, "MooncakeStoreConnector", {}), environment
    )
    assert_its_end_costs_the_prefetch_alone(process, server)


def test_two_servers_over_one_mooncake_store_resume_each_other_s_sessions(
    serve_in_full: Serve, mooncake: MooncakeMaster
) -> None:
    """Each request finds what the other server has saved; what a prefetch finds says
    ``test_pooling_mooncake_manifest``."""
    environment, _ = mooncake
    first, second = (
        serve_in_full(
            "qwen3-small",
            with_connector(40, "MooncakeStoreConnector", {"lookup_rpc_port": port}),
            environment,
        )
        for port in (0, 1)
    )
    said = first.complete(CONTEXT, HINT).token_ids
    assert edit(first, "agent", "offload")[0]["status"] == "applied"

    resumed = second.complete(CONTEXT, HINT)

    assert resumed.cached_tokens == 1_920
    assert resumed.token_ids == said


# -- LMCache ---------------------------------------------------------------------------------------


@pytest.fixture
def lmcache(tmp_path: Path) -> Iterator[Any]:
    if reason := why_no_lmcache(tmp_path):
        pytest.skip(reason)
    with lmcache_server(tmp_path) as (port, process):
        yield port, process, lmcache_environment(tmp_path)


def with_lmcache(port: int, **options: Any) -> list[str]:
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port, **options}
    return with_connector(40, "LMCacheMPConnector", extra)


def test_an_lmcache_server_parks_a_session_and_gives_it_back(
    serve_in_full: Serve, lmcache: Any
) -> None:
    port, _, environment = lmcache
    server = serve_in_full("qwen3-small", with_lmcache(port), environment)
    said = server.complete(CONTEXT, HINT).token_ids

    trip = round_trip(server, CONTEXT)

    trip.assert_came_back_whole(1_920)
    assert trip.resumed.token_ids == said
    assert "no delete" in trip.evicted["reason"]


def test_what_a_look_up_has_locked_in_lmcache_is_given_back_and_keep_alive_is_one(
    serve_in_full: Serve, lmcache: Any
) -> None:
    """A reset of the connector's cache clears what nobody has locked."""
    port, _, environment = lmcache
    more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_AGENT_HINT_KEEP_ALIVE_SECONDS": "0.3"}
    server = serve_in_full("qwen3-small", with_lmcache(port), {**environment, **more})
    server.complete(CONTEXT, HINT)
    assert edit(server, "agent", "offload")[0]["status"] == "applied"
    time.sleep(1.0)
    flood(server)
    kept = server.metrics().total("vllm:agent_hint_keep_alives_total")
    lost = server.metrics().total("vllm:agent_hint_keep_alive_losses_total")

    assert server.post("/reset_prefix_cache?reset_external=true").status_code == 200

    assert kept >= 15
    assert lost == 0
    assert edit(server, "agent", "prefetch")[0]["status"] == "missing"


def test_an_lmcache_server_that_dies_costs_transfers_and_no_request(
    serve_in_full: Serve, lmcache: Any
) -> None:
    port, process, environment = lmcache
    quick = {"lmcache.mp.mq_timeout": 2.0, "lmcache.mp.heartbeat_interval": 1.0}
    server = serve_in_full("qwen3-small", with_lmcache(port, **quick), environment)
    assert_its_end_costs_the_prefetch_alone(process, server)


def test_larger_chunks_of_lmcache_than_blocks_make_an_offload_partial(
    serve_in_full: Serve, tmp_path: Path
) -> None:
    if reason := why_no_lmcache(tmp_path):
        pytest.skip(reason)
    with lmcache_server(tmp_path, chunk_size=256) as (port, _):
        server = serve_in_full("qwen3-small", with_lmcache(port), lmcache_environment(tmp_path))
        server.complete(CONTEXT, HINT)

        (parked,) = edit(server, "agent", "offload")

        assert (parked["status"], parked["tokens"]) == ("partial", 1_792)
