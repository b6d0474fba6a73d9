"""``/v1/agent_hint`` on a live server: what each route says, and what it refuses."""

import re
from typing import Any

import pytest

from tests.serve.rig import Serve, TestServer, tokens
from tests.serve.tenant_rig import (
    ALICE_KEY,
    BOB_KEY,
    KEYS,
    ROOT,
    Client,
    answer_of,
    error_of,
    key,
    path_of,
)

BLOCK = 128
UNKNOWN_OPERATION = "0" * 32
ROUTES = [
    ("GET", "/state"),
    ("GET", "/sessions"),
    ("GET", "/sessions/some"),
    ("POST", "/sessions/some"),
    ("DELETE", "/sessions/some"),
    ("POST", "/sessions/some/turn"),
    ("GET", f"/operations/{UNKNOWN_OPERATION}"),
]
BODY = {"edits": [{"type": "evict"}]}


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> TestServer:
    more = ["--enable-log-requests", "--num-gpu-blocks-override", "160"]
    return serve_module("qwen3-small", [*KEYS, *more])


@pytest.fixture(scope="module")
def alice(server: TestServer) -> Client:
    return Client(server, **key(ALICE_KEY))


@pytest.fixture(scope="module")
def bob(server: TestServer) -> Client:
    return Client(server, **key(BOB_KEY))


def body_for(method: str, path: str = "") -> dict[str, Any]:
    if path.endswith("/turn"):
        return {"json": {"ended": "tool_call"}}
    return {"json": BODY} if method == "POST" else {}


# -- who may ask -------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_wants_the_key(server: TestServer, method: str, path: str) -> None:
    for headers in ({}, key("wrong"), {"Authorization": ALICE_KEY}, {"X-API-Key": ALICE_KEY}):
        response = server.client.request(
            method, ROOT + path, headers=headers, **body_for(method, path)
        )
        assert response.status_code == 401, (headers, response.text)
        assert response.json() == {"error": "Unauthorized"}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_answers_who_has_a_key(
    alice: Client, bob: Client, method: str, path: str
) -> None:
    alice.turn("some", tokens(300, seed=1))
    if "operations" in path:
        path = f"/operations/{alice.turn('some', tokens(300, seed=1))['operation_id']}"
    response = alice.call(method, path, **body_for(method, path))
    assert response.status_code == 200, response.text
    if path.endswith("/turn"):
        assert response.json()["used"] is True
        assert bob.call(method, path, **body_for(method, path)).json()["used"] is False
    elif path in ("/state", "/sessions"):
        assert bob.call(method, path).status_code == 200
    else:
        assert bob.call(method, path, **body_for(method)).status_code == 404


def test_openapi_shows_every_route_with_its_models_and_errors(server: TestServer) -> None:
    page = server.get("/openapi.json").json()
    ours = {path: item for path, item in page["paths"].items() if path.startswith(ROOT)}
    assert {(path, method) for path, item in ours.items() for method in item} == {
        (f"{ROOT}/state", "get"),
        (f"{ROOT}/sessions", "get"),
        (f"{ROOT}/sessions/{{session_id}}", "get"),
        (f"{ROOT}/sessions/{{session_id}}", "post"),
        (f"{ROOT}/sessions/{{session_id}}", "delete"),
        (f"{ROOT}/sessions/{{session_id}}/turn", "post"),
        (f"{ROOT}/operations/{{operation_id}}", "get"),
        (f"{ROOT}/capture", "post"),
        (f"{ROOT}/capture", "get"),
        (f"{ROOT}/capture", "delete"),
    }
    for path, item in ours.items():
        for method, operation in item.items():
            assert operation["summary"]
            assert operation["description"], (path, method)
            responses = operation["responses"]
            assert "422" not in responses, "vLLM sends none"
            assert "$ref" in responses["200"]["content"]["application/json"]["schema"]
            is_missed = "{" in path and not path.endswith("/turn")
            for status in ("400", "503", *(["404"] if is_missed else [])):
                schema = responses[status]["content"]["application/json"]["schema"]
                assert schema["$ref"].endswith("/ErrorResponse")
            assert "401" in responses
    schemas = page["components"]["schemas"]
    assert "ContextEdit" in schemas
    assert {"edits", "cache_salt", "wait_seconds"} == set(schemas["EditRequest"]["properties"])


