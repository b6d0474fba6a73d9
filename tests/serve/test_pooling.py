"""Parking a context outside the GPU cache and bringing it back, on real servers."""

import os
import time
from pathlib import Path

import pytest

from tests.serve.at_rest import wait_until
from tests.serve.pooling_rig import (
    HINT,
    KINDS,
    away,
    edit,
    files_of,
    flood,
    loaded,
    manage,
    outcome,
    residency,
    tier,
    with_connector,
)
from tests.serve.rig import Serve, tokens


@pytest.mark.parametrize("kind", KINDS)
def test_an_offloaded_context_is_let_go_and_a_prefetch_brings_it_back(
    serve: Serve, kind: str
) -> None:
    model, blocks = KINDS[kind]
    server = serve(model, with_connector(blocks))
    context = tokens(2_000, 1)
    first = server.complete(context, HINT, max_tokens=200)
    usable = residency(server)["local"]

    parked = edit(server, "agent", "offload")
    protected = server.metrics().total("vllm:agent_hint_blocks", zone="ttl")
    flood(server)
    away = residency(server)
    fetched = edit(server, "agent", "prefetch")
    back = residency(server)
    before = loaded(server)
    second = server.complete([*context, *first.token_ids, *tokens(50, 2)], HINT)

    assert usable >= 1_920
    assert [parked[0]["status"], fetched[0]["status"]] == ["applied", "applied"]
    assert parked[0]["tokens"] == fetched[0]["tokens"] == usable
    assert protected == 0
    assert (away["local"], away["remote"]) == (0, usable)
    assert back["local"] == usable
    assert server.metrics().total("vllm:agent_hint_blocks", zone="ttl") >= usable // 128
    assert second.cached_tokens == usable
    assert loaded(server) == before, "the request had to load it once more"
    stock = serve(model, with_connector(blocks), {"VLLM_AGENT_HINT": "0"})
    assert stock.complete([*context, *first.token_ids, *tokens(50, 2)]).token_ids == (
        second.token_ids
    )


# -- what a client is told -------------------------------------------------------------------------


def test_a_management_request_says_pending_at_once_and_the_operation_ends_as_applied(
    serve: Serve,
) -> None:
    server = serve("qwen3-small", with_connector(40, extra=tier(save_bytes_per_second=1e6)))
    server.complete(tokens(2_000, 1), HINT, max_tokens=200)

    report = manage(server, "agent", "offload")

    assert [r["status"] for r in report["results"]] == ["pending"]
    operation = server.get(f"/v1/agent_hint/operations/{report['operation_id']}").json()
    assert operation["status"] == "pending"
    (result,) = outcome(server, report["operation_id"])["results"]
    assert (result["status"], result["tokens"]) == ("applied", 2_176)


def test_who_asks_to_wait_is_answered_when_the_transfer_is_over_and_not_later_than_asked(
    serve: Serve,
) -> None:
    server = serve("qwen3-small", with_connector(40, extra=tier(load_bytes_per_second=2e6)))
    away(server, tokens(2_000, 1))

    hurried = manage(server, "agent", "prefetch", wait_seconds=0.1)
    patient = server.post(
        "/v1/agent_hint/sessions/agent",
        {"edits": [{"type": "prefetch"}], "wait_seconds": 30},
    )

    assert [r["status"] for r in hurried["results"]] == ["pending"]
    assert patient.status_code == 200, patient.text
    assert [r["status"] for r in patient.json()["results"]] == ["applied"]


def test_edits_of_a_request_run_after_it_and_are_known_by_its_operation(serve: Serve) -> None:
    server = serve("qwen3-small", with_connector(40))
    hint = {**HINT, "context_management": {"edits": [{"type": "offload"}, {"type": "prefetch"}]}}

    answer = server.complete(tokens(2_000, 1), hint)
    operation = outcome(server, answer.body["agent_hint"]["operation_id"])

    assert [r["status"] for r in operation["results"]] == ["applied", "applied"]
    assert residency(server)["local"] == residency(server)["remote"] == 1_920


def test_an_evict_deletes_what_the_store_has(serve: Serve) -> None:
    server = serve("qwen3-small", with_connector(40))
    context = tokens(2_000, 1)
    server.complete(context, HINT)
    edit(server, "agent", "offload")

    (result,) = edit(server, "agent", "evict")
    flood(server)

    assert result["status"] == "applied"
    assert "15 blocks were deleted from the store" in result["reason"]
    assert edit(server, "agent", "prefetch")[0]["status"] == "missing"
    assert server.complete(context).cached_tokens == 0


