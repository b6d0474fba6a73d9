"""Whose session it is: never what a client can write, and no answer betrays another tenant's."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.serve.rig import Serve, TestServer, tokens
from tests.serve.tenant_rig import (
    ALICE_KEY,
    BOB_KEY,
    HINT_60S,
    KEYS,
    Client,
    answer_of,
    key,
    path_of,
)
from vllm_agent_hint.cli.demo.server import MODEL_NAME
from vllm_agent_hint.settings import load_settings
from vllm_agent_hint.stamp import DEFAULT_TENANT, STAMP_KEY, Stamp, digest_of

SECRET = "of-this-server-only"
BODY = {"edits": [{"type": "evict"}]}
VICTIM = "victim"


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> TestServer:
    return serve_module(
        "qwen3-small",
        [*KEYS, "--enable-scale-out", "--num-gpu-blocks-override", "160"],
        {"VLLM_AGENT_HINT_SECRET": SECRET},
    )


@pytest.fixture(scope="module")
def alice(server: TestServer) -> Client:
    client = Client(server, **key(ALICE_KEY))
    client.turn(VICTIM, tokens(600, seed=1))
    return client


@pytest.fixture(scope="module")
def bob(server: TestServer) -> Client:
    return Client(server, **key(BOB_KEY))


@pytest.fixture(scope="module")
def stranger(server: TestServer) -> Client:
    return Client(server)


@contextmanager
def signing_with(secret: str) -> Iterator[None]:
    """What this process signs and digests, it signs as a server with that secret would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_AGENT_HINT_SECRET", secret)
        load_settings.cache_clear()
        yield
    load_settings.cache_clear()


def alices_tenant() -> str:
    with signing_with(SECRET):
        return digest_of("tenant", "key", ALICE_KEY)


def forged_stamps() -> list[Any]:
    """Stamps for the session of Alice, by somebody who knows her digest and not the secret."""
    forged = Stamp(
        hint={"session_id": VICTIM, "context_management": {"edits": [{"type": "evict"}]}},
        tenant=alices_tenant(),
        operation_id="0" * 32,
    )
    with signing_with(""):
        unsigned = forged.sealed()
    with signing_with("a guess"):
        guessed = forged.sealed()
    with signing_with(SECRET):
        other_tenant = Stamp(forged.hint, "", forged.operation_id).sealed()
    return [
        unsigned,
        guessed,
        {**other_tenant, "tenant": forged.tenant},
        {**guessed, "mac": ""},
        {**guessed, "mac": None},
        {k: v for k, v in guessed.items() if k != "mac"},
        forged.hint,
        json.dumps(guessed),
    ]


def look(client: Client, session_id: str = VICTIM) -> dict[str, Any]:
    """A session, without the time that passes."""
    seen = client.ask(path_of(session_id))
    for lineage in seen["lineages"]:
        for lease in lineage["leases"]:
            del lease["remaining"]
    return seen


def evicting(session_id: str = VICTIM) -> dict[str, Any]:
    return {"session_id": session_id, "context_management": {"edits": [{"type": "evict"}]}}


def managing(session_id: str) -> dict[str, Any]:
    edits = [{"type": "evict"}]
    return {
        "session_id": session_id,
        "context_management": {"manage_request": True, "edits": edits},
    }


# -- no answer betrays them --------------------------------------------------------------------


