"""Every route under /v1/agent_hint, with nothing but Python's standard library."""

import json
import os
import urllib.error
import urllib.request

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("MODEL", "model")


def call(method: str, path: str, body: object = None) -> dict[str, object]:
    """One call; an error is an answer, too."""
    request = urllib.request.Request(
        BASE_URL + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {os.environ.get('API_KEY', 'none')}",
            "Content-Type": "application/json",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


def show(method: str, path: str, body: object = None) -> dict[str, object]:
    answer = call(method, path, body)
    print(f"{method} {path}\n{json.dumps(answer, indent=2)}\n")
    return answer


show("GET", "/agent_hint/state")

turn = call(
    "POST",
    "/completions",
    {
        "model": MODEL,
        "prompt": "Look into module 7. " + "a line of its source; " * 200,
        "max_tokens": 8,
        "agent_hint": {"session_id": "team/worker-7", "cache_control": {"ttl": 300}},
    },
)
operation_id = turn["agent_hint"]["operation_id"]  # type: ignore[index]

show("GET", f"/agent_hint/operations/{operation_id}")  # what is kept of the turn
show("GET", "/agent_hint/sessions?limit=10")
show("GET", "/agent_hint/sessions/team/worker-7")
show("POST", "/agent_hint/sessions/team/worker-7", {"edits": [{"type": "evict"}]})
show("DELETE", "/agent_hint/sessions/team/worker-7")
show("GET", "/agent_hint/sessions/team/worker-7")  # 404: freed
