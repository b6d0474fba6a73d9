"""An agent waits for a tool while other requests flood the cache. Its context is still there."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("API_KEY", "none"),
)
MODEL = os.environ.get("MODEL", "model")


def ask(messages: list[dict[str, str]], agent_hint: dict[str, object] | None = None) -> str:
    """One request. ``agent_hint`` is one more field of the body; stock vLLM ignores it."""
    extra = {"agent_hint": agent_hint} if agent_hint else None
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=16, temperature=0, extra_body=extra
    )
    details = answer.usage.prompt_tokens_details
    cached = details.cached_tokens if details else None
    print(f"{answer.usage.prompt_tokens:6} prompt tokens, {cached} of them cached")
    return answer.choices[0].message.content or ""


session = {"session_id": "agent-1", "cache_control": {"type": "ephemeral", "ttl": 120}}
conversation = [{"role": "user", "content": "Read this log. " + "a line of the log; " * 250}]

print("the agent's first turn:")
reply = ask(conversation, session)

print("others, while its tool runs:")
for visitor in range(12):
    ask([{"role": "user", "content": f"visitor {visitor}: " + f"question {visitor}; " * 300}])

print("the agent's next turn:")
conversation += [
    {"role": "assistant", "content": reply},
    {"role": "user", "content": "The tool says: ok."},
]
ask(conversation, session)