@pytest.mark.parametrize("query", ["", "?cache_salt=x"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_session_of_another_tenant_does_not_exist(
    alice: Client, bob: Client, method: str, query: str
) -> None:
    before = look(alice)
    if method == "POST":
        query, body = "", {"json": {**BODY, "cache_salt": "x"} if query else BODY}
    else:
        body = {}
    of_alice = bob.call(method, path_of(VICTIM) + query, **body)
    of_nobody = bob.call(method, path_of("nobody") + query, **body)
    assert of_alice.status_code == 404
    assert answer_of(of_alice) == answer_of(of_nobody)
    assert look(alice) == before


def test_a_tree_of_another_tenant_does_not_exist(alice: Client, bob: Client) -> None:
    before = look(alice)
    query = {"include_children": "true"}
    of_alice = bob.call("DELETE", path_of(VICTIM), params=query)
    of_nobody = bob.call("DELETE", path_of("nobody"), params=query)
    assert of_alice.status_code == 404
    assert answer_of(of_alice) == answer_of(of_nobody)
    assert look(alice) == before


def test_an_operation_of_another_tenant_does_not_exist(alice: Client, bob: Client) -> None:
    of_request = alice.turn("busy", tokens(300, seed=2), "evict")["operation_id"]
    of_edit = alice.call("POST", path_of("busy"), json=BODY).json()["operation_id"]
    of_nobody = answer_of(bob.call("GET", f"/operations/{'0' * 32}"))
    for operation_id in (of_request, of_edit):
        assert alice.call("GET", f"/operations/{operation_id}").status_code == 200
        assert answer_of(bob.call("GET", f"/operations/{operation_id}")) == of_nobody
    assert of_nobody[0] == 404


def test_neither_the_list_nor_the_state_changes_with_what_others_do(
    alice: Client, bob: Client
) -> None:
    before = [answer_of(bob.call("GET", path)) for path in ("/sessions", "/state")]
    alice.turn("one-more", tokens(300, seed=3))
    assert [answer_of(bob.call("GET", path)) for path in ("/sessions", "/state")] == before
    assert VICTIM not in bob.session_ids()


def test_a_cursor_of_another_tenant_shows_nothing_of_its_sessions(
    alice: Client, bob: Client
) -> None:
    alice.turn("a-first", tokens(300, seed=4))
    cursor = alice.ask("/sessions", limit=1)["next"]
    assert cursor is not None
    assert bob.ask("/sessions", after=cursor)["sessions"] == []


def test_a_management_request_finds_no_session_of_another_tenant(
    alice: Client, bob: Client
) -> None:
    before = look(alice)

    def manage(session_id: str) -> list[dict[str, Any]]:
        body = {"model": MODEL_NAME, "prompt": "x", "agent_hint": managing(session_id)}
        response = bob.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        results: list[dict[str, Any]] = response.json()["agent_hint"]["results"]
        return results

    assert manage(VICTIM) == manage("nobody")
    assert manage(VICTIM)[0]["status"] == "missing"
    assert look(alice) == before


def test_the_same_id_is_another_session_for_another_tenant(alice: Client, bob: Client) -> None:
    alice.turn("shared-name", tokens(600, seed=5))
    bob.turn("shared-name", tokens(300, seed=6))
    assert look(alice, "shared-name")["lineages"][0]["blocks"] == 4
    assert look(bob, "shared-name")["lineages"][0]["blocks"] == 2
    assert bob.call("DELETE", path_of("shared-name")).status_code == 200
    assert look(alice, "shared-name")["lineages"][0]["blocks"] == 4


# -- no tenant is forged -----------------------------------------------------------------------

CLAIMS: list[dict[str, Any]] = [
    {"headers": {"X-Tenant": "alice"}},
    {"headers": {"X-Agent-Hint-Tenant": ALICE_KEY}},
    {"headers": {"X-API-Key": ALICE_KEY}},
    {"headers": {"Proxy-Authorization": f"Bearer {ALICE_KEY}"}},
    {"headers": {"Cookie": f"Authorization=Bearer {ALICE_KEY}"}},
    {"params": {"tenant": "alice", "user": "alice"}},
    {"json": {"tenant": ALICE_KEY}},
    {"json": {"agent_hint_tenant": ALICE_KEY}},
    {"json": {"user": ALICE_KEY}},
    {"json": {"metadata": {"tenant": ALICE_KEY}}},
    {"json": {"extra_args": {"agent_hint_tenant": ALICE_KEY}}},
    {"json": {"vllm_xargs": {"agent_hint_tenant": ALICE_KEY, "tenant": ALICE_KEY}}},
    {"json": {"vllm_xargs": {"agent_hint": json.dumps(evicting()), "tenant": ALICE_KEY}}},
]


@pytest.mark.parametrize("claim", CLAIMS, ids=[str(k) for k in range(len(CLAIMS))])
def test_who_claims_to_be_another_tenant_is_who_its_key_says(
    alice: Client, bob: Client, claim: dict[str, Any]
) -> None:
    before = look(alice)
    bob.call("DELETE", path_of(VICTIM))
    body = {
        "model": MODEL_NAME,
        "prompt": tokens(600, seed=1),
        "max_tokens": 1,
        "agent_hint": evicting(),
    }
    response = bob.http.post(
        "/v1/completions", **{**claim, "json": {**body, **claim.get("json", {})}}
    )
    assert response.status_code == 200, response.text
    assert look(alice) == before
    assert VICTIM in bob.session_ids()


@pytest.mark.parametrize("field", ["tenant", "agent_hint_stamp", "agent_hint_tenant"])
def test_a_hint_has_no_field_for_a_tenant(bob: Client, field: str) -> None:
    hint = {**evicting(), field: alices_tenant()}
    body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 1, "agent_hint": hint}
    response = bob.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"agent_hint.{field}"


@pytest.mark.parametrize("which", range(8))
def test_a_forged_stamp_is_dropped_whatever_route_it_takes(
    alice: Client, bob: Client, which: int
) -> None:
    forged = forged_stamps()[which]
    before = look(alice)
    prompt = tokens(600, seed=1)
    as_text = forged if isinstance(forged, str) else json.dumps(forged)
    routes: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": prompt, "max_tokens": 1, STAMP_KEY: forged}),
        ("/v1/completions", {"prompt": prompt, "vllm_xargs": {STAMP_KEY: as_text}}),
        ("/v1/completions", {"prompt": prompt, "vllm_xargs": {STAMP_KEY: [as_text]}}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "vllm_xargs": {STAMP_KEY: as_text}},
        ),
        ("/inference/v1/generate", generating(prompt, {STAMP_KEY: forged})),
        (
            "/inference/v1/generate",
            generating(prompt, {STAMP_KEY: forged, "agent_hint": evicting()}),
        ),
    ]
    for path, body in routes:
        response = bob.http.post(path, json={"model": MODEL_NAME, "max_tokens": 1, **body})
        assert response.status_code == 200, (path, response.text)
    assert look(alice) == before
    assert alice.call("GET", f"/operations/{'0' * 32}").status_code == 404


