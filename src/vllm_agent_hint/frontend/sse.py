"""One more field in server-sent events that vLLM has already written.

The events of a hinted stream stay as vLLM wrote them, byte for byte; the one that ends the answer
gains ``agent_hint`` as the last field of its object. Never a comment or an event of its own: real
clients break on those.
"""

import json
from collections.abc import AsyncGenerator
from typing import Any, Final

from vllm_agent_hint.hints import HINT_KEY

DONE: Final = "data: [DONE]\n\n"
_END: Final = "}\n\n"


def data_event(content: dict[str, Any], name: str = "") -> str:
    """An event that holds one JSON object; ``name`` on its ``event:`` line, if any."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_json(content)}\n\n"


def with_field(event: str, report: dict[str, Any]) -> str:
    """The event with ``agent_hint`` in its object; as it is where it doesn't end one object."""
    if not event.endswith(_END) or event.count("\n\n") != 1:
        return event
    return f"{event.removesuffix(_END)},{_json(HINT_KEY)}:{_json(report)}{_END}"


async def report_on_last_chunk(
    stock: AsyncGenerator[str, None], report: dict[str, Any]
) -> AsyncGenerator[str, None]:
    """A stream of OpenAI chunks with the report on the last one, and on the usage chunk behind it.

    Clients differ in which of the two they read last. A chunk that finishes a choice is held back
    until the next event shows whether another one follows; all others pass at once.
    """
    held: str | None = None
    try:
        async for event in stock:
            ends = event == DONE or _is_usage_chunk(event)
            if held is not None:
                yield with_field(held, report) if ends else held
                held = None
            if _is_usage_chunk(event):
                yield with_field(event, report)
            elif _finishes_a_choice(event):
                held = event
            else:
                yield event
        if held is not None:
            yield with_field(held, report)
    finally:
        await stock.aclose()


async def report_on_event(
    stock: AsyncGenerator[str, None], name: str, report: dict[str, Any]
) -> AsyncGenerator[str, None]:
    """A stream of named events with the report on those of one name."""
    head = f"event: {name}\n"
    try:
        async for event in stock:
            yield with_field(event, report) if event.startswith(head) else event
    finally:
        await stock.aclose()


def _json(content: Any) -> str:
    """As vLLM writes it."""
    return json.dumps(content, separators=(",", ":"))


# Inside a JSON string a quotation mark is escaped, so neither can be text that the model wrote.


def _is_usage_chunk(event: str) -> bool:
    return '"choices":[]' in event


def _finishes_a_choice(event: str) -> bool:
    return '"finish_reason":"' in event
