"""The ways in which a server can be run and be interrupted: sessions and metrics stay true."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.multiprocess import MultiProcessCollector

from tests.serve.rig import Completion, Serve, TestServer, tokens
from tests.serve.test_metrics import PREFIX, prompt_tokens, soon
from vllm_agent_hint.cli.demo.metrics import Metrics
from vllm_agent_hint.cli.demo.server import MODEL_NAME

POOL = ["--max-model-len", "4096", "--num-gpu-blocks-override", "100"]
CONTEXT = 1_000
CONTEXT_BLOCKS = 7  # of 128 tokens
LONG = 1_500
"""Tokens of an answer that still runs when somebody has seen that it has begun."""


def turn(server: TestServer, session: str, **more: Any) -> Completion:
    """A turn of a session. Each has a context that no other session shares."""
    hint = {"session_id": session, "cache_control": {"ttl": 600}}
    context = tokens(CONTEXT, seed=sum(map(ord, session)))
    return server.complete(context, hint, **more)


def evict(server: TestServer, session: str) -> dict[str, Any]:
    """A management call. Brings the metrics of every engine up to date, too."""
    edits = {"manage_request": True, "edits": [{"type": "evict"}]}
    hint = {"session_id": session, "context_management": edits}
    response = server.post(
        "/v1/completions", {"model": MODEL_NAME, "prompt": "x", "agent_hint": hint}
    )
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()["agent_hint"]["results"][0]
    return result


def ask(server: TestServer, *paths: str) -> None:
    for path in paths:
        response = server.post(path)
        assert response.status_code == 200, response.text


def gauges(server: TestServer, **labels: str) -> dict[str, float]:
    """What the engines hold now."""
    assert evict(server, "nobody")["status"] == "missing"
    seen = server.metrics()
    return {
        "protected": seen.total(f"{PREFIX}blocks", zone="ttl", **labels),
        **{
            name: seen.total(f"{PREFIX}{name}", **labels)
            for name in ("active", "sessions", "records", "leases")
        },
    }


# -- interruptions -----------------------------------------------------------------------------

DENSE = pytest.param("qwen3-small", id="dense")
HYBRID = pytest.param("qwen3next", id="hybrid")
WINDOW = pytest.param("gemma3", id="sliding-window")


@pytest.fixture(scope="module", params=[DENSE, HYBRID, WINDOW])
def server(request: pytest.FixtureRequest, serve_module: Serve) -> TestServer:
    """With the operator's endpoints."""
    return serve_module(request.param, POOL, {"VLLM_SERVER_DEV_MODE": "1"})


EMPTYING = {
    "reset": ["/reset_prefix_cache"],
    "sleep": ["/sleep?level=1", "/wake_up"],
    "pause": ["/pause?mode=abort&clear_cache=true", "/resume"],
}
KEEPING = {
    "nap": ["/sleep?level=0", "/wake_up?tags=scheduling"],
    "hold": ["/pause?mode=keep&clear_cache=false", "/resume"],
    "drain": ["/pause?mode=wait&clear_cache=false", "/resume"],
}


@pytest.mark.parametrize("name", EMPTYING)
def test_what_empties_the_cache_between_turns_leaves_the_session_and_none_of_its_blocks(
    server: TestServer, name: str
) -> None:
    turn(server, name)
    held = gauges(server)
    assert held["protected"] >= CONTEXT_BLOCKS
    assert held["leases"] == 1

    ask(server, *EMPTYING[name])

    emptied = gauges(server)
    assert emptied["protected"] == emptied["records"] == emptied["leases"] == 0
    assert emptied["sessions"] == held["sessions"]
    assert emptied["active"] == 1
    assert turn(server, name).cached_tokens == 0, "the cache was emptied"
    assert gauges(server) == held, "the next turn is recorded as the first one was"
    assert evict(server, name)["status"] == "applied"
    assert gauges(server)["records"] == 0


