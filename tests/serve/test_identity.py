"""Whose session a hint means: its own, else vLLM's ``session_id`` in vLLM's own order."""

import json
from typing import Any

import pytest

from tests.serve import apis
from tests.serve.apis import APIS, APIS_AND_STREAMS, COMPLETIONS, MESSAGES, body, report
from tests.serve.rig import Serve, TestServer, tokens

MANAGE = {"context_management": {"manage_request": True, "edits": [{"type": "evict"}]}}
HEADER = "X-Session-ID"


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> TestServer:
    return serve_module("qwen3-small", ["--num-gpu-blocks-override", "96"])


@APIS
@pytest.mark.parametrize(
    ("in_hint", "in_body", "in_header", "in_xargs", "meant"),
    [
        ("hint", "body", "header", "xargs", "hint"),
        (None, "body", "header", "xargs", "body"),
        (None, None, "header", "xargs", "header"),
        (None, None, None, "xargs", "xargs"),
        (None, "", "header", "xargs", "header"),
        (None, "", "", "xargs", "xargs"),
    ],
)
def test_the_first_that_names_a_session_is_meant(
    server: TestServer,
    path: str,
    in_hint: str | None,
    in_body: str | None,
    in_header: str | None,
    in_xargs: str,
    meant: str,
) -> None:
    more: dict[str, Any] = {"vllm_xargs": {"session_id": in_xargs}}
    if in_body is not None:
        more["session_id"] = in_body
    headers = {} if in_header is None else {HEADER: in_header}
    hint = {"session_id": in_hint, **MANAGE}
    response = server.post(path, body(path, **more, agent_hint=hint), headers)
    assert report(response)["session_id"] == meant


@APIS_AND_STREAMS
def test_a_request_is_recorded_under_the_session_that_is_meant(
    server: TestServer, path: str, stream: bool
) -> None:
    name = f"meant {path} {stream}"
    hinted = apis.long_body(path, stream=stream, agent_hint={"cache_control": {"ttl": 60}})
    response = server.post(path, hinted, {HEADER: name})
    assert report(response, stream=stream)["session_id"] == name
    evicted = server.post(path, body(path, agent_hint={"session_id": name, **MANAGE}))
    assert report(evicted)["results"][0]["status"] == "applied"


@APIS
def test_a_hint_in_vllm_xargs_has_a_session_beside_it(server: TestServer, path: str) -> None:
    xargs = {"agent_hint": json.dumps(MANAGE), "session_id": "beside"}
    assert report(server.post(path, body(path, vllm_xargs=xargs)))["session_id"] == "beside"


@APIS
def test_a_session_named_outside_may_have_a_parent(server: TestServer, path: str) -> None:
    hint = {"parent_session_id": "leader"}
    response = server.post(path, body(path, session_id="worker", agent_hint=hint))
    assert report(response)["session_id"] == "worker"
    own_parent = server.post(path, body(path, session_id="leader", agent_hint=hint))
    assert "parent_session_id" in apis.error(own_parent)[1]


@APIS
@pytest.mark.parametrize("wrong", ["SECRET\x07", "SECRET" + "a" * 251])
def test_a_wrong_one_is_a_400_that_names_its_place(
    server: TestServer, path: str, wrong: str
) -> None:
    hint = {"cache_control": {}}
    places: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("session_id", {"session_id": wrong}, {}),
        ("vllm_xargs.session_id", {"vllm_xargs": {"session_id": wrong}}, {}),
    ]
    if wrong.isprintable():
        places.append((HEADER, {}, {HEADER: wrong}))
    for place, more, headers in places:
        response = server.post(path, body(path, **more, agent_hint=hint), headers)
        assert apis.error(response)[0] == place
        assert "SECRET" not in response.text


@APIS
def test_one_of_another_type_is_a_400(server: TestServer, path: str) -> None:
    number = server.post(path, body(path, session_id=5, agent_hint={}))
    assert number.status_code == 400
    in_xargs = server.post(path, body(path, vllm_xargs={"session_id": 5}, agent_hint={}))
    assert apis.error(in_xargs)[0] == "vllm_xargs.session_id"


@APIS
def test_a_hint_of_its_own_session_does_not_look_further(server: TestServer, path: str) -> None:
    hint = {"session_id": "own"}
    response = server.post(path, body(path, agent_hint=hint), {HEADER: "a" * 300})
    assert report(response)["session_id"] == "own"


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
def test_a_bare_session_id_is_no_hint(server: TestServer, path: str) -> None:
    bare = apis.long_body(path, session_id="bare", vllm_xargs={"session_id": "bare"})
    response = server.post(path, bare, {HEADER: "bare"})
    assert apis.reports(response, stream=False) == []
    before = server.metrics()["vllm:agent_hint_sessions"]
    evicted = server.post(path, body(path, agent_hint={"session_id": "bare", **MANAGE}))
    assert report(evicted)["results"][0]["status"] == "missing"
    server.complete(tokens(10))
    assert server.metrics()["vllm:agent_hint_sessions"] == before
