"""The main job on a real server: hint, pause, flood, resume."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.serve.rig import Serve, TestServer, tokens
from vllm_agent_hint.cli.demo.server import MODEL_NAME

BLOCK = 128
CONTEXT = 2_000
FLOOD_PROMPT = 2_500
FLOOD_REQUESTS = 4


def pool(blocks: int) -> list[str]:
    return ["--max-model-len", "4096", "--num-gpu-blocks-override", str(blocks)]


SMALL_POOL = pool(40)
"""40 blocks of 128 tokens: a context and one flood prompt, not two."""

HINT = {"session_id": "agent", "cache_control": {"type": "ephemeral", "ttl": 600}}
EVICT: dict[str, Any] = {"manage_request": True, "edits": [{"type": "evict"}]}
STOCK = {"VLLM_AGENT_HINT": "0"}

DENSE = pytest.param("qwen3-small", SMALL_POOL, id="dense")
HYBRID = pytest.param("qwen3next", pool(60), id="hybrid")
WINDOW = pytest.param("gemma3", pool(60), id="sliding-window")

KINDS = pytest.mark.parametrize(("kind", "args"), [DENSE, HYBRID, WINDOW])


def flood(server: TestServer, seed: int = 100) -> list[int]:
    """One-shot traffic. Returns the tokens that it was answered with."""
    answers: list[int] = []
    for k in range(FLOOD_REQUESTS):
        answers += server.complete(tokens(FLOOD_PROMPT, seed + k)).token_ids
    return answers


def reusable(prompt: Sequence[int]) -> int:
    """Tokens that a longer prompt with this prefix finds cached: whole blocks."""
    return len(prompt) // BLOCK * BLOCK


def resume_after_flood(server: TestServer, hint: Any) -> tuple[int, list[int]]:
    """A turn, a flood, and the next turn. Returns its cached tokens, and all tokens said."""
    context = tokens(CONTEXT, 1)
    first = server.complete(context, hint, max_tokens=8)
    said = flood(server)
    grown = [*context, *first.token_ids, *tokens(300, 2)]
    second = server.complete(grown, hint, max_tokens=8)
    return second.cached_tokens, [*first.token_ids, *said, *second.token_ids]


@KINDS
def test_a_hinted_context_survives_the_flood_that_evicts_it_from_stock(
    serve: Serve, kind: str, args: list[str]
) -> None:
    stock, said_by_stock = resume_after_flood(serve(kind, args, STOCK), HINT)
    unhinted, said_unhinted = resume_after_flood(serve(kind, args), None)
    hinted, said_hinted = resume_after_flood(serve(kind, args), HINT)

    assert stock == unhinted == 0
    assert hinted >= reusable(tokens(CONTEXT, 1)) - BLOCK
    assert said_by_stock == said_unhinted == said_hinted


@KINDS
def test_a_conversation_without_a_hint_survives_the_flood_beside_a_hinted_session(
    serve: Serve, kind: str, args: list[str]
) -> None:
    def third_turn(server: TestServer) -> tuple[int, list[int]]:
        said: list[int] = []
        context = tokens(1_200, 1)
        server.complete(tokens(300, 9), HINT)
        for seed in (2, 3):
            said += server.complete(context, max_tokens=8).token_ids
            context = [*context, *said[-8:], *tokens(200, seed)]
        said += flood(server)
        third = server.complete(context, max_tokens=8)
        return third.cached_tokens, [*said, *third.token_ids]

    ordinary, said_ordinary = third_turn(serve(kind, args, {"VLLM_AGENT_HINT_CONVERSATIONS": "0"}))
    server = serve(kind, args)
    recognised, said_recognised = third_turn(server)

    assert ordinary == 0
    assert recognised >= 1_200 - BLOCK
    assert server.metrics()["vllm:agent_hint_conversations"] == 1
    assert said_ordinary == said_recognised


@KINDS
def test_greedy_tokens_are_the_same_with_edits_flying(
    serve: Serve, kind: str, args: list[str]
) -> None:
    def conversation(server: TestServer, *, edits: bool) -> list[int]:
        context = tokens(600, 3)
        said: list[int] = []
        for turn in range(4):
            hint: dict[str, Any] = dict(HINT)
            if edits and turn == 1:
                hint["context_management"] = {"edits": [{"type": "evict"}]}
            answer = server.complete(context, hint, max_tokens=8)
            said += answer.token_ids
            context = [*context, *answer.token_ids, *tokens(200, 10 + turn)]
            if edits:
                body = {"session_id": "agent", "context_management": EVICT}
                managed = server.post(
                    "/v1/completions", {"model": MODEL_NAME, "prompt": "x", "agent_hint": body}
                )
                assert managed.status_code == 200, managed.text
            said += server.complete(tokens(FLOOD_PROMPT, 40 + turn)).token_ids
        return said

    assert conversation(serve(kind, args, STOCK), edits=False) == conversation(
        serve(kind, args), edits=True
    )


def test_an_expired_context_is_ordinary_again(serve: Serve) -> None:
    server = serve("qwen3-small", SMALL_POOL)
    context = tokens(CONTEXT, 1)
    server.complete(context, {"session_id": "agent", "cache_control": {"ttl": 0.2}})

    for step in range(100):
        if server.metrics().total("vllm:agent_hint_expired_total"):
            break
        server.complete(tokens(8, step))
        time.sleep(0.1)
    flood(server)

    assert server.metrics().total("vllm:agent_hint_expired_total") == 1
    assert server.metrics().total("vllm:agent_hint_blocks", zone="ttl") == 0
    assert server.complete(context).cached_tokens == 0


def test_an_evicted_context_makes_room_and_an_unevicted_neighbour_stays(serve: Serve) -> None:
    server = serve("qwen3-small", pool(56))
    kept, dropped = tokens(CONTEXT, 5), tokens(CONTEXT, 6)
    server.complete(kept, {**HINT, "session_id": "kept"})
    server.complete(
        dropped,
        {
            "session_id": "dropped",
            "cache_control": {"ttl": 600},
            "context_management": {"edits": [{"type": "evict"}]},
        },
    )
    flood(server)

    assert server.complete([*kept, 9]).cached_tokens == reusable(kept)
    assert server.complete([*dropped, 9]).cached_tokens == 0


def test_the_main_job_on_vllm_serve_in_processes_of_its_own(serve_in_full: Serve) -> None:
    cached, _ = resume_after_flood(serve_in_full("qwen3-small", SMALL_POOL), HINT)

    assert cached >= reusable(tokens(CONTEXT, 1)) - BLOCK


def test_a_turn_that_a_stop_string_ends_is_a_success(serve: Serve) -> None:
    """vLLM's front end finds stop strings, and aborts in the engine what they end."""
    server = serve("qwen3-small", SMALL_POOL)
    first = server.complete(tokens(600, 1), HINT, max_tokens=16)
    text = first.body["choices"][0]["text"]
    rewound = {**HINT, "context_management": {"edits": [{"type": "evict"}]}}

    answer = server.complete(tokens(600, 1), rewound, max_tokens=16, stop=[text[8:10]])

    assert answer.body["choices"][0]["finish_reason"] == "stop"
    edits = "vllm:agent_hint_edits_total"
    server.complete(tokens(8))
    assert server.metrics().total(edits, operation="evict", status="applied") == 1
    assert server.metrics().total(edits, operation="evict", status="rejected") == 0


def test_our_flags_are_no_strangers_to_vllm(serve: Serve) -> None:
    server = serve(
        "qwen3-small", ["--fail-on-environ-validation"], {"VLLM_AGENT_HINT_RELEASE_SLICE": "64"}
    )

    assert "Unknown vLLM environment variable" not in server.log_text()
    assert "release_slice=64" in server.log_text()
