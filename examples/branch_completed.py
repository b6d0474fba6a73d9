"""A worker agent has finished: give its cache back at once, without running the model."""

import json
import os

import httpx

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1")
HEADERS = {"Authorization": f"Bearer {os.environ.get('API_KEY', 'none')}"}
MODEL = os.environ.get("MODEL", "model")


def chat(content: str, agent_hint: dict[str, object]) -> dict[str, object]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "agent_hint": agent_hint,
    }
    answer = httpx.post(f"{BASE_URL}/chat/completions", json=body, headers=HEADERS, timeout=120)
    answer.raise_for_status()
    return answer.json()


chat(
    "Look into module 7. " + "a line of its source; " * 200,
    {"session_id": "worker-7", "cache_control": {"ttl": 300}},
)

evicted = chat(
    "",  # OpenAI's schema wants messages; they are not rendered
    {
        "session_id": "worker-7",
        "context_management": {"manage_request": True, "edits": [{"type": "evict"}]},
    },
)
print(json.dumps(evicted["agent_hint"], indent=2))

refused = httpx.post(
    f"{BASE_URL}/chat/completions",
    json={
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "agent_hint": {"cache_control": {"ttl": 86_400}},
    },
    headers=HEADERS,
    timeout=120,
)
print(refused.status_code, refused.json()["error"]["message"])
