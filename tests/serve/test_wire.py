"""Hints on a real server's HTTP APIs: refused by field, or taken, and the reply says so."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve import apis
from tests.serve.apis import (
    APIS,
    APIS_AND_STREAMS,
    BATCH,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    STREAMING_APIS,
    body,
    long_body,
    report,
    said,
)
from tests.serve.rig import Serve, TestServer, tokens

HINT = {"session_id": "agent-1", "cache_control": {"ttl": 60}}
EVICT = {"edits": [{"type": "evict"}]}

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
    arguments = ["--num-gpu-blocks-override", "96", "--enable-log-requests", "--enable-scale-out"]
    return serve_module("qwen3-small", arguments)


def post_raw(server: TestServer, path: str, hint: str, **more: Any) -> httpx.Response:
    """Post a body whose hint is spelled out as JSON text."""
    text = json.dumps({**body(path), **more, "agent_hint": "HINT"})
    return server.client.post(
        path,
        content=text.replace('"HINT"', hint).encode(),
        headers={"content-type": "application/json"},
    )


def evicted_blocks(server: TestServer, session: str) -> int:
    """Evicts a session; 0 if the engine doesn't know it."""
    hint = {"session_id": session, "context_management": {**EVICT, "manage_request": True}}
    (result,) = report(server.post(COMPLETIONS, body(COMPLETIONS, agent_hint=hint)))["results"]
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


def stamps(server: TestServer, operation_id: str) -> list[int]:
    """``engine_requests`` of every stamp that the engine was sent under an operation."""
    found = re.findall(rf"<agent hint, operation {operation_id} of (\d+)>", server.log_text())
    return [int(number) for number in found]


@APIS
@pytest.mark.parametrize(("hint", "field"), REFUSED)
def test_a_wrong_field_is_a_400_with_its_path(
    server: TestServer, path: str, hint: str, field: str
) -> None:
    response = post_raw(server, path, hint)
    assert apis.error(response)[0] == f"agent_hint{field}"
    assert "SECRET" not in response.text


@APIS
@pytest.mark.parametrize(("hint", "named"), REFUSED_AS_A_WHOLE)
def test_fields_that_contradict_each_other_are_a_400_that_names_them(
    server: TestServer, path: str, hint: str, named: str
) -> None:
    response = post_raw(server, path, hint)
    field, message = apis.error(response)
    assert field
    assert field.split(".")[0] == "agent_hint"
    assert named in f"{field} {message}"
    assert "SECRET" not in response.text


@STREAMING_APIS
def test_a_stream_with_a_wrong_hint_is_a_400_too(server: TestServer, path: str) -> None:
    response = post_raw(server, path, '{"session_id": 5}', stream=True)
    assert apis.error(response)[0] == "agent_hint.session_id"


@APIS
def test_a_salt_that_is_not_unicode_is_a_400_beside_a_hint(server: TestServer, path: str) -> None:
    response = post_raw(server, path, json.dumps(HINT), cache_salt="\ud800")
    assert response.status_code == 400
    # All request classes but this one look at it themselves.
    if path == BATCH:
        assert apis.error(response)[0] == "cache_salt"


@APIS
def test_a_refused_hint_runs_no_model_and_the_server_goes_on(server: TestServer, path: str) -> None:
    run_since = prompt_tokens_run(server)
    next(run_since)
    for hint, _ in (*REFUSED, *REFUSED_AS_A_WHOLE):
        assert post_raw(server, path, hint).status_code == 400
    assert next(run_since) == 0
    assert server.is_alive()
    assert "Traceback" not in server.log_text()


@APIS_AND_STREAMS
def test_a_hint_changes_nothing_in_the_answer(server: TestServer, path: str, stream: bool) -> None:
    plain = said(server.post(path, body(path, stream=stream)), stream=stream)
    hinted = server.post(path, body(path, stream=stream, agent_hint=HINT))
    assert plain
    assert said(hinted, stream=stream) == plain


@APIS_AND_STREAMS
def test_a_hint_reaches_the_engine(server: TestServer, path: str, stream: bool) -> None:
    hint = {**HINT, "session_id": f"reaches {path} {stream}"}
    response = server.post(path, long_body(path, stream=stream, agent_hint=hint))
    assert response.status_code == 200, response.text
    assert evicted_blocks(server, hint["session_id"]) > 0


@APIS_AND_STREAMS
def test_edits_after_the_request_change_nothing_in_the_answer(
    server: TestServer, path: str, stream: bool
) -> None:
    hint = {**HINT, "context_management": EVICT}
    plain = said(server.post(path, body(path, stream=stream)), stream=stream)
    edited = server.post(path, body(path, stream=stream, agent_hint=hint))
    assert said(edited, stream=stream) == plain


@APIS
@pytest.mark.parametrize("hint", [None, {}, {"cache_control": {}}, {"session_id": "a" * 256}])
def test_a_small_hint_is_taken(server: TestServer, path: str, hint: Any) -> None:
    response = server.post(path, body(path, agent_hint=hint))
    assert response.status_code == 200, response.text


