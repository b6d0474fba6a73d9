"""A harness says how each turn ended, so that who comes back soon is kept longer."""

import json
import os
import urllib.request

from openai import OpenAI

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1")
API_KEY = os.environ.get("API_KEY", "none")
MODEL = os.environ.get("MODEL", "model")
client = OpenAI(base_url=BASE_URL, api_key=API_KEY)


def turn(session_id: str, content: str) -> str:
    """One turn. Returns what names it."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],
        max_tokens=8,
        extra_body={"agent_hint": {"session_id": session_id, "cache_control": {"ttl": 300}}},
    )
    return answer.agent_hint["operation_id"]  # type: ignore[attr-defined,no-any-return]


def tell(session_id: str, operation_id: str, ended: str, *tools: str) -> None:
    request = urllib.request.Request(
        f"{BASE_URL}/agent_hint/sessions/{session_id}/turn",
        json.dumps({"ended": ended, "tools": tools, "operation_id": operation_id}).encode(),
        {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        print(f"{session_id}: {ended}, used: {json.load(answer)['used']}")


first = turn("coder", "Fix the failing test. " + "a line of the test; " * 100)
tell("coder", first, "tool_call", "bash")  # back within seconds
tell("coder", first, "tool_call", "bash")  # twice does no harm
second = turn("coder", "Fix the failing test. " + "a line of the test; " * 101)
tell("coder", second, "final_message")  # now a person reads: the first to give way
tell("coder", first, "tool_call", "bash")  # too late: there has been another turn since
