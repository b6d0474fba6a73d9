"""What a failing store costs on a real server: the transfer, and nothing else."""

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve.at_rest import ours, wait_until
from tests.serve.pooling_rig import (
    HINT,
    KINDS,
    away,
    edit,
    manage,
    outcome,
    stock_server,
    tier,
    with_connector,
)
from tests.serve.rig import Serve, TestServer, tokens

CONTEXT = tokens(2_000, 1)


def without_hints(serve: Serve, kind: str) -> list[int]:
    model, blocks = KINDS[kind]
    return stock_server(serve, model, blocks).complete(CONTEXT).token_ids


def on_disk(server_of: Serve, kind: str, directory: Path, **options: Any) -> TestServer:
    """A server whose tier has hardly any host memory, so that all lies in the directory."""
    model, blocks = KINDS[kind]
    extra = tier(directory=str(directory), cpu_bytes_to_use=400_000, **options)
    more = {"kv_load_failure_policy": "recompute"}
    return server_of(model, with_connector(blocks, extra=extra, **more))


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_goes_away_during_a_load_fails_the_prefetch_and_no_request(
    serve: Serve, kind: str, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    server = on_disk(serve, kind, store, load_bytes_per_second=2e6)
    away(server, CONTEXT)

    report = manage(server, "agent", "prefetch")
    wait_until(lambda: ours(server, "prefetches_loading") == 1)
    shutil.rmtree(store)
    (result,) = outcome(server, report["operation_id"])["results"]
    again = server.complete(CONTEXT, HINT)

    assert result["status"] in ("failed", "partial"), result
    assert again.token_ids == without_hints(serve, kind)
    assert server.is_alive()
    assert server.metrics().total("vllm:agent_hint_prefetches_loading") == 0


def test_a_directory_that_goes_away_during_a_request_s_own_load_costs_time_and_no_token(
    serve: Serve, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    server = on_disk(serve, "dense", store, load_bytes_per_second=1e6)
    away(server, CONTEXT)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(server.complete(CONTEXT)))
    asking.start()
    time.sleep(0.3)
    shutil.rmtree(store)
    asking.join()

    assert answers[0].token_ids == without_hints(serve, "dense")


def test_requests_go_on_at_once_while_prefetches_load(serve: Serve) -> None:
    """A slow store makes a prefetch slow, not those who do not wait for it."""
    slow = tier(load_bytes_per_second=1e6)
    server = serve("qwen3-small", with_connector(80, extra=slow))
    away(server, CONTEXT, requests=8)
    report = manage(server, "agent", "prefetch")
    began = time.monotonic()
    for k in range(5):
        server.complete(tokens(200, 50 + k), max_tokens=2)
    spent = time.monotonic() - began

    operation = server.get(f"/v1/agent_hint/operations/{report['operation_id']}").json()
    assert operation["status"] == "pending", "the load takes half a second"
    assert spent < 1.0
    (result,) = outcome(server, report["operation_id"])["results"]
    assert result["status"] == "applied"


@pytest.mark.parametrize(
    "calls",
    [
        ["/pause?mode=abort&clear_cache=false", "/resume"],
        ["/pause?mode=wait&clear_cache=false", "/resume"],
        ["/pause?mode=keep&clear_cache=false", "/resume"],
        ["/sleep?level=0", "/wake_up?tags=scheduling"],
        ["/reset_prefix_cache"],
        ["/reset_prefix_cache?reset_running_requests=true"],
    ],
    ids=["abort", "wait", "keep", "sleep", "reset", "reset-running"],
)
def test_pause_sleep_and_reset_give_up_a_prefetch_and_it_can_be_asked_for_again(
    paused_server: TestServer, calls: list[str]
) -> None:
    server = paused_server
    away(server, CONTEXT, requests=8)
    report = manage(server, "agent", "prefetch")

    for call in calls:
        response = server.post(call)
        assert response.status_code == 200, response.text

    (result,) = outcome(server, report["operation_id"])["results"]
    assert result["status"] == "rejected", result
    (again,) = edit(server, "agent", "prefetch")
    assert again["status"] == "applied", again
    assert server.metrics().total("vllm:agent_hint_prefetches_loading") == 0


@pytest.fixture(scope="module")
def paused_server(serve_module: Serve) -> TestServer:
    """One for all: each test leaves it as it was."""
    slow = tier(load_bytes_per_second=1e6)
    return serve_module(
        "qwen3-small",
        with_connector(80, extra=slow),
        {"VLLM_SERVER_DEV_MODE": "1"},
    )