def generating(prompt: list[int], extra_args: dict[str, Any]) -> dict[str, Any]:
    return {
        "token_ids": prompt,
        "sampling_params": {"max_tokens": 1, "extra_args": extra_args},
    }


def test_a_hint_that_comes_by_tokens_alone_is_of_nobody_with_a_key(
    alice: Client, bob: Client
) -> None:
    body = generating(tokens(300, seed=7), {"agent_hint": {"session_id": "by-tokens", **HINT_60S}})
    response = bob.http.post("/inference/v1/generate", json={"model": MODEL_NAME, **body})
    assert response.status_code == 200, response.text
    assert "by-tokens" not in [*bob.session_ids(), *alice.session_ids()]


def test_a_rendered_prompt_gives_nobody_a_tenant(alice: Client, bob: Client) -> None:
    """The renderer hands out what would go to the engine, the stamp included."""
    body = {
        "model": MODEL_NAME,
        "prompt": tokens(300, seed=8),
        "max_tokens": 1,
        "agent_hint": {"session_id": "rendered", **HINT_60S},
    }
    response = alice.http.post("/v1/completions/render", json=body)
    assert response.status_code == 200, response.text
    assert alices_tenant() not in response.text
    [rendered] = response.json()
    generated = bob.http.post("/inference/v1/generate", json={"model": MODEL_NAME, **rendered})
    assert generated.status_code == 200, generated.text
    assert "rendered" not in [*bob.session_ids(), *alice.session_ids()]


