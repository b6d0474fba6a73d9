"""``manage_request: true``: edits that run now, answered without the model."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.serve import apis
from tests.serve.apis import (
    ALL,
    APIS,
    APIS_AND_STREAMS,
    BATCH,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    STREAMING_APIS,
    body,
    report,
)
from tests.serve.rig import Serve, TestServer, tokens
from vllm_agent_hint.frontend.engine_calls import EngineAnswer, merge_results
from vllm_agent_hint.hints import EditResult, EditStatus

BLOCK = 128
WHOLE: dict[str, Any] = {
    CHAT: ChatCompletion,
    BATCH: ChatCompletion,
    COMPLETIONS: Completion,
    RESPONSES: Response,
    MESSAGES: Message,
}
"""The model of a reply in the clients' own libraries, which are stricter than the clients."""
EVENT: dict[str, Any] = {
    CHAT: ChatCompletionChunk,
    COMPLETIONS: Completion,
    RESPONSES: ResponseStreamEvent,
    MESSAGES: RawMessageStreamEvent,
}


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
    return server.post(path, body(path, **more, agent_hint=hint))


def results(response: httpx.Response, *, stream: bool = False) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = report(response, stream=stream)["results"]
    return found


@APIS
def test_the_answer_is_an_empty_turn_in_the_shape_of_its_api(server: TestServer, path: str) -> None:
    response = manage(server, path, managing("nobody", "evict"))
    answer = response.json()
    assert WHOLE[path].model_validate(answer).model == "model"
    assert not apis.said(response, stream=False)
    assert not any(number for number in answer["usage"].values() if isinstance(number, int))
    ended = {
        CHAT: lambda: [choice["finish_reason"] for choice in answer["choices"]] == ["stop"],
        BATCH: lambda: [choice["index"] for choice in answer["choices"]] == [0, 1],
        COMPLETIONS: lambda: [choice["finish_reason"] for choice in answer["choices"]] == ["stop"],
        RESPONSES: lambda: (answer["status"], answer["output"]) == ("completed", []),
        MESSAGES: lambda: answer["stop_reason"] == "end_turn",
    }
    assert ended[path]()
    said_of_it = report(response)
    assert said_of_it["session_id"] == "nobody"
    assert len(said_of_it["operation_id"]) == 32


@STREAMING_APIS
def test_a_stream_is_one_that_the_apis_own_client_takes(server: TestServer, path: str) -> None:
    response = manage(server, path, managing("nobody", "evict"), stream=True)
    found = [event for event in apis.events(response) if event.data]
    for event in found:
        TypeAdapter(EVENT[path]).validate_python(event.data)
    assert results(response, stream=True)[0]["status"] == "missing"
    assert len(apis.reports(response, stream=True)) == 1
    assert not apis.said(response, stream=True)
    assert [event.name for event in found] == {
        CHAT: ["", ""],
        COMPLETIONS: [""],
        RESPONSES: ["response.created", "response.in_progress", "response.completed"],
        MESSAGES: [
            "message_start",
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ],
    }[path]


@APIS_AND_STREAMS
def test_every_edit_has_a_result_of_its_own_in_their_order(
    server: TestServer, path: str, stream: bool
) -> None:
    server.complete(tokens(1000, seed=1), {"session_id": "in-order", "cache_control": {"ttl": 60}})
    hint = managing("in-order", "offload", "evict", "prefetch")
    response = manage(server, path, hint, stream=stream)
    offload, evict, prefetch = results(response, stream=stream)
    assert (offload["type"], offload["status"]) == ("offload", "unsupported")
    assert (evict["type"], evict["status"]) == ("evict", "applied")
    assert (prefetch["type"], prefetch["status"]) == ("prefetch", "unsupported")
    assert offload["reason"]
    assert evict["blocks"] == 1000 // BLOCK
    assert evict["tokens"] == 1000 // BLOCK * BLOCK


@APIS
def test_a_session_that_nobody_has_seen_is_missing(server: TestServer, path: str) -> None:
    (evict,) = results(manage(server, path, managing("never-seen", "evict")))
    assert (evict["status"], evict["blocks"], evict["tokens"]) == ("missing", 0, 0)


@APIS
def test_the_cache_salt_is_a_part_of_the_sessions_name(server: TestServer, path: str) -> None:
    hint = {"session_id": "salted", "cache_control": {"ttl": 60}}
    server.complete(tokens(600, seed=2), hint, cache_salt="pepper")
    (unsalted,) = results(manage(server, path, managing("salted", "evict")))
    assert unsalted["status"] == "missing"
    salted = manage(server, path, managing("salted", "evict"), cache_salt="pepper")
    assert results(salted)[0]["status"] == "applied"


@APIS_AND_STREAMS
def test_without_edits_there_are_no_results(server: TestServer, path: str, stream: bool) -> None:
    response = manage(server, path, managing("nobody"), stream=stream)
    assert results(response, stream=stream) == []