# -- state -------------------------------------------------------------------------------------


def test_the_state_says_what_is_on_and_what_the_bounds_are(alice: Client) -> None:
    alice.turn("counted", tokens(300, seed=2))
    state = alice.ask("/state")

    assert re.fullmatch(r"\d+\.\d+\.\d+", state["version"])
    assert state["vllm_version"].startswith("0.")
    assert state["active"] is True
    [engine] = state["engines"]
    assert (engine["engine"], engine["active"], engine["reason"]) == (0, True, "")
    assert engine["sessions"] == len(alice.session_ids())
    assert state["features"] == {
        "sam": True,
        "ranges": False,
        "pooling": True,
        "shadow": False,
        "auto": False,
        "capture": False,
    }
    assert state["block_size"] == BLOCK
    assert state["bounds"]["max_edits"] == 16
    assert state["bounds"]["max_ttl"] == 3600.0
    assert state["bounds"]["max_id_length"] == 256


def test_the_state_holds_no_secret_and_nothing_of_another_tenant(
    alice: Client, bob: Client
) -> None:
    before = answer_of(bob.call("GET", "/state"))
    alice.turn("of-alice", tokens(300, seed=3))
    assert answer_of(bob.call("GET", "/state")) == before
    assert "secret" not in before[1].decode().lower()
    assert "tenant_header" not in before[1].decode()


# -- sessions ----------------------------------------------------------------------------------


def test_a_session_is_shown_with_its_context_and_lease(alice: Client) -> None:
    alice.turn("shown", tokens(1000, seed=4))
    shown = alice.ask(path_of("shown"))

    [lineage] = shown.pop("lineages")
    assert shown == {
        "session_id": "shown",
        "has_cache_salt": False,
        "parent_session_id": None,
        "children": [],
        "live_requests": 0,
        "residency": [],
    }
    [lease] = lineage.pop("leases")
    blocks = 1000 // BLOCK
    assert lineage == {
        "engine": 0,
        "tokens": blocks * BLOCK,
        "blocks": blocks,
        "resident_blocks": blocks,
    }
    assert (lease["ttl"], lease["end_token"]) == (60.0, None)
    assert 50 < lease["remaining"] <= 60


def test_the_list_is_paged_in_one_order_and_use_does_not_change_it(alice: Client) -> None:
    names = [f"page-{k}" for k in (3, 1, 2, 5, 4)]
    for k, name in enumerate(names):
        alice.turn(name, tokens(150, seed=50 + k))
    seen: list[str] = []
    after: dict[str, str] = {}
    for _ in range(100):
        page = alice.ask("/sessions", limit=2, **after)
        assert len(page["sessions"]) <= 2
        seen += [line["session_id"] for line in page["sessions"]]
        if page["next"] is None:
            break
        alice.turn("page-1", tokens(150, seed=51))
        after = {"after": page["next"]}
    assert seen == sorted(seen)
    assert len(seen) == len(set(seen))
    assert [name for name in seen if name.startswith("page-")] == sorted(names)
    assert seen == alice.session_ids()


def test_a_line_of_the_list_says_how_much_is_recorded(alice: Client) -> None:
    alice.turn("line", tokens(700, seed=6))
    [line] = [
        s for s in alice.ask("/sessions", limit=1000)["sessions"] if s["session_id"] == "line"
    ]
    assert line == {
        "session_id": "line",
        "has_cache_salt": False,
        "parent_session_id": None,
        "live_requests": 0,
        "lineages": 1,
        "blocks": 5,
        "tokens": 640,
    }


