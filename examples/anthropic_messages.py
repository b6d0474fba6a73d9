"""Hints on /v1/messages, with Anthropic's SDK: a turn, a streamed turn, and an evict."""

import os

from anthropic import Anthropic

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("MODEL", "model")
client = Anthropic(
    base_url=BASE_URL.removesuffix("/v1"), auth_token=os.environ.get("API_KEY", "none")
)

session = {"agent_hint": {"session_id": "claude-1", "cache_control": {"ttl": 120}}}
conversation = [{"role": "user", "content": "Read this module. " + "a line of its source; " * 200}]

reply = client.messages.create(
    model=MODEL, messages=conversation, max_tokens=16, extra_body=session
)
print(f"{reply.usage.cache_read_input_tokens} input tokens cached;", reply.agent_hint)

conversation += [
    {"role": "assistant", "content": reply.content},
    {"role": "user", "content": "The tool says: ok."},
]
for event in client.messages.create(
    model=MODEL, messages=conversation, max_tokens=16, extra_body=session, stream=True
):
    if event.type == "message_delta":  # the event that ends the answer has the report
        print(f"{event.usage.cache_read_input_tokens} input tokens cached;", event.agent_hint)

evict = {
    "session_id": "claude-1",
    "context_management": {"manage_request": True, "edits": [{"type": "evict"}]},
}
evicted = client.messages.create(
    model=MODEL,
    messages=[{"role": "user", "content": ""}],  # the schema wants some; they are not read
    max_tokens=1,
    extra_body={"agent_hint": evict},
)
print(evicted.agent_hint["results"])