@APIS_AND_STREAMS
def test_vllm_xargs_manage_in_the_shape_of_the_route(
    server: TestServer, path: str, stream: bool
) -> None:
    xargs = {"agent_hint": json.dumps(managing("nobody", "evict"))}
    response = server.post(path, body(path, stream=stream, vllm_xargs=xargs))
    assert results(response, stream=stream)[0]["status"] == "missing"
    assert not apis.said(response, stream=stream)


@APIS
def test_no_model_runs(server: TestServer, path: str) -> None:
    def prompt_tokens_so_far() -> int:
        marker = server.complete(tokens(200, seed=3)).prompt_tokens
        return int(server.metrics()["vllm:prompt_tokens_total"]) - marker

    before = prompt_tokens_so_far()
    for _ in range(5):
        assert results(manage(server, path, managing("nobody", "evict")))
    # The first marker itself is all that has come in between.
    assert prompt_tokens_so_far() - before == 200


@APIS
def test_the_prompt_is_neither_rendered_nor_limited(server: TestServer, path: str) -> None:
    hint = managing("nobody", "evict")
    response = server.post(path, body(path, "word " * 50_000, agent_hint=hint))
    assert len(results(response)) == 1


def test_a_chat_stream_opens_with_the_assistants_role(server: TestServer) -> None:
    first, *_ = apis.events(manage(server, CHAT, managing("nobody"), stream=True))
    assert first.data
    assert first.data["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first.data["choices"][0]["finish_reason"] is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_with_usage_has_the_results_on_the_usage_chunk_too(
    server: TestServer, path: str
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = manage(server, path, managing("nobody", "evict"), **options)
    finish, usage = [event.data for event in apis.events(response) if event.data][-2:]
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 0
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["agent_hint"] == finish["agent_hint"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_continuous_usage_is_on_every_chunk(server: TestServer, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = manage(server, path, managing("nobody"), stream=True, stream_options=options)
    data = [event.data for event in apis.events(response) if event.data]
    assert all(chunk["usage"]["total_tokens"] == 0 for chunk in data)


@APIS_AND_STREAMS
def test_a_model_that_is_not_served_is_a_404(server: TestServer, path: str, stream: bool) -> None:
    response = manage(server, path, managing("nobody", "evict"), model="other", stream=stream)
    assert response.status_code == 404
    assert "other" in response.json()["error"]["message"]


@APIS
def test_the_body_still_needs_what_its_api_demands(server: TestServer, path: str) -> None:
    incomplete = {"model": "model", "agent_hint": managing("nobody", "evict")}
    assert server.post(path, incomplete).status_code == 400


@APIS_AND_STREAMS
def test_a_wrong_hint_is_a_400(server: TestServer, path: str, stream: bool) -> None:
    response = manage(server, path, managing("nobody", "pin"), stream=stream)
    assert apis.error(response)[0] == "agent_hint.context_management.edits.0.type"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_beam_search_may_manage(server: TestServer, path: str) -> None:
    response = manage(server, path, managing("nobody", "evict"), use_beam_search=True)
    assert len(results(response)) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"background": None},
        {"background": True},
        {"truncation": None},
        {"previous_response_id": "resp_0"},
        {"temperature": -1},
        {"tools": [{"type": "function", "name": "f", "parameters": {}}], "tool_choice": "required"},
    ],
)
def test_what_a_response_repeats_of_its_request_is_no_obstacle(
    server: TestServer, more: dict[str, Any]
) -> None:
    assert results(manage(server, RESPONSES, managing("nobody", "evict"), **more))
    streamed = manage(server, RESPONSES, managing("nobody", "evict"), **more, stream=True)
    assert results(streamed, stream=True)


def test_a_batch_never_streams(server: TestServer) -> None:
    assert results(manage(server, BATCH, managing("nobody", "evict"), stream=True))


def test_an_api_key_is_asked_for_as_for_any_request(serve: Serve) -> None:
    server = serve("qwen3-small", ["--num-gpu-blocks-override", "96", "--api-key", "right"])
    for path in ALL:
        request = body(path, agent_hint=managing("nobody", "evict"))
        assert server.post(path, request).status_code == 401
        authorized = server.post(path, request, {"Authorization": "Bearer right"})
        assert results(authorized)[0]["status"] == "missing"


# -- the clients' own libraries --------------------------------------------------------------------

MANAGING = {"agent_hint": managing("nobody", "evict")}
HINTED = {"agent_hint": {"session_id": "sdk", "cache_control": {"ttl": 1}}}
EXTRA = pytest.mark.parametrize("extra", [MANAGING, HINTED], ids=["managing", "hinted"])
USER = {"role": "user", "content": "hello"}