def test_the_cache_salt_is_a_part_of_the_name_and_never_shown(alice: Client) -> None:
    alice.turn("salted", tokens(300, seed=7), cache_salt="pepper&co")
    assert alice.call("GET", path_of("salted")).status_code == 404
    shown = alice.call("GET", path_of("salted"), params={"cache_salt": "pepper&co"})
    assert shown.json()["has_cache_salt"] is True
    listed = alice.call("GET", "/sessions", params={"limit": 1000})
    assert "pepper" not in shown.text + listed.text
    assert alice.call("DELETE", path_of("salted")).status_code == 404
    freed = alice.call("DELETE", path_of("salted"), params={"cache_salt": "pepper&co"})
    assert freed.json()["results"][0]["status"] == "applied"


def test_edits_run_now_and_their_results_can_be_asked_for(alice: Client) -> None:
    alice.turn("edited", tokens(600, seed=8))
    response = alice.call(
        "POST", path_of("edited"), json={"edits": [{"type": "evict"}, {"type": "offload"}]}
    )
    assert response.status_code == 200, response.text
    report = response.json()
    assert report["session_id"] == "edited"
    evict, offload = report["results"]
    assert (evict["type"], evict["status"], evict["blocks"]) == ("evict", "applied", 4)
    assert (offload["type"], offload["status"]) == ("offload", "unsupported")
    assert alice.ask(path_of("edited"))["lineages"][0]["blocks"] == 0

    operation = alice.ask(f"/operations/{report['operation_id']}")
    assert operation == {
        "operation_id": report["operation_id"],
        "status": "done",
        "results": report["results"],
        "retention": None,
    }


def test_a_salt_of_a_session_that_is_edited_stands_in_the_body(alice: Client) -> None:
    alice.turn("edited-salted", tokens(300, seed=9), cache_salt="pepper")
    assert alice.call("POST", path_of("edited-salted"), json=BODY).status_code == 404
    response = alice.call("POST", path_of("edited-salted"), json={**BODY, "cache_salt": "pepper"})
    assert response.json()["results"][0]["status"] == "applied"


@pytest.mark.parametrize("include_children", [False, True])
def test_a_freed_session_is_gone(alice: Client, include_children: bool) -> None:
    alice.turn("freed", tokens(300, seed=10))
    query = {"include_children": "true"} if include_children else {}
    response = alice.call("DELETE", path_of("freed"), params=query)
    assert response.status_code == 200, response.text
    [result] = response.json()["results"]
    assert (result["type"], result["status"]) == ("evict", "applied")
    assert (result["blocks"], result["tokens"]) == (2, 2 * BLOCK)
    assert alice.call("GET", path_of("freed")).status_code == 404
    assert "freed" not in alice.session_ids()
    assert alice.call("DELETE", path_of("freed"), params=query).status_code == 404


def test_the_effects_of_an_ordinary_request_can_be_asked_for(alice: Client) -> None:
    plain = alice.turn("ordinary", tokens(300, seed=11))
    editing = alice.turn("ordinary", tokens(300, seed=11), "prefetch", "evict")

    assert alice.ask(f"/operations/{plain['operation_id']}")["results"] == []
    operation = alice.ask(f"/operations/{editing['operation_id']}")
    assert operation["status"] == "done"
    assert [(r["type"], r["status"]) for r in operation["results"]] == [
        ("prefetch", "unsupported"),
        ("evict", "applied"),
    ]


# -- how a turn ended --------------------------------------------------------------------------

CALL = {"ended": "tool_call", "tools": ["read", "bash"]}


def tell(client: Client, name: str, **body: Any) -> bool:
    response = client.call("POST", path_of(name) + "/turn", json={**CALL, **body})
    assert response.status_code == 200, response.text
    assert response.json() == {"session_id": name, "used": response.json()["used"]}
    used: bool = response.json()["used"]
    return used


def test_how_a_turn_ended_is_of_use_while_its_session_rests(alice: Client) -> None:
    turn = alice.turn("told", tokens(300, seed=20))
    for _ in range(2):
        assert tell(alice, "told")
    assert tell(alice, "told", operation_id=turn["operation_id"], ended="final_message", tools=[])
    alice.turn("told", tokens(300, seed=20))
    assert not tell(alice, "told", operation_id=turn["operation_id"]), "of the turn before"
    assert not tell(alice, "told", operation_id=UNKNOWN_OPERATION)


