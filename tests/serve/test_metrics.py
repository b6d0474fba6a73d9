"""``vllm:agent_hint_`` on vLLM's own ``/metrics``."""

import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest

from tests.serve.rig import Serve, TestServer, tokens
from vllm_agent_hint.cli.demo.metrics import Metrics
from vllm_agent_hint.frontend.metrics import AgentHintMetrics, take
from vllm_agent_hint.hints import EditStatus, EditType

PREFIX = "vllm:agent_hint_"
FEW_BLOCKS = ["--num-gpu-blocks-override", "96"]
PROMPT_BLOCKS = 7  # of 1000 tokens, 128 each
STATS: dict[str, Any] = {
    "active": True,
    "sessions": 2,
    "conversations": 17,
    "records": 9,
    "leases": 11,
    "blocks": {"ordinary": 10, "session": 4, "ttl": 3},
    "expired": 6,
    "superseded_blocks": 12,
    "superseded_tokens": 13,
    "superseded_regret_tokens": 14,
    "links_rejected": 15,
    "pressure_overrides": {"session": 1, "ttl": 5},
    "clipped": {"protected_share": 7},
    "edits": [["evict", "applied", 8]],
    "slices": [0.0002, 0.5],
}


def manage(server: TestServer, session: str, *edits: str) -> None:
    response = server.post(
        "/v1/completions",
        {
            "model": "model",
            "prompt": "x",
            "agent_hint": {
                "session_id": session,
                "context_management": {
                    "manage_request": True,
                    "edits": [{"type": edit} for edit in edits],
                },
            },
        },
    )
    assert response.status_code == 200, response.text


def soon(read: Callable[[], float], expected: float) -> None:
    """An engine's statistics arrive a moment after the answer of the request."""
    deadline = time.monotonic() + 10
    while read() != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert read() == expected


def test_every_series_is_there_at_zero_from_the_start(serve: Serve) -> None:
    metrics = serve("qwen3-small", FEW_BLOCKS).metrics()
    gauges = {"active", "sessions", "conversations", "records", "leases", "blocks"}
    gauges |= {"remote_tracked_keys", "remote_shared_keys"}
    gauges |= {"prefetches_waiting", "prefetches_loading"}
    counters = {
        "remote_orphaned_keys",
        "remote_evictions",
        "keep_alives",
        "keep_alive_losses",
        "transfer_bytes",
        "transfer_failures",
        "transfer_back_pressure",
        "pressure_overrides",
        "expired",
        "clipped",
        "superseded_blocks",
        "superseded_tokens",
        "superseded_regret_tokens",
        "links_rejected",
        "edits",
        "prompt_tokens",
        "cached_prompt_tokens",
    }
    histogram = {
        f"{name}_{part}"
        for name in ("slice_seconds", "prefetch_queue_seconds", "transfer_seconds")
        for part in ("bucket", "count", "sum")
    }
    found = {name.removeprefix(PREFIX) for name in metrics.names(PREFIX) if "_created" not in name}
    assert found == gauges | histogram | {f"{counter}_total" for counter in counters}
    ours = [s for s in metrics.samples if s.name.startswith(PREFIX) and "_created" not in s.name]
    assert all(sample.value == 0 for sample in ours)
    assert all(sample.labels["model_name"] == "model" for sample in ours)
    assert all(sample.labels["engine"] == "0" for sample in ours)
    edits = {
        (sample.labels["operation"], sample.labels["status"])
        for sample in ours
        if sample.name == f"{PREFIX}edits_total"
    }
    assert edits == {
        (operation.value, status.value) for operation in EditType for status in EditStatus
    }


def test_a_session_is_counted_while_it_is_known_and_never_named(serve: Serve) -> None:
    server = serve("qwen3-small", FEW_BLOCKS)
    hint = {"session_id": "Agent-Of-Interest", "cache_control": {"ttl": 600}}
    server.complete(tokens(1000), hint)
    server.complete("unhinted")  # an engine reports with its next step
    soon(lambda: server.metrics()[f"{PREFIX}sessions"], 1)
    soon(lambda: server.metrics().total(f"{PREFIX}blocks", zone="ttl"), PROMPT_BLOCKS)
    assert "Agent-Of-Interest" not in server.get("/metrics").text