@pytest.fixture
def openai_client(server: TestServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def anthropic_client(server: TestServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0)


def session_in(reply: Any) -> str:
    return str(reply.agent_hint["session_id"])


@EXTRA
def test_openais_client_reads_the_answer(openai_client: openai.OpenAI, extra: Any) -> None:
    session = extra["agent_hint"]["session_id"]
    chat = openai_client.chat.completions.create(
        model="model", messages=[USER], max_tokens=3, extra_body=extra
    )
    completion = openai_client.completions.create(
        model="model", prompt="x", max_tokens=3, extra_body=extra
    )
    response = openai_client.responses.create(
        model="model", input="x", max_output_tokens=20, extra_body=extra
    )
    assert session_in(chat) == session_in(completion) == session_in(response) == session
    nothing_said = extra is MANAGING
    assert (chat.choices[0].message.content == "") is nothing_said
    assert (completion.choices[0].text == "") is nothing_said
    assert (response.output_text == "") is nothing_said


@EXTRA
def test_openais_client_reads_the_streams(openai_client: openai.OpenAI, extra: Any) -> None:
    session = extra["agent_hint"]["session_id"]
    *_, chunk = openai_client.chat.completions.create(
        model="model", messages=[USER], max_tokens=3, extra_body=extra, stream=True
    )
    assert session_in(chunk) == session
    *_, usage = openai_client.completions.create(
        model="model",
        prompt="x",
        max_tokens=3,
        extra_body=extra,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert session_in(usage) == session
    *_, completed = openai_client.responses.create(
        model="model", input="x", max_output_tokens=3, extra_body=extra, stream=True
    )
    assert session_in(completed) == session


@EXTRA
def test_openais_client_collects_the_streams(openai_client: openai.OpenAI, extra: Any) -> None:
    with openai_client.chat.completions.stream(
        model="model", messages=[USER], max_tokens=3, extra_body=extra
    ) as stream:
        if extra is MANAGING:
            choice = stream.get_final_completion().choices[0]
            assert (choice.message.content, choice.finish_reason) == ("", "stop")
        else:
            stream.until_done()
    with openai_client.responses.stream(
        model="model", input="x", max_output_tokens=20, extra_body=extra
    ) as events:
        assert (events.get_final_response().output_text == "") is (extra is MANAGING)


@EXTRA
def test_anthropics_client_reads_answer_and_stream(
    anthropic_client: anthropic.Anthropic, extra: Any
) -> None:
    session = extra["agent_hint"]["session_id"]
    ask: Any = {"model": "model", "messages": [USER], "max_tokens": 20, "extra_body": extra}
    message = anthropic_client.messages.create(**ask)
    assert session_in(message) == session
    assert (message.content[0].text == "") is (extra is MANAGING)  # type: ignore[union-attr]
    *_, delta, _ = anthropic_client.messages.create(**ask, stream=True)
    assert delta.type == "message_delta"
    assert session_in(delta) == session
    with anthropic_client.messages.stream(**ask) as stream:
        collected = stream.get_final_message()
    assert collected.stop_reason in ("end_turn", "max_tokens")
    assert collected.content[0].type == "text"


# -- engines and faults ----------------------------------------------------------------------------


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
    xargs = {"agent_hint": '{"session_id": "break-reading"}'}
    for path in ALL:
        # Reading the hint breaks: the request runs as if it had none.
        unread = server.post(path, body(path, agent_hint={"session_id": "break-reading"}))
        assert apis.reports(unread, stream=False) == []
        assert apis.reports(server.post(path, body(path, vllm_xargs=xargs)), stream=False) == []

        # Naming the operation in the reply breaks: the reply is stock's.
        silent = server.post(path, body(path, agent_hint={"session_id": "break-the-report"}))
        assert apis.reports(silent, stream=False) == []

    # Looking for a hint in a raw body breaks, where there is none.
    unhinted = server.post("/v1/messages", body("/v1/messages", session_id="break-finding"))
    assert unhinted.status_code == 200, unhinted.text

    # The call to the engine breaks: a result, not an error.
    (evict,) = results(manage(server, COMPLETIONS, managing("break-the-engine", "evict")))
    assert evict["status"] == "failed"
    assert evict["reason"]

    # Nobody can say then whether there is such a session.
    asked = server.get("/v1/agent_hint/sessions/break-the-engine")
    assert (asked.status_code, asked.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    freed = server.client.delete("/v1/agent_hint/sessions/break-the-engine")
    assert [r["status"] for r in freed.json()["results"]] == ["failed"]

    # Building the answer breaks: nothing runs, and the client learns that it did not.
    for path in ALL:
        unanswered = manage(server, path, managing("break-the-answer", "evict"))
        assert unanswered.status_code == 501

    # The metrics break: nobody notices.
    (evict,) = results(manage(server, COMPLETIONS, managing("break-the-metrics", "evict")))
    assert evict["status"] == "missing"

    assert server.complete("hello").prompt_tokens > 0
    log = server.log_text()
    assert log.count("reading agent_hint in a request body failed") == 1
    assert log.count("naming the operation in a reply failed") == 1
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
