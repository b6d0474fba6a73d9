"""``manage_request: true``: edits that run now, answered without the model."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serve.rig import Serve, TestServer, tokens
from vllm_agent_hint.frontend.engine_calls import EngineAnswer, merge_results
from vllm_agent_hint.hints import EditResult, EditStatus

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "model", "messages": [{"role": "user", "content": ""}]},
    COMPLETIONS: {"model": "model", "prompt": "x"},
}
OBJECTS = {CHAT: "chat.completion", COMPLETIONS: "text_completion"}
CHUNK_OBJECTS = {CHAT: "chat.completion.chunk", COMPLETIONS: "text_completion"}
ENDPOINTS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
BLOCK = 128


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> TestServer:
    return serve_module("qwen3-small", ["--num-gpu-blocks-override", "96"])


def managing(session: str, *edits: str) -> dict[str, Any]:
    edit_list = [{"type": edit} for edit in edits]
    return {
        "session_id": session,
        "context_management": {"manage_request": True, "edits": edit_list},
    }


def manage(server: TestServer, path: str, hint: Any, **more: Any) -> httpx.Response:
    return server.post(path, {**BODIES[path], **more, "agent_hint": hint})


def results(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["agent_hint"]["results"]
    return found


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    assert all(chunk.startswith("data: {") for chunk in chunks)
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


@ENDPOINTS
def test_the_answer_is_an_empty_turn_in_the_shape_of_its_api(server: TestServer, path: str) -> None:
    response = manage(server, path, managing("nobody", "evict"))
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == OBJECTS[path]
    assert body["model"] == "model"
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice.get("text") == "" or choice["message"]["content"] == ""
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (0, 0, 0)
    assert body["agent_hint"]["session_id"] == "nobody"
    assert len(body["agent_hint"]["operation_id"]) == 32


@ENDPOINTS
def test_every_edit_has_a_result_of_its_own_in_their_order(server: TestServer, path: str) -> None:
    server.complete(tokens(1000, seed=1), {"session_id": "in-order", "cache_control": {"ttl": 60}})
    hint = managing("in-order", "offload", "evict", "prefetch")
    offload, evict, prefetch = results(manage(server, path, hint))
    assert (offload["type"], offload["status"]) == ("offload", "unsupported")
    assert (evict["type"], evict["status"]) == ("evict", "applied")
    assert (prefetch["type"], prefetch["status"]) == ("prefetch", "unsupported")
    assert offload["reason"]
    assert evict["blocks"] == 1000 // BLOCK
    assert evict["tokens"] == 1000 // BLOCK * BLOCK


@ENDPOINTS
def test_a_session_that_nobody_has_seen_is_missing(server: TestServer, path: str) -> None:
    (evict,) = results(manage(server, path, managing("never-seen", "evict")))
    assert (evict["status"], evict["blocks"], evict["tokens"]) == ("missing", 0, 0)


def test_the_cache_salt_is_a_part_of_the_sessions_name(server: TestServer) -> None:
    hint = {"session_id": "salted", "cache_control": {"ttl": 60}}
    server.complete(tokens(600, seed=2), hint, cache_salt="pepper")
    (unsalted,) = results(manage(server, COMPLETIONS, managing("salted", "evict")))
    assert unsalted["status"] == "missing"
    salted = manage(server, COMPLETIONS, managing("salted", "evict"), cache_salt="pepper")
    assert results(salted)[0]["status"] == "applied"


@ENDPOINTS
def test_without_edits_there_are_no_results(server: TestServer, path: str) -> None:
    assert results(manage(server, path, managing("nobody"))) == []


@ENDPOINTS
def test_no_model_runs(server: TestServer, path: str) -> None:
    def prompt_tokens_so_far() -> int:
        marker = server.complete(tokens(200, seed=3)).prompt_tokens
        return int(server.metrics()["vllm:prompt_tokens_total"]) - marker

    before = prompt_tokens_so_far()
    for _ in range(5):
        assert results(manage(server, path, managing("nobody", "evict"), max_tokens=8))
    # The first marker itself is all that has come in between.
    assert prompt_tokens_so_far() - before == 200


@ENDPOINTS
def test_the_prompt_is_neither_rendered_nor_limited(server: TestServer, path: str) -> None:
    long = "word " * 50_000
    body = {"messages": [{"role": "user", "content": long}]} if path == CHAT else {"prompt": long}
    assert len(results(manage(server, path, managing("nobody", "evict"), **body))) == 1


@ENDPOINTS
def test_a_stream_ends_with_the_results_on_its_last_chunk(server: TestServer, path: str) -> None:
    chunks = events(manage(server, path, managing("nobody", "evict"), stream=True))
    assert {chunk["object"] for chunk in chunks} == {CHUNK_OBJECTS[path]}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["agent_hint"]["results"][0]["status"] == "missing"
    assert all("agent_hint" not in chunk for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in chunks)


def test_a_chat_stream_opens_with_the_assistants_role(server: TestServer) -> None:
    first, *_ = events(manage(server, CHAT, managing("nobody"), stream=True))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["finish_reason"] is None


@ENDPOINTS
def test_a_stream_with_usage_has_the_results_on_the_usage_chunk_too(
    server: TestServer, path: str
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, finish, usage = events(manage(server, path, managing("nobody", "evict"), **options))
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 0
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["agent_hint"] == finish["agent_hint"]


@ENDPOINTS
def test_continuous_usage_is_on_every_chunk(server: TestServer, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = manage(server, path, managing("nobody"), stream=True, stream_options=options)
    assert all(chunk["usage"]["total_tokens"] == 0 for chunk in events(response))


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_is_not_served_is_a_404(server: TestServer, path: str, stream: bool) -> None:
    response = manage(server, path, managing("nobody", "evict"), model="other", stream=stream)
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"


@ENDPOINTS
def test_the_body_still_needs_what_its_api_demands(server: TestServer, path: str) -> None:
    body = {"model": "model", "agent_hint": managing("nobody", "evict")}
    assert server.post(path, body).status_code == 400


@ENDPOINTS
def test_a_wrong_hint_is_a_400(server: TestServer, path: str) -> None:
    hint = managing("nobody", "pin")
    response = manage(server, path, hint)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "agent_hint.context_management.edits.0.type"


@ENDPOINTS
def test_a_beam_search_may_manage(server: TestServer, path: str) -> None:
    response = manage(server, path, managing("nobody", "evict"), use_beam_search=True)
    assert len(results(response)) == 1


@pytest.fixture
def client(server: TestServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def test_openais_client_reads_the_answer(client: openai.OpenAI) -> None:
    extra = {"agent_hint": managing("nobody", "evict")}
    chat = client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": ""}], extra_body=extra
    )
    assert chat.choices[0].message.content == ""
    assert chat.agent_hint["results"][0]["status"] == "missing"  # type: ignore[attr-defined]
    completion = client.completions.create(model="model", prompt="x", extra_body=extra)
    assert completion.choices[0].text == ""
    assert completion.agent_hint["results"][0]["status"] == "missing"  # type: ignore[attr-defined]


def test_openais_client_reads_the_stream(client: openai.OpenAI) -> None:
    extra = {"agent_hint": managing("nobody", "evict")}
    *_, last = client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": ""}], extra_body=extra, stream=True
    )
    assert last.agent_hint["results"][0]["status"] == "missing"  # type: ignore[attr-defined]
    *_, last_text = client.completions.create(
        model="model",
        prompt="x",
        extra_body=extra,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert last_text.agent_hint["results"][0]["status"] == "missing"  # type: ignore[attr-defined]


def test_openais_client_collects_the_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="model",
        messages=[{"role": "user", "content": ""}],
        extra_body={"agent_hint": managing("nobody", "evict")},
    ) as stream:
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == ""
    assert whole.choices[0].finish_reason == "stop"


def test_an_engine_without_prefix_caching_says_unsupported(serve: Serve) -> None:
    server = serve("qwen3-small", ["--num-gpu-blocks-override", "96", "--no-enable-prefix-caching"])
    hint = {"session_id": "a", "cache_control": {"ttl": 60}}
    assert server.complete(tokens(300), hint).prompt_tokens == 300
    (evict,) = results(manage(server, COMPLETIONS, managing("a", "evict")))
    assert evict["status"] == "unsupported"
    assert "caching" in evict["reason"]


@pytest.fixture
def broken_server(serve_in_full: Serve, tmp_path: Path) -> TestServer:
    """A server in which sessions of certain names break our code: see ``saboteur.py``."""
    spec = importlib.util.find_spec("tests.serve.saboteur")
    assert spec is not None
    assert spec.origin is not None
    (tmp_path / "saboteur.py").write_bytes(Path(spec.origin).read_bytes())
    distribution = tmp_path / "saboteur-1.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: saboteur\nVersion: 1\n")
    (distribution / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nsaboteur = saboteur:register\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": path, "VLLM_PLUGINS": "agent_hint,saboteur"}
    return serve_in_full("qwen3-small", ["--num-gpu-blocks-override", "96"], environment)


def test_our_own_faults_are_never_the_clients(broken_server: TestServer) -> None:
    server = broken_server
    body = {**BODIES[COMPLETIONS], "max_tokens": 2}

    # Reading the hint breaks: the request runs as if it had none.
    unread = server.post(COMPLETIONS, {**body, "agent_hint": {"session_id": "break-reading"}})
    assert unread.status_code == 200, unread.text
    xargs = {"agent_hint": '{"session_id": "break-reading"}'}
    assert server.post(COMPLETIONS, {**body, "vllm_xargs": xargs}).status_code == 200

    # The call to the engine breaks: a result, not an error.
    (evict,) = results(manage(server, COMPLETIONS, managing("break-the-engine", "evict")))
    assert evict["status"] == "failed"
    assert evict["reason"]

    # Building the answer breaks: nothing runs, and the client learns that it did not.
    unanswered = manage(server, COMPLETIONS, managing("break-the-answer", "evict"))
    assert unanswered.status_code == 501

    # The metrics break: nobody notices.
    (evict,) = results(manage(server, COMPLETIONS, managing("break-the-metrics", "evict")))
    assert evict["status"] == "missing"

    assert server.complete("hello").prompt_tokens > 0
    log = server.log_text()
    assert log.count("reading agent_hint in a request body failed") == 1
    assert log.count("answering a management request failed") == 1
    assert log.count("updating vllm:agent_hint_ metrics failed") == 1


def result(status: str, blocks: int = 0, reason: str = "") -> EditResult:
    return EditResult(
        type="evict", status=EditStatus(status), blocks=blocks, tokens=blocks * BLOCK, reason=reason
    )


def merged(*results_by_engine: EditResult) -> EditResult:
    answers = [
        EngineAnswer(engine, active=True, results=(result,))
        for engine, result in enumerate(results_by_engine)
    ]
    (merged_result,) = merge_results(answers)
    return merged_result


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("applied", "missing"),
        ("applied", "unsupported"),
        ("partial", "missing"),
        ("clipped", "missing"),
        ("pending", "missing"),
        ("rejected", "missing"),
        ("unsupported", "missing"),
    ],
)
def test_the_engine_that_knows_the_session_decides(better: str, worse: str) -> None:
    assert merged(result(better, 3, "mine"), result(worse, 0, "other")) == result(better, 3, "mine")
    assert merged(result(worse, 0, "other"), result(better, 3, "mine")) == result(better, 3, "mine")


def test_blocks_and_tokens_of_all_engines_add_up() -> None:
    assert merged(result("applied", 3), result("applied", 4)) == result("applied", 7)


def test_a_session_is_not_missing_where_an_engine_failed() -> None:
    assert merged(result("missing"), result("failed", reason="gone")).status == "failed"


def test_what_only_some_engines_did_is_partial_where_another_failed() -> None:
    both = merged(result("applied", 3), result("failed", reason="gone"))
    assert (both.status, both.blocks) == (EditStatus.PARTIAL, 3)
    assert "1 of 2" in both.reason
    assert "gone" in both.reason


def test_no_edits_merge_to_no_results() -> None:
    assert merge_results([EngineAnswer(0, active=True), EngineAnswer(1, active=True)]) == []
