"""The manifest of sessions in a real Mooncake store, between real servers.

Where the package can't be had these are skipped: see ``mooncake_rig``.
"""

import time
from typing import Any

from tests.serve.mooncake_rig import MooncakeMaster
from tests.serve.pooling_rig import HINT, edit, flood, loaded, manage, outcome, with_connector
from tests.serve.rig import Serve, TestServer, tokens
from vllm_agent_hint.cli.demo.server import MODEL_NAME

CONTEXT = tokens(2_000, 1)
WHOLE = 1_920


def server(serve: Serve, environment: dict[str, str], port: int, **more: str) -> TestServer:
    """A server of its own, whose scheduler finds its worker by a port."""
    args = with_connector(40, "MooncakeStoreConnector", {"lookup_rpc_port": port})
    return serve("qwen3-small", args, {**environment, **more})


def parked(server: TestServer, **more: Any) -> list[int]:
    """Run a turn and have it confirmed that the store has it. Returns what was said."""
    said = server.complete(CONTEXT, HINT, **more).token_ids
    assert edit(server, "agent", "offload")[0]["status"] == "applied"
    time.sleep(0.5)
    return said


def by_prompt(server: TestServer, session_id: str, **more: Any) -> dict[str, Any]:
    hint = {
        "session_id": session_id,
        "context_management": {"manage_request": True, "edits": [{"type": "prefetch"}]},
    }
    body = {"model": MODEL_NAME, "prompt": CONTEXT, "agent_hint": hint, **more}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    report = response.json()["agent_hint"]
    (result,) = outcome(server, report["operation_id"])["results"]
    return dict(result)


def test_a_session_is_prefetched_where_it_has_never_been_by_manifest_and_by_prompt(
    serve_in_full: Serve, mooncake: MooncakeMaster
) -> None:
    environment, _ = mooncake
    first, second = (server(serve_in_full, environment, port) for port in (0, 1))
    said = parked(first)

    salted = by_prompt(second, "salted", cache_salt="pepper")
    (fetched,) = edit(second, "agent", "prefetch")
    before = loaded(second)
    resumed = second.complete([*CONTEXT, *said, *tokens(100, 3)], {"session_id": "agent"})
    after = loaded(second)
    flood(second)
    other = by_prompt(second, "another")
    (nobody,) = edit(second, "nobody", "prefetch")

    assert salted["status"] == "missing"
    assert (fetched["status"], fetched["tokens"]) == ("applied", WHOLE), fetched
    assert resumed.cached_tokens == WHOLE
    assert before == after
    assert (other["status"], other["tokens"]) == ("applied", WHOLE), other
    assert nobody["status"] == "missing"


def test_an_evict_takes_the_page_away_though_somebody_has_just_looked_at_it(
    serve_in_full: Serve, mooncake: MooncakeMaster
) -> None:
    environment, _ = mooncake
    first, second = (server(serve_in_full, environment, port) for port in (0, 1))
    parked(first)

    edit(second, "agent", "evict")
    edit(first, "agent", "evict")
    time.sleep(0.5)
    (evicted,) = edit(second, "agent", "prefetch")

    assert evicted["status"] == "missing"
    assert evicted["reason"] == "nothing is recorded for this session"


def test_hashes_of_another_scheme_are_incompatible(
    serve_in_full: Serve, mooncake: MooncakeMaster
) -> None:
    environment, _ = mooncake
    parked(server(serve_in_full, environment, 0))
    other = server(serve_in_full, environment, 1, PYTHONHASHSEED="1")

    (foreign,) = edit(other, "agent", "prefetch")

    assert foreign["status"] == "missing"
    assert foreign["reason"].startswith("incompatible")
    assert by_prompt(other, "another")["reason"] == "the store has nothing of this prompt"


def test_a_master_that_is_gone_holds_up_no_request(
    serve_in_full: Serve, mooncake: MooncakeMaster
) -> None:
    environment, process = mooncake
    only = server(serve_in_full, environment, 0)
    only.complete(CONTEXT, HINT)
    process.kill()
    process.wait(10)

    began = time.monotonic()
    for k in range(5):
        assert manage(only, f"unknown {k}", "evict")["results"][0]["status"] == "missing"
    assert time.monotonic() - began < 3.0, "waited in vain once, then no more"
