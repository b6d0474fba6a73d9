"""Any bytes sent as a hint get a 400, or are applied: no 500, no dead engine, nothing left behind.

Runs on one server for some minutes: ``BODIES`` strange bodies for each API, several at a time.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import httpx
import pytest

from tests.serve import apis
from tests.serve.apis import ALL, COMPLETIONS, body
from tests.serve.rig import Serve, TestServer, tokens
from tests.serve.strange_bodies import SALTS, SESSIONS, StrangeBody, strange_bodies
from vllm_agent_hint.frontend.identity import outside_identity
from vllm_agent_hint.hints import HintError, parse_agent_hint

BODIES: Final = 2_000
SEED: Final = 52113
AT_ONCE: Final = 16
SETTLE_SECONDS: Final = 30.0

# Nothing outlives the test for long: leases end within a second, sessions one second later.
QUICK_TO_FORGET: Final = {
    "VLLM_AGENT_HINT_MAX_TTL": "1",
    "VLLM_AGENT_HINT_IDLE_SECONDS": "1",
    "VLLM_AGENT_HINT_LEADER_WAIT_SECONDS": "0",
}


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> TestServer:
    # Tight: what a hint keeps is taken away again and again.
    arguments = ["--num-gpu-blocks-override", "24", "--max-model-len", "2048"]
    return serve_module("qwen3-small", arguments, QUICK_TO_FORGET)


def held_by_sessions(server: TestServer) -> dict[str, float]:
    """Sessions, and blocks by zone, after a step that has no hint."""
    server.complete(tokens(8))
    metrics = server.metrics()
    zones = {
        zone: metrics.total("vllm:agent_hint_blocks", zone=zone)
        for zone in ("ordinary", "session", "ttl")
    }
    return {"sessions": metrics["vllm:agent_hint_sessions"], **zones}


def send_all(server: TestServer, bodies: Iterator[StrangeBody]) -> list[tuple[StrangeBody, Any]]:
    """Every body with its response, or with the exception that came instead of one."""

    async def send(client: httpx.AsyncClient) -> list[tuple[StrangeBody, Any]]:
        answered: list[tuple[StrangeBody, Any]] = []

        async def sender() -> None:
            for strange in bodies:
                try:
                    response: Any = await client.post(
                        strange.path,
                        content=strange.content,
                        headers=[(b"content-type", b"application/json"), *strange.headers],
                    )
                except httpx.HTTPError as error:
                    response = error
                answered.append((strange, response))

        await asyncio.gather(*(sender() for _ in range(AT_ONCE)))
        return answered

    async def run() -> list[tuple[StrangeBody, Any]]:
        async with httpx.AsyncClient(
            base_url=server.base_url, timeout=60.0, trust_env=False
        ) as client:
            return await send(client)

    return asyncio.run(run())


@dataclass(frozen=True)
class Expected:
    """What has to come of a body: one of these statuses, and a 400 with this field."""

    statuses: tuple[int, ...]
    field: str | None = None


def expected(strange: StrangeBody) -> Expected:
    """What the schema makes of the hint, where nothing else can be wrong."""
    try:
        request = json.loads(strange.content)
    except (ValueError, RecursionError):
        return Expected((400,))
    if not strange.only_the_hint:
        return Expected((200, 400))
    xargs = request.get("vllm_xargs") or {}
    hint = request.get("agent_hint")
    hint = xargs.get("agent_hint") if hint is None else hint
    if hint is None:
        return Expected((200,))
    raw_request = SimpleNamespace(headers=httpx.Headers(strange.headers, encoding="latin-1"))
    identity = outside_identity(request.get("session_id"), raw_request, xargs)
    try:
        parse_agent_hint(hint, identity=identity)
    except HintError as error:
        return Expected((400,), error.field)
    return Expected((200,))


def fault_in(strange: StrangeBody, response: Any) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if not isinstance(response, httpx.Response):
        return f"no answer: {response!r}"
    what = expected(strange)
    if response.status_code not in what.statuses:
        return f"{response.status_code}, not {what}: {response.text[:300]}"
    if what.field is not None and apis.error(response)[0] != what.field:
        return f"a 400 that doesn't name {what.field}: {response.text[:300]}"
    if response.status_code == 200 and strange.streams and '"error":{' in response.text:
        return f"a stream that broke: {response.text[-300:]}"
    return ""


@pytest.mark.timeout(600)
def test_strange_hints_are_answered_and_leave_nothing_behind(server: TestServer) -> None:
    before = held_by_sessions(server)
    assert before["sessions"] == 0
    for path in ALL:
        started = time.monotonic()
        answered = send_all(server, strange_bodies(path, BODIES, SEED))
        assert len(answered) == BODIES
        faults = [
            (strange.content[:600], strange.headers, fault)
            for strange, response in answered
            if (fault := fault_in(strange, response))
        ]
        assert not faults, f"{len(faults)} on {path}, such as {faults[:5]}"
        statuses = Counter(response.status_code for _, response in answered)
        # Neither a fuzz that is all refused nor one that is all taken would find much.
        assert min(statuses[200], statuses[400]) > BODIES / 5
        print(f"{path}: {dict(statuses)} in {time.monotonic() - started:.0f} s")
        assert server.is_alive()
    # Else nothing would have been at stake.
    done = server.metrics()
    assert done["vllm:agent_hint_expired_total"] > 100
    assert done.total("vllm:agent_hint_edits_total", operation="evict", status="applied") > 100
    free_all(server)
    assert settled(server, before) == before
    assert "Traceback" not in server.log_text()


def free_all(server: TestServer) -> None:
    edits = [{"type": "evict", "include_children": True}]
    for salt in (None, *SALTS):
        for name in SESSIONS:
            hint = {
                "session_id": name,
                "context_management": {"manage_request": True, "edits": edits},
            }
            more = {} if salt is None else {"cache_salt": salt}
            assert server.post(COMPLETIONS, body(COMPLETIONS, **more, agent_hint=hint)).is_success


def settled(server: TestServer, expected: dict[str, float]) -> dict[str, float]:
    """What sessions hold, once it is what is expected, or at the latest after a while."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (held := held_by_sessions(server)) != expected and time.monotonic() < deadline:
        time.sleep(0.5)
    return held


def test_the_same_seed_makes_the_same_bodies() -> None:
    for path in ALL:
        once = [strange.content for strange in strange_bodies(path, 50, SEED)]
        assert once == [strange.content for strange in strange_bodies(path, 50, SEED)]
        assert any(json.loads(content).get("agent_hint") for content in once[:10])