# -- what the reply says ---------------------------------------------------------------------------


@APIS_AND_STREAMS
def test_the_reply_names_session_and_operation(server: TestServer, path: str, stream: bool) -> None:
    response = server.post(path, body(path, stream=stream, agent_hint=HINT))
    said_of_it = report(response, stream=stream)
    assert said_of_it.keys() == {"session_id", "operation_id"}
    assert said_of_it["session_id"] == "agent-1"
    assert stamps(server, said_of_it["operation_id"])


@APIS_AND_STREAMS
def test_an_anonymous_hint_is_answered_with_no_session(
    server: TestServer, path: str, stream: bool
) -> None:
    hint = {"cache_control": {"ttl": 60}}
    response = server.post(path, body(path, stream=stream, agent_hint=hint))
    assert report(response, stream=stream)["session_id"] is None


@APIS_AND_STREAMS
@pytest.mark.parametrize("more", [{}, {"session_id": "bare"}])
def test_without_a_hint_the_reply_says_nothing(
    server: TestServer, path: str, stream: bool, more: dict[str, Any]
) -> None:
    response = server.post(path, body(path, stream=stream, **more))
    assert response.status_code == 200, response.text
    assert "agent_hint" not in response.text


def without_names_and_times(text: str) -> str:
    text = re.sub(r'"(chatcmpl-|cmpl-|resp_|msg_)[0-9a-f-]+"', '"ID"', text)
    return re.sub(r'"created(_at)?":\d+', '"created":0', text)