@pytest.mark.parametrize("name", KEEPING)
def test_what_keeps_the_cache_between_turns_leaves_all_as_it_was(
    server: TestServer, name: str
) -> None:
    first = turn(server, name)
    held = gauges(server)

    ask(server, *KEEPING[name])

    assert gauges(server) == held
    again = turn(server, name)
    assert again.cached_tokens >= CONTEXT_BLOCKS * 128 - 128
    assert again.token_ids == first.token_ids
    assert evict(server, name)["status"] == "applied"
    assert gauges(server)["records"] == 0


def test_edits_are_answered_while_the_server_is_paused(server: TestServer) -> None:
    turn(server, "paused")
    ask(server, "/pause?mode=keep&clear_cache=false")
    answered = evict(server, "paused")
    ask(server, "/resume")
    assert answered["status"] == "applied"
    assert answered["blocks"] >= CONTEXT_BLOCKS


@pytest.mark.parametrize(
    "paths",
    [
        ["/pause?mode=keep&clear_cache=false", "/resume"],
        ["/reset_prefix_cache?reset_running_requests=true"],
        [
            "/pause?mode=keep&clear_cache=false",
            "/reset_prefix_cache?reset_running_requests=true",
            "/resume",
        ],
    ],
    ids=["pause", "reset", "reset-while-paused"],
)
def test_a_turn_that_is_interrupted_is_recorded_when_it_ends(
    server: TestServer, paths: list[str]
) -> None:
    """A reset takes its blocks away in mid-flight, and it computes them again."""
    answers: list[Completion] = []
    request = threading.Thread(target=lambda: answers.append(turn(server, "long", max_tokens=LONG)))
    before = server.metrics()["vllm:generation_tokens_total"]
    request.start()
    wait_for(lambda: server.metrics()["vllm:generation_tokens_total"] > before)
    ask(server, *paths)
    assert request.is_alive(), "it was not interrupted"
    request.join(60)

    assert len(answers[0].token_ids) == LONG
    wait_for(lambda: gauges(server)["leases"] == 1)
    assert evict(server, "long")["blocks"] >= CONTEXT_BLOCKS
    left = gauges(server)
    assert left["records"] == left["protected"] == left["leases"] == 0
    assert left["active"] == 1


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- several processes -------------------------------------------------------------------------


def test_two_api_servers_know_one_session_and_add_up_to_one_set_of_metrics(
    serve: Serve, tmp_path: Path
) -> None:
    shared = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    server = serve("qwen3-small", [*POOL, "--api-server-count", "2"], shared)
    wait_for(lambda: len(hinted_tokens_by_process(tmp_path)) == 2)
    # A connection of its own for each request, until both servers have had some.
    server.client.headers["connection"] = "close"
    turns = 0
    while turns < 4 or min(hinted_tokens_by_process(tmp_path)) == 0:
        turn(server, "agent")
        server.complete(tokens(300, seed=50 + turns))
        turns += 1
        assert turns < 400, "the kernel gives one of them every connection"

    hinted, unhinted = turns * CONTEXT, turns * 300
    soon(lambda: server.metrics()["vllm:prefix_cache_queries_total"], hinted + unhinted)
    cached = (turns - 1) * CONTEXT_BLOCKS * 128
    assert prompt_tokens(server.metrics()) == {"yes": (hinted, cached), "no": (unhinted, 0)}
    assert server.metrics()["vllm:prefix_cache_hits_total"] == cached
    for _ in range(6):  # Whichever server is asked, the gauges are the engine's own.
        held = gauges(server)
        assert (held["active"], held["sessions"], held["leases"]) == (1, 1, 1)
    assert [evict(server, "agent")["status"] for _ in range(4)] == ["applied", *["missing"] * 3]
    edits = f"{PREFIX}edits_total"
    assert server.metrics().total(edits, operation="evict", status="applied") == 1
    assert server.metrics().total(edits, operation="evict", status="missing") == 6 + 3


def hinted_tokens_by_process(shared: Path) -> list[float]:
    """What each API server has counted, from the files that they share."""
    found = []
    for file in shared.glob("counter_*.db"):
        metrics = MultiProcessCollector.merge([str(file)])
        found.append(
            sum(
                sample.value
                for metric in metrics
                for sample in metric.samples
                if sample.name == f"{PREFIX}prompt_tokens_total"
                and sample.labels["hinted"] == "yes"
            )
        )
    return found