def test_a_path_without_a_guard_makes_nobody_a_tenant(
    alice: Client, bob: Client, stranger: Client
) -> None:
    """SageMaker's ``/invocations`` asks for no key."""
    before = look(alice)
    body = {
        "model": MODEL_NAME,
        "prompt": tokens(600, seed=1),
        "max_tokens": 1,
        "agent_hint": evicting(),
    }
    for headers in ({}, key("wrong"), key(alices_tenant()), {"Authorization": "Bearer"}):
        response = stranger.http.post("/invocations", json=body, headers=headers)
        assert response.status_code == 200, response.text
        operation_id = response.json()["agent_hint"]["operation_id"]
        for client in (alice, bob):
            assert client.call("GET", f"/operations/{operation_id}").status_code == 404
    assert look(alice) == before

    # All of them are one tenant, that of nobody: what one leaves another can take away.
    body["agent_hint"] = {"session_id": "left", **HINT_60S}
    stranger.http.post("/invocations", json=body, headers=key("wrong"))
    body["agent_hint"] = managing("left")
    evicted = stranger.http.post("/invocations", json=body, headers=key("another"))
    assert evicted.json()["agent_hint"]["results"][0]["status"] == "applied"

    body["agent_hint"] = evicting()
    with_key = stranger.http.post("/invocations", json=body, headers=key(BOB_KEY))
    operation_id = with_key.json()["agent_hint"]["operation_id"]
    assert bob.call("GET", f"/operations/{operation_id}").status_code == 200
    assert look(alice) == before


def test_the_scheme_may_be_written_in_any_case(server: TestServer, alice: Client) -> None:
    again = Client(server, Authorization=f"bEARER {ALICE_KEY}")
    assert look(again) == look(alice)


def test_no_key_and_no_tenant_is_logged(
    server: TestServer, alice: Client, bob: Client, stranger: Client
) -> None:
    log = server.log_text()
    for private in (ALICE_KEY, BOB_KEY, alices_tenant(), SECRET, VICTIM):
        assert private not in log


# -- several processes, a trusted gateway ------------------------------------------------------