def test_edits_are_counted_by_operation_and_outcome(serve: Serve) -> None:
    server = serve("qwen3-small", FEW_BLOCKS)
    server.complete(tokens(1000), {"session_id": "a", "cache_control": {"ttl": 600}})

    def edits(operation: str, status: str) -> float:
        total = f"{PREFIX}edits_total"
        return server.metrics().total(total, operation=operation, status=status)

    # No step follows: the numbers come with the answer of the idle engine.
    manage(server, "a", "evict", "offload")
    assert edits("evict", "applied") == 1
    assert edits("offload", "unsupported") == 1
    assert server.metrics().total(f"{PREFIX}blocks", zone="ttl") == 0
    manage(server, "never-seen", "evict")
    assert edits("evict", "missing") == 1
    assert server.metrics()[f"{PREFIX}edits_total"] == 3


def test_an_edit_behind_a_request_is_counted_once_for_all_its_children(serve: Serve) -> None:
    server = serve("qwen3-small", FEW_BLOCKS)
    hint = {"session_id": "a", "context_management": {"edits": [{"type": "evict"}]}}
    body = {"model": "model", "prompt": ["one", "two"], "n": 2, "max_tokens": 3, "agent_hint": hint}
    assert server.post("/v1/completions", body).status_code == 200
    server.complete("unhinted")
    soon(lambda: server.metrics()[f"{PREFIX}edits_total"], 1)


def test_an_edit_in_vllm_xargs_is_counted_once_whatever_operation_the_client_made_up(
    serve: Serve,
) -> None:
    server = serve("qwen3-small", FEW_BLOCKS)
    hint = {"session_id": "a", "context_management": {"edits": [{"type": "evict"}]}}
    xargs = {"agent_hint": json.dumps(hint), "agent_hint_stamp": "made up"}
    body = {"model": "model", "prompt": "one", "n": 2, "max_tokens": 3, "vllm_xargs": xargs}
    assert server.post("/v1/completions", body).status_code == 200
    server.complete("unhinted")
    soon(lambda: server.metrics()[f"{PREFIX}edits_total"], 1)


def test_without_statistics_there_are_no_metrics_and_hints_work(serve: Serve) -> None:
    server = serve("qwen3-small", [*FEW_BLOCKS, "--disable-log-stats"])
    server.complete(tokens(1000), {"session_id": "a", "cache_control": {"ttl": 600}})
    manage(server, "a", "evict")
    assert not server.metrics().names(PREFIX)


def test_prompt_tokens_by_hint_are_vllms_own_numbers_in_two_parts(serve: Serve) -> None:
    server = serve("qwen3-small", FEW_BLOCKS)
    for _ in range(2):
        server.complete(tokens(1000), {"session_id": "a", "cache_control": {"ttl": 600}})
        server.complete(tokens(600, seed=2))
        server.complete(tokens(600, seed=2), {})  # asks for nothing
    cached = PROMPT_BLOCKS * 128
    soon(lambda: server.metrics()["vllm:prefix_cache_queries_total"], 2000 + 2400)
    seen = server.metrics()
    assert prompt_tokens(seen) == {"yes": (2000, cached), "no": (2400, 3 * 4 * 128)}
    assert seen["vllm:prefix_cache_hits_total"] == cached + 3 * 4 * 128
    assert seen[f"{PREFIX}active"] == 1
    assert seen[f"{PREFIX}records"] == PROMPT_BLOCKS
    assert seen[f"{PREFIX}leases"] == 1


def test_two_api_servers_add_up_to_one_series(serve: Serve) -> None:
    server = serve("qwen3-small", [*FEW_BLOCKS, "--api-server-count", "2"])
    for session in range(8):
        # A connection of its own each, so that both servers get some.
        server.client.headers["connection"] = "close"
        manage(server, f"never-seen-{session}", "evict")
    total = f"{PREFIX}edits_total"
    soon(lambda: server.metrics().total(total, operation="evict", status="missing"), 8)
    gauges = [s for s in server.metrics().samples if s.name == f"{PREFIX}sessions"]
    assert [gauge.labels for gauge in gauges] == [{"model_name": "model", "engine": "0"}]


@pytest.fixture
def metrics() -> AgentHintMetrics:
    return AgentHintMetrics("tiny", [0, 1])


def exposed() -> Metrics:
    return Metrics.parse(generate_latest(REGISTRY).decode())


