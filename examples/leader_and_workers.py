"""A leader hands one context to several workers, waits for them, and frees them all at the end.

While a worker is at it, the leader's context stays, even if its own TTL runs out.
"""

import os

import httpx

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("MODEL", "model")
server = httpx.Client(
    headers={"Authorization": f"Bearer {os.environ.get('API_KEY', 'none')}"}, timeout=120
)


def ask(messages: list[dict[str, str]], agent_hint: dict[str, object]) -> str:
    body = {"model": MODEL, "messages": messages, "max_tokens": 16, "agent_hint": agent_hint}
    answer = server.post(f"{BASE_URL}/chat/completions", json=body)
    answer.raise_for_status()
    usage = answer.json()["usage"]
    details = usage["prompt_tokens_details"]
    cached = details["cached_tokens"] if details else None
    print(f"{agent_hint['session_id']:>9}: {usage['prompt_tokens']} prompt tokens, {cached} cached")
    return answer.json()["choices"][0]["message"]["content"] or ""


plan = [{"role": "user", "content": "Plan the work. " + "a line of the specification; " * 200}]
plan.append(
    {
        "role": "assistant",
        "content": ask(plan, {"session_id": "leader", "cache_control": {"ttl": 30}}),
    }
)

for k in (1, 2, 3):
    ask(
        [*plan, {"role": "user", "content": f"Do part {k}. " + f"a file of part {k}; " * 50}],
        {
            "session_id": f"worker-{k}",
            "parent_session_id": "leader",
            "cache_control": {"ttl": 120},
        },
    )

leader = server.get(f"{BASE_URL}/agent_hint/sessions/leader").json()
print("the leader's workers:", *leader["children"])

freed = server.delete(
    f"{BASE_URL}/agent_hint/sessions/leader", params={"include_children": "true"}
).json()
(result,) = freed["results"]
print(f"{result['status']}: {result['blocks']} blocks; {result['reason']}")
gone = server.get(f"{BASE_URL}/agent_hint/sessions/worker-1")
print(f"worker-1 now: {gone.status_code}")