def test_data_parallel_engines_count_apart_and_edits_reach_them_all(serve: Serve) -> None:
    server = serve("qwen3-small", [*POOL, "--data-parallel-size", "2"])

    def turn_on(rank: int, session: str, times: int) -> None:
        server.client.headers["x-data-parallel-rank"] = str(rank)
        for _ in range(times):
            turn(server, session)
        server.complete(tokens(300, seed=60 + rank))

    turn_on(0, "agent", 1)
    turn_on(1, "agent", 2)
    turn_on(1, "another", 1)
    soon(lambda: server.metrics()["vllm:prefix_cache_queries_total"], 4 * CONTEXT + 3 * 300)
    assert by_engine(server.metrics(), "prompt_tokens_total", hinted="yes") == [1_000, 3_000]
    assert by_engine(server.metrics(), "prompt_tokens_total", hinted="no") == [300, 600]
    cached = by_engine(server.metrics(), "cached_prompt_tokens_total", hinted="yes")
    assert cached == [0, CONTEXT_BLOCKS * 128], "the agent's second turn on that engine"
    gauges(server)
    assert by_engine(server.metrics(), "active") == [1, 1]
    assert by_engine(server.metrics(), "sessions") == [1, 2]
    protected = by_engine(server.metrics(), "blocks", zone="ttl")
    assert protected == [CONTEXT_BLOCKS, 2 * CONTEXT_BLOCKS]

    evicted = evict(server, "agent")
    assert (evicted["status"], evicted["blocks"]) == ("applied", 2 * CONTEXT_BLOCKS)
    assert by_engine(server.metrics(), "leases") == [0, 1]

    # The children of one request: spread by the load balancer, or pinned to one engine.
    pinned = {"x-data-parallel-rank": server.client.headers.pop("x-data-parallel-rank")}
    for number, headers in enumerate([{}, {}, pinned]):
        server.client.headers.update(headers)
        several = {"n": 2} if number == 0 else {"prompt": [tokens(CONTEXT, seed=61)] * 4}
        before = by_engine(server.metrics(), "prompt_tokens_total", hinted="yes")
        operation = done_with(server, turn_with_edits(server, "twins", **several))
        after = by_engine(server.metrics(), "prompt_tokens_total", hinted="yes")
        of_engines = [int(b - a) // CONTEXT for a, b in zip(before, after, strict=True)]
        engines = [number_of for number_of in of_engines if number_of]
        assert engines == [[1, 1], [2, 2], [4]][number]
        [result] = operation["results"]
        assert (result["status"], result["blocks"]) == ("applied", len(engines) * CONTEXT_BLOCKS)
        assert operation["retention"]["blocks"] == len(engines) * CONTEXT_BLOCKS
        left = server.get("/v1/agent_hint/sessions/twins").json()["lineages"]
        assert [lineage["blocks"] for lineage in left] == [0] * len(left)


def turn_with_edits(server: TestServer, session: str, **more: Any) -> str:
    """A turn of a session that evicts it in the end. Returns the name of its operation."""
    hint = {"session_id": session, "cache_control": {"ttl": 600}}
    hint |= {"context_management": {"edits": [{"type": "evict"}]}}
    prompt = more.pop("prompt", tokens(CONTEXT, seed=62))
    answer = server.complete(prompt, hint, temperature=0.5, **more)
    operation_id: str = answer.body["agent_hint"]["operation_id"]
    return operation_id


def done_with(server: TestServer, operation_id: str) -> dict[str, Any]:
    """What became of an operation, which has to end."""
    path = f"/v1/agent_hint/operations/{operation_id}"
    wait_for(lambda: server.get(path).json().get("status") == "done")
    operation: dict[str, Any] = server.get(path).json()
    return operation


def by_engine(seen: Metrics, name: str, **labels: str) -> list[float]:
    return [seen.total(PREFIX + name, engine=engine, **labels) for engine in ("0", "1")]
