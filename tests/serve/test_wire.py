"""Hints on a real server's two OpenAI endpoints: refused by field, or taken."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.rig import Serve, TestServer, tokens

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BATCHED_CHAT = "/v1/chat/completions/batch"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"prompt": "hello"},
}
COMMON = {"model": "model", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
HINT = {"session_id": "agent-1", "cache_control": {"ttl": 60}}
EVICT = {"edits": [{"type": "evict"}]}
ENDPOINTS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])

# As JSON text: NaN, lone surrogates and huge numbers have no other spelling.
REFUSED = [
    ("3", ""),
    ("[]", ""),
    ("NaN", ""),
    ('"not JSON"', ""),
    ('{"\\ud800": 1}', ""),
    ('{"session": "SECRET"}', ".session"),
    ('{"\\u001b[31m": 1}', ".\\x1b[31m"),
    ('{"session_id": 5}', ".session_id"),
    ('{"session_id": ""}', ".session_id"),
    ('{"session_id": "\\ud800"}', ".session_id"),
    ('{"session_id": "SECRET\\u0000"}', ".session_id"),
    ('{"session_id": "SECRET%s"}' % ("a" * 251), ".session_id"),
    ('{"session_id": {"a": {"SECRET": []}}}', ".session_id"),
    ('{"cache_control": []}', ".cache_control"),
    ('{"cache_control": {"ttl": NaN}}', ".cache_control.ttl"),
    ('{"cache_control": {"ttl": Infinity}}', ".cache_control.ttl"),
    ('{"cache_control": {"ttl": 1%s}}' % ("0" * 400), ".cache_control.ttl"),
    ('{"cache_control": {"ttl": -1}}', ".cache_control.ttl"),
    ('{"cache_control": {"ttl": 3600.5}}', ".cache_control.ttl"),
    ('{"cache_control": {"ttl": "SECRET"}}', ".cache_control.ttl"),
    ('{"cache_control": {"ttl": true}}', ".cache_control.ttl"),
    ('{"cache_control": {"type": "SECRET"}}', ".cache_control.type"),
    ('{"cache_control": {"ttl": 9, "tll": 9}}', ".cache_control.tll"),
    (
        '{"session_id": "a", "context_management": {"edits": [{"type": "SECRET"}]}}',
        ".context_management.edits.0.type",
    ),
    (
        json.dumps({"session_id": "a", "context_management": {"edits": [{"type": "evict"}] * 17}}),
        ".context_management.edits",
    ),
    (
        '{"session_id": "a", "context_management": {"manage_request": 1}}',
        ".context_management.manage_request",
    ),
    ('{"a":' * 500 + "1" + "}" * 500, ".a"),
]
# Rules about several fields: the path is that of the object or, better, of the field.
REFUSED_AS_A_WHOLE = [
    ('{"context_management": {"edits": [{"type": "evict"}]}}', "session_id"),
    ('{"context_management": {"manage_request": true}}', "session_id"),
    ('{"parent_session_id": "SECRET"}', "session_id"),
    ('{"session_id": "SECRET", "parent_session_id": "SECRET"}', "parent_session_id"),
    ('{"cache_control": {"block_offset": 3}}', "block_offset"),
    (
        '{"session_id": "a", "context_management": '
        '{"edits": [{"type": "evict", "block_start": 0, "block_end": 3}]}}',
        "block_start",
    ),
    (
        '{"session_id": "a", "context_management": '
        '{"edits": [{"type": "offload", "include_children": true}]}}',
        "include_children",
    ),
]


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> TestServer:
    # The log then shows every request's SamplingParams.
    return serve_module("qwen3-small", ["--num-gpu-blocks-override", "96", "--enable-log-requests"])


def post_raw(server: TestServer, path: str, hint: str, **more: Any) -> httpx.Response:
    """Post a body whose hint is spelled out as JSON text."""
    body = json.dumps({**COMMON, **BODIES[path], **more, "agent_hint": "HINT"})
    return server.client.post(
        path,
        content=body.replace('"HINT"', hint).encode(),
        headers={"content-type": "application/json"},
    )


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(response: httpx.Response, *, stream: bool) -> str:
    """What the model said."""
    if not stream:
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    choices = [chunk["choices"][0] for chunk in events(response)]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
    )


def long_body(path: str) -> dict[str, Any]:
    """A prompt of some KV blocks."""
    text = "word " * 200
    return {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}


def evicted_blocks(server: TestServer, session: str) -> int:
    """Evicts a session; 0 if the engine doesn't know it."""
    hint = {"session_id": session, "context_management": {**EVICT, "manage_request": True}}
    response = server.post(COMPLETIONS, {"model": "model", "prompt": "x", "agent_hint": hint})
    (result,) = response.json()["agent_hint"]["results"]
    assert (result["status"] == "missing") == (result["blocks"] == 0)
    return int(result["blocks"])


