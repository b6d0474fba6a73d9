"""vLLM's HTTP APIs as a client sees them: one table for tests that hold for all of them."""

import json
from dataclasses import dataclass
from typing import Any, Final

import httpx
import pytest

CHAT: Final = "/v1/chat/completions"
BATCH: Final = "/v1/chat/completions/batch"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"

ALL: Final = (CHAT, BATCH, COMPLETIONS, RESPONSES, MESSAGES)
STREAMING: Final = tuple(path for path in ALL if path != BATCH)

APIS = pytest.mark.parametrize("path", ALL)
STREAMING_APIS = pytest.mark.parametrize("path", STREAMING)
APIS_AND_STREAMS = pytest.mark.parametrize(
    ("path", "stream"),
    [*((path, False) for path in ALL), *((path, True) for path in STREAMING)],
    ids=lambda value: {False: "whole", True: "streamed"}.get(value, value),
)
"""Each API, whole and, where it can, streamed."""

_OPENAI: Final = {"temperature": 0, "ignore_eos": True}
REPORT: Final = "agent_hint"


def body(path: str, text: str = "hello", tokens: int = 3, **more: Any) -> dict[str, Any]:
    """A request that has to succeed, greedy where the API can say so."""
    message = {"role": "user", "content": text}
    own: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [message], "max_tokens": tokens, **_OPENAI},
        BATCH: {"messages": [[message], [message]], "max_tokens": tokens, "temperature": 0},
        COMPLETIONS: {"prompt": text, "max_tokens": tokens, **_OPENAI},
        RESPONSES: {"input": text, "max_output_tokens": tokens, **_OPENAI},
        MESSAGES: {"messages": [message], "max_tokens": tokens, "temperature": 0},
    }
    return {"model": "model", **own[path], **more}


def long_body(path: str, **more: Any) -> dict[str, Any]:
    """The same with a prompt of some KV blocks."""
    return body(path, "word " * 200, **more)


@dataclass(frozen=True)
class Event:
    """One server-sent event; ``data`` is None for ``[DONE]``."""

    text: str
    name: str
    data: dict[str, Any] | None


def events(response: httpx.Response) -> list[Event]:
    """All events of a stream; each has to be one that every client understands."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    return [_event(text) for text in response.text.removesuffix("\n\n").split("\n\n")]


def _event(text: str) -> Event:
    fields = dict(line.split(": ", 1) for line in text.split("\n"))
    assert fields.keys() <= {"event", "data"}, text
    data = None if fields["data"] == "[DONE]" else json.loads(fields["data"])
    name = fields.get("event", "")
    assert not name or name == data["type"]
    return Event(text, name, data)


def reports(response: httpx.Response, *, stream: bool) -> list[tuple[int, dict[str, Any]]]:
    """Every ``agent_hint`` of the reply, with the place of its event counted from the end."""
    if not stream:
        assert response.status_code == 200, response.text
        whole = response.json()
        return [(0, whole[REPORT])] if REPORT in whole else []
    all_events = events(response)
    return [
        (place - len(all_events), event.data[REPORT])
        for place, event in enumerate(all_events)
        if event.data and REPORT in event.data
    ]


def report(response: httpx.Response, *, stream: bool = False) -> dict[str, Any]:
    """The ``agent_hint`` of the reply, which has to be at the place that we promise."""
    found = reports(response, stream=stream)
    assert found, response.text
    assert response.text.count(f'"{REPORT}"') == len(found)
    assert all(content == found[0][1] for _, content in found)
    if stream:
        last_of_substance = [event for event in events(response) if event.data][-1]
        if last_of_substance.name == "message_stop":
            ((place, _),) = found
            assert events(response)[place].name == "message_delta"
        else:
            assert last_of_substance.data is not None
            assert REPORT in last_of_substance.data
            assert last_of_substance.name in ("", "response.completed")
    return found[0][1]


def error(response: httpx.Response) -> tuple[str | None, str]:
    """Field and message of a 400. Anthropic's errors have one field for both."""
    assert response.status_code == 400, response.text
    found = response.json()["error"]
    if response.request.url.path != MESSAGES:
        return found["param"], found["message"]
    assert response.json()["type"] == "error"
    field, _, message = found["message"].partition(": ")
    return field, message


def said(response: httpx.Response, *, stream: bool) -> str:
    """What the model said."""
    if not stream:
        assert response.status_code == 200, response.text
        return "".join(_texts(response.json()))
    return "".join(text for event in events(response) if event.data for text in _texts(event.data))


def _texts(data: dict[str, Any]) -> list[str]:
    if "choices" in data:
        return [
            choice.get("text")
            or choice.get("message", {}).get("content")
            or choice.get("delta", {}).get("content")
            or ""
            for choice in data["choices"]
        ]
    if data.get("type") == "response.output_text.delta":
        return [data["delta"]]
    if data.get("type") == "content_block_delta":
        return [data["delta"]["text"]]
    blocks = data.get("content", []) if data.get("type") == "message" else []
    blocks = [block for item in data.get("output", ()) for block in item["content"]] or blocks
    return [block["text"] for block in blocks]
