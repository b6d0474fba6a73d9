"""Flags that are off are really off, and shadow mode watches without touching."""

from typing import Any

import httpx
import pytest

from tests.serve.rig import Serve, TestServer, tokens
from tests.serve.test_metrics import PREFIX, soon
from vllm_agent_hint.cli.demo.server import MODEL_NAME

POOL = ["--max-model-len", "4096", "--num-gpu-blocks-override", "40"]
HINT = {"session_id": "agent", "cache_control": {"ttl": 600}}


def send(server: TestServer, hint: Any, **more: Any) -> httpx.Response:
    body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 2, "agent_hint": hint}
    return server.post("/v1/completions", {**body, **more})


def managing(*edits: dict[str, Any]) -> dict[str, Any]:
    return {
        "session_id": "agent",
        "context_management": {"manage_request": True, "edits": list(edits)},
    }


def results(response: httpx.Response) -> list[tuple[str, str]]:
    assert response.status_code == 200, response.text
    return [(r["status"], r["reason"]) for r in response.json()["agent_hint"]["results"]]


@pytest.fixture(scope="module")
def without_sam(serve_module: Serve) -> TestServer:
    return serve_module("qwen3-small", POOL, {"VLLM_AGENT_HINT_SAM": "0"})


def test_without_sam_vllms_own_scheduler_runs(without_sam: TestServer) -> None:
    assert "sessions are off (VLLM_AGENT_HINT_SAM=0)" in without_sam.log_text()
    assert "retention and evict are active" not in without_sam.log_text()


def test_without_sam_a_hint_has_no_effect(without_sam: TestServer) -> None:
    context = tokens(2_000, 1)
    without_sam.complete(context, HINT)
    assert without_sam.complete([*context, 9]).cached_tokens > 0
    for seed in range(3):
        without_sam.complete(tokens(2_500, 100 + seed))
    assert without_sam.complete([*context, 9]).cached_tokens == 0
    assert not without_sam.metrics().names(PREFIX)


def test_without_sam_a_wrong_hint_is_still_a_400(without_sam: TestServer) -> None:
    refused = send(without_sam, {"session_id": ""})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "agent_hint.session_id"


def test_without_sam_edits_are_unsupported_and_name_the_flag(without_sam: TestServer) -> None:
    answered = results(send(without_sam, managing({"type": "evict"}, {"type": "offload"})))
    assert answered == [("unsupported", "sessions are off (VLLM_AGENT_HINT_SAM=0)")] * 2


def test_without_pooling_transfers_are_unsupported_and_name_the_flag(serve: Serve) -> None:
    server = serve("qwen3-small", POOL, {"VLLM_AGENT_HINT_POOLING": "0"})
    server.complete(tokens(600), HINT)
    edits = [{"type": "offload"}, {"type": "prefetch"}, {"type": "evict"}]
    offload, prefetch, evict = results(send(server, managing(*edits)))
    assert offload[0] == prefetch[0] == "unsupported"
    assert "VLLM_AGENT_HINT_POOLING=0" in offload[1]
    assert "VLLM_AGENT_HINT_POOLING=0" in prefetch[1]
    assert evict[0] == "applied", "it needs no connector"


def test_without_ranges_a_range_is_a_400_that_names_the_flag_and_shadow_mode_watches(
    serve: Serve,
) -> None:
    """One server for the two: both are what a careful operator starts with."""
    server = serve("qwen3-small", POOL, {"VLLM_AGENT_HINT_SHADOW": "1"})
    assert "shadow mode" in server.log_text()
    assert "retention and evict are active" not in server.log_text()
    ranged = {"type": "evict", "block_start": 0, "block_end": 2}
    for hint in (managing(ranged), {**HINT, "cache_control": {"block_offset": 3}}):
        refused = send(server, hint)
        assert refused.status_code == 400
        assert "VLLM_AGENT_HINT_RANGES=1" in refused.text

    context = tokens(2_000, 1)
    server.complete(context, HINT)
    soon(lambda: server.metrics().total(f"{PREFIX}blocks", zone="ttl"), 15)
    for seed in range(3):
        server.complete(tokens(2_500, 100 + seed))
    assert server.complete([*context, 9]).cached_tokens == 0, "as without a hint"
    overrides = f"{PREFIX}pressure_overrides_total"
    soon(lambda: server.metrics().total(overrides, zone="ttl"), 15)
    assert server.metrics()[f"{PREFIX}sessions"] == 1
    assert server.metrics()[f"{PREFIX}active"] == 1


def test_with_ranges_a_range_is_taken(serve: Serve) -> None:
    server = serve("qwen3-small", POOL, {"VLLM_AGENT_HINT_RANGES": "1"})
    server.complete(tokens(600), {**HINT, "cache_control": {"ttl": 60, "block_offset": 3}})
    [(status, _)] = results(
        send(server, managing({"type": "evict", "block_start": 0, "block_end": 2}))
    )
    assert status in ("applied", "partial")