def prompt_tokens_run(server: TestServer) -> Iterator[int]:
    """How many prompt tokens the engine has run since the last time this was asked.

    A request of ours goes last, so that the engine has reported everything before it.
    """
    seen = 0.0
    while True:
        marker = server.complete(tokens(200, seed=99)).prompt_tokens
        total = server.metrics()["vllm:prompt_tokens_total"]
        yield int(total - seen) - marker
        seen = total


@ENDPOINTS
@pytest.mark.parametrize(("hint", "field"), REFUSED)
def test_a_wrong_field_is_a_400_with_its_path(
    server: TestServer, path: str, hint: str, field: str
) -> None:
    response = post_raw(server, path, hint)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == f"agent_hint{field}"
    assert "SECRET" not in response.text


@ENDPOINTS
@pytest.mark.parametrize(("hint", "named"), REFUSED_AS_A_WHOLE)
def test_fields_that_contradict_each_other_are_a_400_that_names_them(
    server: TestServer, path: str, hint: str, named: str
) -> None:
    response = post_raw(server, path, hint)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].split(".")[0] == "agent_hint"
    assert named in error["message"]
    assert "SECRET" not in response.text


@ENDPOINTS
def test_a_stream_with_a_wrong_hint_is_a_400_too(server: TestServer, path: str) -> None:
    response = post_raw(server, path, '{"session_id": 5}', stream=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "agent_hint.session_id"


def test_a_refused_hint_runs_no_model_and_the_server_goes_on(server: TestServer) -> None:
    run_since = prompt_tokens_run(server)
    next(run_since)
    for hint, _ in (*REFUSED, *REFUSED_AS_A_WHOLE):
        assert post_raw(server, COMPLETIONS, hint, prompt="x" * 500).status_code == 400
    assert next(run_since) == 0
    assert server.is_alive()


@ENDPOINTS
@STREAMED
def test_a_hint_changes_nothing_in_the_answer(server: TestServer, path: str, stream: bool) -> None:
    body = {**COMMON, **BODIES[path], "stream": stream}
    plain = text_of(server.post(path, body), stream=stream)
    hinted = text_of(server.post(path, {**body, "agent_hint": HINT}), stream=stream)
    assert plain
    assert hinted == plain


@ENDPOINTS
@STREAMED
def test_a_hint_reaches_the_engine(server: TestServer, path: str, stream: bool) -> None:
    body = {**COMMON, **long_body(path), "stream": stream, "agent_hint": HINT}
    assert server.post(path, body).status_code == 200
    assert evicted_blocks(server, HINT["session_id"]) > 0


@ENDPOINTS
@STREAMED
def test_edits_after_the_request_change_nothing_in_the_answer(
    server: TestServer, path: str, stream: bool
) -> None:
    body = {**COMMON, **BODIES[path], "stream": stream}
    hint = {**HINT, "context_management": EVICT}
    plain = text_of(server.post(path, body), stream=stream)
    assert text_of(server.post(path, {**body, "agent_hint": hint}), stream=stream) == plain


@ENDPOINTS
@pytest.mark.parametrize("hint", [None, {}, {"cache_control": {}}, {"session_id": "a" * 256}])
def test_a_small_hint_is_taken(server: TestServer, path: str, hint: Any) -> None:
    response = server.post(path, {**COMMON, **BODIES[path], "agent_hint": hint})
    assert response.status_code == 200, response.text


def test_one_request_may_become_several_in_the_engine(server: TestServer) -> None:
    hint = {**HINT, "context_management": EVICT}
    body = {**COMMON, "prompt": ["one", "two"], "n": 2, "temperature": 1, "agent_hint": hint}
    response = server.post(COMPLETIONS, body)
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 4


def test_batched_chat_takes_hints(server: TestServer) -> None:
    body = {**COMMON, "messages": [long_body(CHAT)["messages"]] * 2}
    hint = {**HINT, "session_id": "batched"}
    assert server.post(BATCHED_CHAT, {**body, "agent_hint": hint}).status_code == 200
    assert evicted_blocks(server, "batched") > 0
    refused = server.post(BATCHED_CHAT, {**body, "agent_hint": {"session_id": 5}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "agent_hint.session_id"
    managing = {"session_id": "a", "context_management": {"manage_request": True}}
    refused = server.post(BATCHED_CHAT, {**body, "agent_hint": managing})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "agent_hint.context_management.manage_request"


@ENDPOINTS
def test_a_beam_search_refuses_edits_and_ignores_retention(server: TestServer, path: str) -> None:
    body = {**COMMON, **BODIES[path], "use_beam_search": True, "n": 2}
    edits = {**HINT, "context_management": EVICT}
    refused = server.post(path, {**body, "agent_hint": edits})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "use_beam_search"
    assert server.post(path, {**body, "agent_hint": HINT}).status_code == 200


@ENDPOINTS
def test_vllm_xargs_carry_a_hint_as_text(server: TestServer, path: str) -> None:
    hint = {**HINT, "session_id": f"text {path}"}
    xargs = {"agent_hint": json.dumps(hint), "agent_hint_stamp": "not ours"}
    response = server.post(path, {**COMMON, **long_body(path), "vllm_xargs": xargs})
    assert response.status_code == 200, response.text
    assert evicted_blocks(server, f"text {path}") > 0


@ENDPOINTS
def test_the_bodys_own_hint_goes_before_the_one_in_vllm_xargs(
    server: TestServer, path: str
) -> None:
    xargs = {"agent_hint": json.dumps({"session_id": f"second {path}"})}
    hint = {**HINT, "session_id": f"first {path}"}
    body = {**COMMON, **long_body(path), "vllm_xargs": xargs, "agent_hint": hint}
    assert server.post(path, body).status_code == 200
    assert evicted_blocks(server, f"second {path}") == 0
    assert evicted_blocks(server, f"first {path}") > 0


@ENDPOINTS
@STREAMED
@pytest.mark.parametrize(
    ("hint", "field"),
    [
        ('{"session_id": 5}', "session_id"),
        ('{"cache_control": {"ttl": NaN}}', "cache_control.ttl"),
        (
            '{"session_id": "a", "context_management": {"manage_request": true}}',
            "context_management.manage_request",
        ),
    ],
)
def test_a_wrong_hint_in_vllm_xargs_is_a_400(
    server: TestServer, path: str, stream: bool, hint: str, field: str
) -> None:
    body = {**COMMON, **BODIES[path], "stream": stream, "vllm_xargs": {"agent_hint": hint}}
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == f"agent_hint.{field}"


@ENDPOINTS
def test_other_vllm_xargs_stay_as_they_are(server: TestServer, path: str) -> None:
    body = {**COMMON, **BODIES[path], "vllm_xargs": {"mine": f"kept {path}"}, "agent_hint": HINT}
    assert server.post(path, body).status_code == 200
    assert f"'mine': 'kept {path}', 'agent_hint': {{'session_id'" in server.log_text()
