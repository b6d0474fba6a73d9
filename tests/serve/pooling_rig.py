"""Servers with a KV connector over the tier of this project, and what tests do with them."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.serve.rig import Completion, Serve, TestServer, tokens
from vllm_agent_hint.cli.demo.server import MODEL_NAME

BLOCK: Final = 128
KINDS: Final = {"dense": ("qwen3-small", 40), "hybrid": ("qwen3next", 60), "window": ("gemma3", 60)}
"""Model, and a pool of blocks that holds a context and one flood prompt, not two."""


def hinted(session_id: str = "agent") -> dict[str, Any]:
    """A session that is kept for longer than any test runs."""
    return {"session_id": session_id, "cache_control": {"type": "ephemeral", "ttl": 600}}


HINT: Final = hinted()


def tier(**options: Any) -> dict[str, Any]:
    """``kv_connector_extra_config`` of the tier."""
    return {
        "spec_name": "AgentHintOffloadingSpec",
        "spec_module_path": "vllm_agent_hint.pooling.tier",
        "cpu_bytes_to_use": 200_000_000,
        **options,
    }


def with_connector(
    blocks: int, connector: str = "OffloadingConnector", extra: Any = None, **more: Any
) -> list[str]:
    """Server arguments: a pool of ``blocks`` and a KV connector."""
    config = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": tier() if extra is None else extra,
        **more,
    }
    return [
        *("--max-model-len", "4096", "--num-gpu-blocks-override", str(blocks)),
        *("--kv-transfer-config", json.dumps(config)),
    ]


def stock_server(serve: Serve, model: str, blocks: int = 120) -> TestServer:
    """One without hints and without a connector; as it is, its cache holds all that is asked."""
    args = ["--max-model-len", "4096", "--num-gpu-blocks-override", str(blocks)]
    return serve(model, args, {"VLLM_AGENT_HINT": "0"})


def flood(server: TestServer, seed: int = 100, requests: int = 5) -> None:
    """One-shot traffic that fills the GPU cache several times over."""
    for k in range(requests):
        server.complete(tokens(2_500, seed + k), max_tokens=2)


def manage(server: TestServer, session_id: str, *edits: str, **more: Any) -> dict[str, Any]:
    """Run edits now, through the completions API. Returns the report."""
    body = {
        "model": MODEL_NAME,
        "prompt": "x",
        "agent_hint": {
            "session_id": session_id,
            "context_management": {
                "manage_request": True,
                "edits": [{"type": edit} for edit in edits],
                **more,
            },
        },
    }
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    report: dict[str, Any] = response.json()["agent_hint"]
    return report


def outcome(server: TestServer, operation_id: str, seconds: float = 20.0) -> dict[str, Any]:
    """What became of an operation, once it is done."""
    until = time.monotonic() + seconds
    while True:
        response = server.get(f"/v1/agent_hint/operations/{operation_id}")
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        if answer["status"] == "done":
            return answer
        assert time.monotonic() < until, answer
        time.sleep(0.02)


def edit(server: TestServer, session_id: str, *edits: str) -> list[dict[str, Any]]:
    """Run edits now and wait for their results."""
    results: list[dict[str, Any]] = outcome(
        server, manage(server, session_id, *edits)["operation_id"]
    )["results"]
    return results


def away(
    server: TestServer, context: Sequence[int], session_id: str = "agent", **flooding: int
) -> Completion:
    """Have a session whose context lies in the store only. Returns what its turn said."""
    said = server.complete(context, hinted(session_id))
    (parked,) = edit(server, session_id, "offload")
    assert parked["status"] == "applied", parked
    flood(server, **flooding)
    return said


@dataclass(frozen=True)
class RoundTrip:
    """A session that has gone to the store and come back.

    Args:
        parked: What its offload came to.
        fetched: What its prefetch did, after a flood.
        resumed: The turn after that.
        loaded: Tokens that this turn had to load once more.
        evicted: What its evict came to.
    """

    parked: dict[str, Any]
    fetched: dict[str, Any]
    resumed: Completion
    loaded: float
    evicted: dict[str, Any]

    def assert_came_back_whole(self, num_tokens: int) -> None:
        for result in (self.parked, self.fetched):
            assert (result["status"], result["tokens"]) == ("applied", num_tokens), result
        assert self.resumed.cached_tokens == num_tokens
        assert self.loaded == 0


def round_trip(server: TestServer, resume_with: Sequence[int]) -> RoundTrip:
    """Take the session of ``HINT`` to the store and back."""
    (parked,) = edit(server, "agent", "offload")
    flood(server)
    (fetched,) = edit(server, "agent", "prefetch")
    before = loaded(server)
    resumed = server.complete(resume_with, HINT)
    again = loaded(server) - before
    (evicted,) = edit(server, "agent", "evict")
    return RoundTrip(parked, fetched, resumed, again, evicted)


def loaded(server: TestServer) -> float:
    """Tokens that the connector has brought, for whomever."""
    return server.metrics().total("vllm:external_prefix_cache_hits_total")


def residency(server: TestServer, session_id: str = "agent") -> dict[str, Any]:
    """Where the context of a session is, on a server of one engine."""
    response = server.get(f"/v1/agent_hint/sessions/{session_id}")
    assert response.status_code == 200, response.text
    (only,) = response.json()["residency"]
    return dict(only)


def whole_blocks(prompt: Sequence[int]) -> int:
    """Tokens of a prompt that a longer one with this prefix finds cached."""
    return len(prompt) // BLOCK * BLOCK


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*/*.kv"))