@STREAMING_APIS
@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_is_stocks_but_for_one_field(server: TestServer, path: str, usage: bool) -> None:
    more: dict[str, Any] = {"stream": True}
    if usage:
        more["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    stock, ours = set(), set()
    # Stock puts tokens that come fast into one chunk, now these, now those.
    for _ in range(30):
        plain = server.post(path, body(path, tokens=6, **more))
        hinted = server.post(path, body(path, tokens=6, **more, agent_hint=HINT))
        at_the_end = 2 if usage and path in (CHAT, COMPLETIONS) else 1
        assert len(apis.reports(hinted, stream=True)) == at_the_end
        stock.add(without_names_and_times(plain.text))
        ours.add(re.sub(r',"agent_hint":\{[^}]*\}', "", without_names_and_times(hinted.text)))
        if stock & ours:
            return
    raise AssertionError(f"no stream of {ours} is one of {stock}")


def test_one_report_for_several_choices_streamed(server: TestServer) -> None:
    several = {"n": 2, "temperature": 1, "stream": True, "agent_hint": HINT}
    chat = server.post(CHAT, body(CHAT, **several))
    assert len(apis.reports(chat, stream=True)) == 1
    assert report(chat, stream=True)["session_id"] == "agent-1"
    texts = server.post(COMPLETIONS, body(COMPLETIONS, **several, prompt=["one", "two"]))
    assert len(apis.reports(texts, stream=True)) == 1
    assert report(texts, stream=True)["session_id"] == "agent-1"


@APIS
def test_an_error_is_answered_as_by_stock(server: TestServer, path: str) -> None:
    wrong = body(path, model="other")
    plain, hinted = server.post(path, wrong), server.post(path, {**wrong, "agent_hint": HINT})
    assert plain.status_code == 404
    assert (hinted.status_code, hinted.json()) == (404, plain.json())


def test_a_response_in_the_background_is_queued_with_its_report(serve: Serve) -> None:
    environment = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    server = serve("qwen3-small", ["--num-gpu-blocks-override", "96"], environment)
    queued = server.post(RESPONSES, body(RESPONSES, background=True, agent_hint=HINT))
    assert queued.json()["status"] == "queued"
    assert report(queued)["session_id"] == "agent-1"
    streamed = server.post(
        RESPONSES, body(RESPONSES, background=True, stream=True, agent_hint=HINT)
    )
    assert report(streamed, stream=True)["session_id"] == "agent-1"


# -- how many engine requests one of ours becomes --------------------------------------------------


@pytest.mark.parametrize(
    ("path", "more", "engine_requests"),
    [
        (CHAT, {}, 1),
        (CHAT, {"n": 3, "temperature": 1}, 3),
        (BATCH, {}, 2),
        (COMPLETIONS, {}, 1),
        (COMPLETIONS, {"prompt": ["one", "two"], "n": 2, "temperature": 1}, 4),
        (COMPLETIONS, {"prompt": [5, 6, 7]}, 1),
        (COMPLETIONS, {"prompt": [[5, 6], [7], [8]]}, 3),
        (RESPONSES, {}, 1),
        (MESSAGES, {}, 1),
    ],
)
def test_the_engine_is_told_how_many_requests_to_wait_for(
    server: TestServer, path: str, more: dict[str, Any], engine_requests: int
) -> None:
    hint = {**HINT, "context_management": EVICT}
    response = server.post(path, body(path, **more, agent_hint=hint))
    told = stamps(server, report(response)["operation_id"])
    # One line of the log for each prompt.
    assert set(told) == {engine_requests}
    assert len(told) * more.get("n", 1) == engine_requests


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_beam_search_refuses_edits_and_ignores_retention(server: TestServer, path: str) -> None:
    beams = body(path, use_beam_search=True, n=2)
    edits = {**HINT, "context_management": EVICT}
    refused = server.post(path, {**beams, "agent_hint": edits})
    assert apis.error(refused)[0] == "use_beam_search"
    taken = server.post(path, {**beams, "agent_hint": HINT})
    assert stamps(server, report(taken)["operation_id"]) == []


# -- vllm_xargs ------------------------------------------------------------------------------------


@APIS_AND_STREAMS
def test_vllm_xargs_carry_a_hint_as_text(server: TestServer, path: str, stream: bool) -> None:
    name = f"text {path} {stream}"
    xargs = {"agent_hint": json.dumps({**HINT, "session_id": name}), "agent_hint_stamp": "not ours"}
    response = server.post(path, long_body(path, stream=stream, vllm_xargs=xargs))
    said_of_it = report(response, stream=stream)
    assert said_of_it["session_id"] == name
    assert stamps(server, said_of_it["operation_id"])
    assert evicted_blocks(server, name) > 0


@APIS
def test_the_bodys_own_hint_goes_before_the_one_in_vllm_xargs(
    server: TestServer, path: str
) -> None:
    xargs = {"agent_hint": json.dumps({"session_id": f"second {path}"})}
    hint = {**HINT, "session_id": f"first {path}"}
    response = server.post(path, long_body(path, vllm_xargs=xargs, agent_hint=hint))
    assert report(response)["session_id"] == f"first {path}"
    assert evicted_blocks(server, f"second {path}") == 0
    assert evicted_blocks(server, f"first {path}") > 0


@APIS_AND_STREAMS
@pytest.mark.parametrize(
    ("hint", "field"),
    [
        ("not JSON", ""),
        ('{"session_id": 5}', ".session_id"),
        ('{"cache_control": {"ttl": NaN}}', ".cache_control.ttl"),
        ('{"context_management": {"manage_request": true}}', ".session_id"),
    ],
)
def test_a_wrong_hint_in_vllm_xargs_is_a_400(
    server: TestServer, path: str, stream: bool, hint: str, field: str
) -> None:
    response = server.post(path, body(path, stream=stream, vllm_xargs={"agent_hint": hint}))
    assert apis.error(response)[0] == f"agent_hint{field}"


@APIS
def test_other_vllm_xargs_stay_as_they_are(server: TestServer, path: str) -> None:
    xargs = {"mine": f"kept {path}"}
    said_of_it = report(server.post(path, body(path, vllm_xargs=xargs, agent_hint=HINT)))
    operation = said_of_it["operation_id"]
    stamped = f"'mine': 'kept {path}', 'agent_hint_stamp': <agent hint, operation {operation} of "
    assert stamped in server.log_text()


# -- routes that are not ours ----------------------------------------------------------------------


def generate(server: TestServer, hint: Any, **headers: str) -> httpx.Response:
    """vLLM's token-in API: no shape of ours, and the hint stands in ``SamplingParams``."""
    params = {"max_tokens": 2, "extra_args": {"agent_hint": hint}}
    request = {"model": "model", "token_ids": tokens(300, seed=7), "sampling_params": params}
    return server.post("/inference/v1/generate", request, headers=headers)


def test_token_in_takes_hints_and_says_where_to_manage(server: TestServer) -> None:
    named = generate(server, {"cache_control": {"ttl": 60}}, **{"X-Session-ID": "token-in"})
    assert named.status_code == 200, named.text
    assert evicted_blocks(server, "token-in") > 0
    managing = {"session_id": "a", "context_management": {"manage_request": True}}
    field, message = apis.error(generate(server, managing))
    assert field == "agent_hint.context_management.manage_request"
    assert "/v1/chat/completions" in message


def test_counting_tokens_takes_no_hint(server: TestServer) -> None:
    count = f"{MESSAGES}/count_tokens"
    plain = server.post(count, body(MESSAGES)).json()
    assert server.post(count, body(MESSAGES, agent_hint={"session_id": 5})).json() == plain


def test_rendering_hands_the_hint_on(server: TestServer) -> None:
    hint = {"cache_control": {"ttl": 60}}
    rendered = server.post(f"{CHAT}/render", body(CHAT, agent_hint=hint, session_id="rendered"))
    assert rendered.status_code == 200, rendered.text
    handed_on = rendered.json()["sampling_params"]["extra_args"]["agent_hint"]
    assert handed_on == {
        "session_id": "rendered",
        "cache_control": {"type": "ephemeral", "ttl": 60},
    }
    assert "stamp" not in rendered.text
    wrong = server.post(f"{CHAT}/render", body(CHAT, agent_hint={"session_id": 5}))
    assert apis.error(wrong)[0] == "agent_hint.session_id"
