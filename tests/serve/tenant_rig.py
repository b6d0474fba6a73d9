"""Clients of one server who are told apart by their API keys."""

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

import httpx

from tests.serve.rig import MAX_MODEL_LEN, TestServer
from vllm_agent_hint.cli.demo.server import MODEL_NAME

ALICE_KEY: Final = "alice-key-1f6c"
BOB_KEY: Final = "bob-key-9d02"
KEYS: Final = ("--api-key", ALICE_KEY, BOB_KEY)
ROOT: Final = "/v1/agent_hint"
HINT_60S: Final = {"cache_control": {"ttl": 60}}

assert MAX_MODEL_LEN >= 2048


class Client:
    """One tenant's view of a server.

    Args:
        server: The server.
        headers: Sent with every request.
    """

    def __init__(self, server: TestServer, **headers: str) -> None:
        self.http = httpx.Client(
            base_url=server.base_url,
            headers={name.replace("_", "-"): value for name, value in headers.items()},
            timeout=120.0,
            trust_env=False,
        )

    def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self.http.request(method, ROOT + path, **more)

    def ask(self, path: str, **query: Any) -> dict[str, Any]:
        response = self.call("GET", path, params=query)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def turn(
        self, session_id: str, prompt: Sequence[int], *edits: str, **more: Any
    ) -> dict[str, Any]:
        """One turn of a session that keeps its context for a minute. Returns ``agent_hint``."""
        hint: dict[str, Any] = {"session_id": session_id, **HINT_60S}
        if edits:
            hint["context_management"] = {"edits": [{"type": edit} for edit in edits]}
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": 1,
            "agent_hint": hint,
            **more,
        }
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        report: dict[str, Any] = response.json()["agent_hint"]
        return report

    def session_ids(self) -> list[str]:
        return [line["session_id"] for line in self.ask("/sessions", limit=1000)["sessions"]]


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


def path_of(session_id: str) -> str:
    """Dots are encoded, too: clients resolve a path of dots before they send it."""
    return f"/sessions/{quote(session_id, safe='').replace('.', '%2E')}"


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response in vLLM's shape."""
    body = response.json()
    assert set(body) == {"error"}, body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    return error


def answer_of(response: httpx.Response) -> tuple[int, bytes, dict[str, str]]:
    """All of a response that a client can tell from another, but the time of day."""
    headers = {name: value for name, value in response.headers.items() if name != "date"}
    return response.status_code, response.content, headers