def test_how_a_turn_ended_is_of_no_use_to_whoever_has_no_such_session(
    alice: Client, bob: Client
) -> None:
    """Another tenant's session answers as one that never was."""
    alice.turn("told-by-alice", tokens(300, seed=21), cache_salt="pepper")
    never_was = bob.call("POST", path_of("told-by-alicf") + "/turn", json=CALL)
    of_another = bob.call("POST", path_of("told-by-alice") + "/turn", json=CALL)
    status, content, headers = answer_of(of_another)
    assert answer_of(never_was) == (status, content.replace(b"alice", b"alicf"), headers)
    assert not tell(alice, "told-by-alice"), "the salt is a part of its name"
    assert tell(alice, "told-by-alice", cache_salt="pepper")


def test_slashes_of_an_id_may_stand_before_the_turn(alice: Client) -> None:
    alice.turn("team/agent/8", tokens(150, seed=22))
    response = alice.call("POST", "/sessions/team/agent/8/turn", json=CALL)
    assert response.json() == {"session_id": "team/agent/8", "used": True}


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"", "body"),
        (b"[]", "body"),
        (b"{}", "ended"),
        (b'{"ended": null}', "ended"),
        (b'{"ended": "s3cret"}', "ended"),
        (b'{"ended": "cut", "tools": "bash"}', "tools"),
        (b'{"ended": "cut", "tools": [1]}', "tools.0"),
        (b'{"ended": "cut", "tools": ["a", ""]}', "tools.1"),
        (b'{"ended": "cut", "tools": ["' + b"x" * 65 + b'"]}', "tools.0"),
        (b'{"ended": "cut", "tools": ["\\ud800"]}', "tools.0"),
        (b'{"ended": "cut", "tools": [' + b",".join([b'"a"'] * 17) + b"]}", "tools"),
        (b'{"ended": "cut", "operation_id": "s3cret"}', "operation_id"),
        (b'{"ended": "cut", "operation_id": ""}', "operation_id"),
        (b'{"ended": "cut", "cache_salt": ""}', "cache_salt"),
        (b'{"ended": "cut", "tenant": "bob"}', "tenant"),
        (b'{"ended": "cut", "session_id": "other"}', "session_id"),
        (b'{"ended": "cut", "edits": []}', "edits"),
    ],
)
def test_a_turn_that_is_told_wrongly_is_a_400_that_names_the_field(
    alice: Client, content: bytes, param: str
) -> None:
    response = alice.call(
        "POST",
        "/sessions/some/turn",
        content=content,
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"], error["type"]) == (param, "BadRequestError")
    assert "s3cret" not in error["message"]


@pytest.mark.parametrize("encoded", ["", "x" * 257, "some%0A", "a%00b"])
def test_a_turn_of_what_is_no_id_is_a_400_that_names_it(alice: Client, encoded: str) -> None:
    response = alice.call("POST", f"/sessions/{encoded}/turn", json=CALL)
    assert (response.status_code, error_of(response)["param"]) == (400, "session_id")


# -- what is refused ---------------------------------------------------------------------------

ODD_IDS = [
    "with/slash",
    "/leading",
    "trailing/",
    "a//b",
    "..",
    "../state",
    "a/../b",
    ".",
    "?query=1",
    "#fragment",
    "100%",
    "%2F",
    "a b",
    " ",
    "a+b",
    "a;b=c",
    "ünïcödé",
    "u\u0308",
    "日本語",
    "🤖" * 256,
    "\N{REPLACEMENT CHARACTER}",
    "\\",
    '"quoted"',
    "{session_id}",
    "sessions",
    "x" * 256,
]


@pytest.mark.parametrize("session_id", ODD_IDS, ids=ascii)
def test_an_odd_id_is_an_id(alice: Client, session_id: str) -> None:
    alice.turn(session_id, tokens(150, seed=12))
    assert alice.ask(path_of(session_id))["session_id"] == session_id
    report = alice.call("POST", path_of(session_id), json=BODY).json()
    assert report["session_id"] == session_id
    assert session_id in alice.session_ids()
    assert alice.call("DELETE", path_of(session_id)).status_code == 200
    assert session_id not in alice.session_ids()


def test_slashes_of_an_id_may_stand_as_they_are(alice: Client) -> None:
    alice.turn("team/agent/7", tokens(150, seed=13))
    assert alice.ask("/sessions/team/agent/7")["session_id"] == "team/agent/7"


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    "encoded",
    ["", "x" * 257, "some%0A", "%0Asome", "a%00b", "a%1Bb", "a%7Fb", "a%E2%80%A8b", "a%C2%85b"],
)
def test_what_is_no_id_is_a_400_that_names_it(alice: Client, method: str, encoded: str) -> None:
    alice.turn("some", tokens(300, seed=1))
    response = alice.call(method, f"/sessions/{encoded}", **body_for(method))
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == "session_id"
    assert error["type"] == "BadRequestError"
    assert "xxx" not in error["message"]
    assert "some" in alice.session_ids(), "nothing was done to the id without its line break"