def prompt_tokens(seen: Metrics) -> dict[str, tuple[float, float]]:
    """Prompt tokens and cached ones of requests with and without a hint, all engines together."""
    return {
        hinted: (
            seen.total(f"{PREFIX}prompt_tokens_total", hinted=hinted),
            seen.total(f"{PREFIX}cached_prompt_tokens_total", hinted=hinted),
        )
        for hinted in ("yes", "no")
    }


def test_gauges_are_absolute_and_counters_add_up(metrics: AgentHintMetrics) -> None:
    metrics.take(1, STATS)
    metrics.take(1, STATS)
    seen = exposed()
    assert seen.total(f"{PREFIX}sessions", engine="1") == 2
    assert seen.total(f"{PREFIX}sessions", engine="0") == 0
    assert seen.total(f"{PREFIX}blocks", engine="1", zone="session") == 4
    assert seen.total(f"{PREFIX}pressure_overrides_total", engine="1", zone="ttl") == 10
    assert seen.total(f"{PREFIX}expired_total", engine="1") == 12
    assert seen.total(f"{PREFIX}clipped_total", engine="1", bound="protected_share") == 14
    assert seen.total(f"{PREFIX}edits_total", operation="evict", status="applied") == 16
    assert seen.total(f"{PREFIX}active", engine="1") == 1
    assert seen.total(f"{PREFIX}active", engine="0") == 0
    assert seen.total(f"{PREFIX}records", engine="1") == 9
    assert seen.total(f"{PREFIX}leases", engine="1") == 11
    assert seen.total(f"{PREFIX}conversations", engine="1") == 17
    assert seen.total(f"{PREFIX}superseded_blocks_total", engine="1") == 24
    assert seen.total(f"{PREFIX}superseded_tokens_total", engine="1") == 26
    assert seen.total(f"{PREFIX}superseded_regret_tokens_total", engine="1") == 28
    assert seen.total(f"{PREFIX}links_rejected_total", engine="1") == 30


def test_slice_times_are_a_histogram(metrics: AgentHintMetrics) -> None:
    metrics.take(1, STATS)
    seen, name = exposed(), f"{PREFIX}slice_seconds"
    assert seen.total(f"{name}_count", engine="1") == 2
    assert seen.total(f"{name}_sum", engine="1") == pytest.approx(0.5002)
    assert seen.total(f"{name}_bucket", engine="1", le="0.001") == 1
    assert seen.total(f"{name}_bucket", engine="1", le="+Inf") == 2
    assert seen.total(f"{name}_count", engine="0") == 0


def test_unhinted_prompt_tokens_are_what_vllm_counts_beside_the_hinted(
    metrics: AgentHintMetrics,
) -> None:
    metrics.take_prompt_tokens(0, (30, 10), SimpleNamespace(queries=100, hits=15))
    metrics.take_prompt_tokens(0, (0, 0), SimpleNamespace(queries=7, hits=0))
    assert prompt_tokens(exposed()) == {"yes": (30, 10), "no": (77, 5)}


def test_the_engines_share_of_the_tokens_is_none_where_there_is_no_news() -> None:
    manager = SimpleNamespace(agent_hint_metrics=AgentHintMetrics("tiny", [0]))
    take(manager, 0, None, SimpleNamespace(queries=7, hits=3))
    take(manager, 0, {**STATS, "prompt_tokens": (4, 2)}, SimpleNamespace(queries=4, hits=2))
    assert prompt_tokens(exposed()) == {"yes": (4, 2), "no": (7, 3)}


def test_an_answer_to_a_management_call_has_no_prompt_tokens(metrics: AgentHintMetrics) -> None:
    manager = SimpleNamespace(agent_hint_metrics=metrics)
    take(manager, 0, STATS)
    assert exposed()[f"{PREFIX}prompt_tokens_total"] == 0


def test_a_second_manager_in_the_process_takes_the_names_over(metrics: AgentHintMetrics) -> None:
    metrics.take(0, STATS)
    second = AgentHintMetrics("tiny", [0])
    assert exposed()[f"{PREFIX}edits_total"] == 0
    second.take(0, STATS)
    metrics.take(0, STATS)  # the first one still works, unseen
    assert exposed()[f"{PREFIX}edits_total"] == 8