def test_what_another_session_has_registered_outlives_the_evict(serve: Serve) -> None:
    server = serve("qwen3-small", with_connector(40))
    shared = tokens(1_280, 1)
    server.complete([*shared, *tokens(500, 2)], HINT)
    server.complete([*shared, *tokens(500, 3)], {**HINT, "session_id": "other"})

    (result,) = edit(server, "agent", "evict")
    flood(server)

    assert "3 blocks were deleted" in result["reason"]
    assert residency(server, "other")["remote"] == 1_664


def test_without_a_connector_transfers_are_unsupported_and_evict_is_as_before(
    serve: Serve,
) -> None:
    server = serve("qwen3-small", ["--max-model-len", "4096", "--num-gpu-blocks-override", "40"])
    server.complete(tokens(2_000, 1), HINT)

    results = manage(server, "agent", "offload", "prefetch", "evict")["results"]

    assert [r["status"] for r in results] == ["unsupported", "unsupported", "applied"]
    assert server.get("/v1/agent_hint/sessions/agent").json()["residency"] == []


# -- expected resume and keep-alive ----------------------------------------------------------------


def test_a_session_that_is_expected_back_finds_its_context_there(serve: Serve) -> None:
    server = serve("qwen3-small", with_connector(40))
    context = tokens(2_000, 1)
    hint = {
        **HINT,
        "expected_resume_seconds": 6,
        "context_management": {"edits": [{"type": "offload"}]},
    }
    answer = server.complete(context, hint, max_tokens=60)
    outcome(server, answer.body["agent_hint"]["operation_id"])
    flood(server, requests=3)
    assert residency(server)["local"] == 0

    wait_until(lambda: residency(server)["local"] > 0, seconds=8)
    before = loaded(server)

    assert server.complete([*context, *answer.token_ids]).cached_tokens == 1_920 + 128
    assert loaded(server) == before


def test_an_idle_engine_keeps_what_a_session_has_in_the_store_alive(
    serve: Serve, tmp_path: Path
) -> None:
    server = serve(
        "qwen3-small",
        with_connector(40, extra=tier(directory=str(tmp_path))),
        {"VLLM_AGENT_HINT_KEEP_ALIVE_SECONDS": "0.3"},
    )
    server.complete(tokens(2_000, 1), HINT)
    edit(server, "agent", "offload")
    files = files_of(tmp_path)
    for file in files:
        os.utime(file, (1, 1))

    time.sleep(1.0)

    assert len(files) >= 15
    assert all(file.stat().st_mtime > 1 for file in files)
    server.client.request("DELETE", "/v1/agent_hint/sessions/agent")
    time.sleep(0.5)
    for file in files:
        os.utime(file, (1, 1))
    time.sleep(0.8)
    assert all(file.stat().st_mtime == 1 for file in files), "the session is orphaned"


def test_what_transfers_have_done_stands_in_the_metrics(serve: Serve) -> None:
    server = serve("qwen3-small", with_connector(40))
    shared = tokens(1_280, 1)
    server.complete([*shared, *tokens(500, 2)], HINT)
    server.complete([*shared, *tokens(500, 3)], {**HINT, "session_id": "other"})
    edit(server, "agent", "offload")
    flood(server)
    edit(server, "agent", "prefetch")
    edit(server, "agent", "evict")

    def total(name: str, **labels: str) -> float:
        return server.metrics().total(f"vllm:agent_hint_{name}", **labels)

    assert total("remote_tracked_keys") == 13
    assert total("remote_shared_keys") == 0
    assert total("remote_evictions_total") == 3
    assert total("remote_orphaned_keys_total") == 3
    assert total("edits_total", operation="offload", status="applied") == 1
    assert total("transfer_seconds_count", operation="prefetch") == 1
    block_bytes = total("transfer_bytes_total", operation="offload") / 13
    assert block_bytes > 0
    # The shared part never left: the other session protects it.
    assert total("transfer_bytes_total", operation="prefetch") == 3 * block_bytes
    assert total("prefetches_loading") == total("prefetches_waiting") == 0