@pytest.mark.parametrize("encoded", ["%FF", "a%C3", "%ED%A0%80"])
def test_bytes_that_are_no_utf8_name_no_session(alice: Client, encoded: str) -> None:
    alice.turn("\N{REPLACEMENT CHARACTER}", tokens(150, seed=14))
    response = alice.call("DELETE", f"/sessions/{encoded}")
    assert (response.status_code, error_of(response)["param"]) == (400, "session_id")
    salted = alice.call("DELETE", f"/sessions/some?cache_salt={encoded}")
    assert (salted.status_code, error_of(salted)["param"]) == (400, "query")


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sessions?limit=0", "limit"),
        ("/sessions?limit=1001", "limit"),
        ("/sessions?limit=many", "limit"),
        ("/sessions?after=", "after"),
        ("/sessions?after=!!!", "after"),
        ("/sessions?after=abcde", "after"),
        ("/sessions?after=_w", "after"),
        ("/sessions?tenant=bob", "tenant"),
        ("/sessions/some?cache_salt=", "cache_salt"),
        ("/sessions/some?cachesalt=x", "cachesalt"),
        ("/operations/", "operation_id"),
        ("/operations/0", "operation_id"),
        (f"/operations/{UNKNOWN_OPERATION}%0A", "operation_id"),
        (f"/operations/{UNKNOWN_OPERATION.replace('0', 'A')}", "operation_id"),
        (f"/operations/{UNKNOWN_OPERATION}/x", "operation_id"),
        ("/state?tenant=bob", "tenant"),
    ],
)
def test_a_bad_parameter_is_a_400_that_names_it(alice: Client, path: str, param: str) -> None:
    response = alice.call("GET", path)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param


