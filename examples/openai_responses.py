"""Hints on /v1/responses, with OpenAI's SDK: a turn, and a streamed last turn with an evict."""

import os

import httpx
from openai import OpenAI

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1")
API_KEY = os.environ.get("API_KEY", "none")
MODEL = os.environ.get("MODEL", "model")
client = OpenAI(base_url=BASE_URL, api_key=API_KEY)

session = {"session_id": "codex-1", "cache_control": {"ttl": 120}}
conversation = [{"role": "user", "content": "Read this patch. " + "a line of the patch; " * 200}]

reply = client.responses.create(
    model=MODEL, input=conversation, max_output_tokens=16, extra_body={"agent_hint": session}
)
print(f"{reply.usage.input_tokens} input tokens;", reply.agent_hint)

conversation += [
    {"role": "assistant", "content": reply.output_text},
    {"role": "user", "content": "The tool says: ok. This is the end."},
]
last_turn = {"session_id": "codex-1", "context_management": {"edits": [{"type": "evict"}]}}
for event in client.responses.create(
    model=MODEL,
    input=conversation,
    max_output_tokens=16,
    extra_body={"agent_hint": last_turn},
    stream=True,
):
    if event.type == "response.completed":
        cached = event.response.usage.input_tokens_details.cached_tokens
        print(f"{event.response.usage.input_tokens} input tokens, {cached} of them cached")
        operation_id = event.agent_hint["operation_id"]

# The evict ran after the answer; its result is kept for ten minutes.
operation = httpx.get(
    f"{BASE_URL}/agent_hint/operations/{operation_id}",
    headers={"Authorization": f"Bearer {API_KEY}"},
).json()
print(operation["status"], operation["results"])