class Cluster:
    """Two engines behind two API servers, of which one at a time can be made to answer."""

    def __init__(self, server: TestServer) -> None:
        self.server = server
        # The server is healthy as soon as one of them is.
        deadline = time.monotonic() + 60
        while server.log_text().count("Application startup complete") < 2:
            assert time.monotonic() < deadline, server.log_text()[-4000:]
            time.sleep(0.1)
        found = dict(re.findall(r"\(ApiServer_([01]) pid=(\d+)\)", server.log_text()))
        self._pids = {int(index): int(pid) for index, pid in found.items()}
        assert set(self._pids) == {0, 1}

    @contextmanager
    def only(self, index: int) -> Iterator[None]:
        """The other one is stopped: whoever connects now is answered by this one."""
        other = self._pids[1 - index]
        os.kill(other, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(other, signal.SIGCONT)

    def client(self, **headers: str) -> Client:
        """A client that opens a connection for each request."""
        client = Client(self.server, **headers)
        client.http = httpx.Client(
            base_url=client.http.base_url,
            headers=client.http.headers,
            timeout=60.0,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        return client


@pytest.fixture(scope="module")
def cluster(serve_module: Serve) -> Cluster:
    server = serve_module(
        "qwen3-small",
        [
            *("--data-parallel-size", "2", "--api-server-count", "2"),
            *("--enable-scale-out", "--num-gpu-blocks-override", "96"),
        ],
        {"VLLM_AGENT_HINT_TENANT_HEADER": "X-Tenant"},
    )
    return Cluster(server)


def test_two_api_servers_see_the_same_sessions_and_operations(cluster: Cluster) -> None:
    red, blue = cluster.client(X_Tenant="red"), cluster.client(X_Tenant="blue")
    with cluster.only(0):
        report = red.turn("across", tokens(300, seed=20), "offload")
    with cluster.only(1):
        assert look(red, "across")["lineages"][0]["blocks"] == 2
        operation = red.ask(f"/operations/{report['operation_id']}")
        assert [r["status"] for r in operation["results"]] == ["unsupported"]
        assert blue.call("GET", path_of("across")).status_code == 404
        freed = red.call("DELETE", path_of("across")).json()
    with cluster.only(0):
        assert red.call("GET", path_of("across")).status_code == 404
        operation = red.ask(f"/operations/{freed['operation_id']}")
        assert operation["results"] == freed["results"]
        assert blue.call("GET", f"/operations/{freed['operation_id']}").status_code == 404


def test_a_session_on_two_engines_is_shown_and_listed_as_one(cluster: Cluster) -> None:
    red = cluster.client(X_Tenant="red")
    for rank in (0, 1):
        body = {
            "model": MODEL_NAME,
            "prompt": tokens(300 + 300 * rank, seed=21),
            "max_tokens": 1,
            "agent_hint": {"session_id": "spread", **HINT_60S},
        }
        headers = {"X-data-parallel-rank": str(rank)}
        assert red.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    red.turn("alone", tokens(300, seed=22))

    lineages = red.ask(path_of("spread"))["lineages"]
    assert [(lineage["engine"], lineage["blocks"]) for lineage in lineages] == [(0, 2), (1, 4)]
    alone, spread = red.ask("/sessions")["sessions"]
    assert (alone["session_id"], alone["lineages"]) == ("alone", 1)
    assert (spread["session_id"], spread["lineages"], spread["blocks"]) == ("spread", 2, 6)
    first = red.ask("/sessions", limit=1)
    second = red.ask("/sessions", limit=1, after=first["next"])
    assert [p["sessions"][0]["session_id"] for p in (first, second)] == ["alone", "spread"]
    assert second["next"] is None
    assert [engine["active"] for engine in red.ask("/state")["engines"]] == [True, True]

    evicted = red.call("POST", path_of("spread"), json=BODY).json()
    assert [(r["status"], r["blocks"]) for r in evicted["results"]] == [("applied", 6)]
    operation = red.ask(f"/operations/{evicted['operation_id']}")
    assert operation["results"] == evicted["results"]
    for name in ("spread", "alone"):
        assert red.call("DELETE", path_of(name)).status_code == 200


def test_who_is_not_named_by_the_gateway_shares_with_nobody_who_is(cluster: Cluster) -> None:
    red = cluster.client(X_Tenant="red")
    red.turn("named", tokens(300, seed=23))
    unnamed = cluster.client()
    for other in (
        unnamed,
        cluster.client(X_Tenant=""),
        cluster.client(X_Tenant="RED"),
        cluster.client(X_Tenant="red,"),
        cluster.client(Authorization="Bearer red"),
    ):
        assert other.call("GET", path_of("named")).status_code == 404
    unnamed.turn("unnamed", tokens(300, seed=24))
    assert red.session_ids() == ["named"]
    # Nobody checks keys here, so a key is no name: this client is as unnamed as the other.
    with_key = cluster.client(Authorization="Bearer whatever")
    assert with_key.session_ids() == unnamed.session_ids() == ["unnamed"]


def test_a_header_that_a_client_sends_past_a_careless_gateway_names_neither(
    cluster: Cluster,
) -> None:
    red = cluster.client(X_Tenant="red")
    red.turn("twice", tokens(300, seed=25))
    for headers in (
        [("X-Tenant", "red"), ("X-Tenant", "blue")],
        [("X-Tenant", "blue"), ("X-Tenant", "red")],
        [("X-Tenant", "red"), ("X-Tenant", "red")],
    ):
        response = red.http.build_request("GET", f"/v1/agent_hint{path_of('twice')}")
        response.headers = httpx.Headers(
            [(k, v) for k, v in response.headers.multi_items() if k.lower() != "x-tenant"] + headers
        )
        assert red.http.send(response).status_code == 404


def test_without_a_setting_the_launcher_makes_a_secret_that_nobody_can_guess(
    cluster: Cluster,
) -> None:
    unnamed = cluster.client()
    unnamed.turn("unnamed", tokens(300, seed=24))
    before = look(unnamed, "unnamed")
    with signing_with(""):
        forged = Stamp(evicting("unnamed"), DEFAULT_TENANT, "0" * 32).sealed()
    for rank in ("0", "1"):
        response = unnamed.http.post(
            "/inference/v1/generate",
            json={"model": MODEL_NAME, **generating(tokens(300, seed=26), {STAMP_KEY: forged})},
            headers={"X-data-parallel-rank": rank},
        )
        assert response.status_code == 200, response.text
    assert look(unnamed, "unnamed") == before