@pytest.mark.parametrize("query", ["include_children=perhaps", "include_childern=true"])
def test_a_misspelt_wish_frees_nothing(alice: Client, query: str) -> None:
    alice.turn("some", tokens(300, seed=1))
    response = alice.call("DELETE", f"/sessions/some?{query}")
    assert (response.status_code, error_of(response)["param"]) == (400, query.split("=")[0])
    assert "some" in alice.session_ids()


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"", "body"),
        (b"null", "body"),
        (b"[]", "body"),
        (b'"text"', "body"),
        (b"{", "body"),
        (b'{"edits": [], "edits": NaN}', "edits"),
        (b"\xff\xfe", "body"),
        (b"[" * 100_000, "body"),
        (b"{}", "edits"),
        (b'{"edits": null}', "edits"),
        (b'{"edits": [{}]}', "edits.0.type"),
        (b'{"edits": [{"type": "s3cret"}]}', "edits.0.type"),
        (b'{"edits": [{"type": "evict"}, {"type": "evict", "x": 1}]}', "edits.1.x"),
        (b'{"edits": [{"type": "evict", "include_children": 1}]}', "edits.0.include_children"),
        (b'{"edits": [{"type": "offload", "include_children": true}]}', "edits.0.include_children"),
        (b'{"edits": [{"type": "evict", "block_start": 0}]}', "edits.0.block_end"),
        (
            b'{"edits": [{"type": "evict", "block_start": 0, "block_end": 1}]}',
            "edits.0.block_start",
        ),
        (b'{"edits": [' + b",".join([b'{"type": "evict"}'] * 17) + b"]}", "edits"),
        (b'{"edits": [], "cache_salt": ""}', "cache_salt"),
        (b'{"edits": [], "cache_salt": 5}', "cache_salt"),
        (b'{"edits": [], "cache_salt": "\\ud800"}', "cache_salt"),
        (b'{"edits": [], "tenant": "bob"}', "tenant"),
        (b'{"edits": [], "session_id": "other"}', "session_id"),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_field(
    alice: Client, content: bytes, param: str
) -> None:
    response = alice.call(
        "POST", "/sessions/some", content=content, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == param
    assert error["type"] == "BadRequestError"
    assert "s3cret" not in error["message"]


def test_no_edits_are_no_results(alice: Client) -> None:
    alice.turn("some", tokens(300, seed=1))
    response = alice.call("POST", "/sessions/some", json={"edits": []})
    assert response.json()["results"] == []


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_what_does_not_exist_is_a_404_with_the_cure(alice: Client, method: str) -> None:
    response = alice.call(method, "/sessions/never-was", **body_for(method))
    error = error_of(response)
    assert (response.status_code, error["type"]) == (404, "NotFoundError")
    assert error["param"] == "session_id"
    assert f"{ROOT}/sessions" in error["message"]
    assert "never-was" not in response.text

    unknown = alice.call("GET", f"/operations/{UNKNOWN_OPERATION}")
    error = error_of(unknown)
    assert (unknown.status_code, error["param"]) == (404, "operation_id")
    assert "ten minutes" in error["message"]
    assert "VLLM_AGENT_HINT_MAX_OPERATIONS" in error["message"]


# -- where hints have no effect ----------------------------------------------------------------


def test_a_server_on_which_hints_have_no_effect_says_so_everywhere(serve: Serve) -> None:
    client = Client(
        serve("qwen3-small", ["--no-enable-prefix-caching", "--num-gpu-blocks-override", "96"])
    )
    hinted = client.turn("some", tokens(300))

    state = client.ask("/state")
    assert state["active"] is False
    assert "caching" in state["engines"][0]["reason"]
    assert state["block_size"] is None
    assert client.ask("/sessions") == {"sessions": [], "next": None}
    assert client.call("GET", "/sessions/some").status_code == 404
    assert client.call("GET", f"/operations/{hinted['operation_id']}").status_code == 404
    for method in ("POST", "DELETE"):
        report = client.call(method, "/sessions/some", **body_for(method)).json()
        [result] = report["results"]
        assert result["status"] == "unsupported"
        assert "caching" in result["reason"]
        operation = client.ask(f"/operations/{report['operation_id']}")
        assert operation["results"] == [result]
    assert not tell(client, "some")


# -- what is written down ----------------------------------------------------------------------


def test_no_session_id_and_no_salt_is_logged_or_made_a_label(
    server: TestServer, alice: Client
) -> None:
    name, salt = "private-name-4711", "private-salt-4712"
    alice.turn(name, tokens(150, seed=15), cache_salt=salt)
    for method in ("GET", "POST", "DELETE"):
        more = {"json": {**BODY, "cache_salt": salt}} if method == "POST" else {}
        query = {} if method == "POST" else {"cache_salt": salt}
        assert alice.call(method, path_of(name), params=query, **more).status_code == 200
    alice.call("GET", f"/sessions/{name}/%0A")
    cursor = "cHJpdmF0ZS1uYW1lLTQ3MTE"
    assert alice.call("GET", "/sessions", params={"after": cursor}).status_code == 200

    log, metrics = server.log_text(), server.get("/metrics").text
    for private in (name, salt, cursor):
        assert private not in log
        assert private not in metrics
    assert re.search(r'"GET /v1/agent_hint/sessions/[0-9a-f]{12} HTTP/1.1" 200', log)
    assert "Received request" in log
    assert "<agent hint, operation " in log
    assert "Traceback" not in log
