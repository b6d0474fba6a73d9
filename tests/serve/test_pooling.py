"""Parking a context outside the GPU cache and bringing it back, on real servers."""

from typing import Any

import pytest

from tests.serve.pooling_rig import KINDS, edit, flood, with_connector
from tests.serve.rig import Serve, TestServer, tokens

HINT = {"session_id": "agent", "cache_control": {"type": "ephemeral", "ttl": 600}}


def residency(server: TestServer, session_id: str = "agent") -> dict[str, Any]:
    response = server.get(f"/v1/agent_hint/sessions/{session_id}")
    assert response.status_code == 200, response.text
    (only,) = response.json()["residency"]
    return dict(only)


def loaded(server: TestServer) -> float:
    """Tokens that the connector has brought, for whomever."""
    return server.metrics().total("vllm:external_prefix_cache_hits_total")


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
