"""When a management request has a prompt of its own, and from where a session is known."""

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from vllm_agent_hint.frontend.own_prompt import _says_something
from vllm_agent_hint.pooling.capability import Content
from vllm_agent_hint.pooling.tracker import Origin, SessionKeyTracker
from vllm_agent_hint.sessions.intent import SessionKey

KEY = SessionKey("", None, "a")


class Body(BaseModel):
    """A request body of any API."""

    model_config = ConfigDict(extra="allow")


class Message(BaseModel):
    """A message as Anthropic's API parses it."""

    role: str
    content: Any


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": ""}]},  # The RFC's own example of a prefetch.
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]},
        {"messages": [[{"role": "user", "content": ""}], [{"role": "user", "content": None}]]},
        {"messages": [Message(role="user", content="")], "system": None},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": None, "prompt_embeds": None},
        {"input": "", "instructions": None, "previous_response_id": None},
        {"model": "model", "temperature": 0.0},
    ],
)
def test_a_body_that_says_nothing_has_no_prompt(fields: dict[str, Any]) -> None:
    assert not _says_something(Body(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        {"messages": [Message(role="user", content="hello")]},
        {"messages": [Message(role="user", content="")], "system": "Be brief."},
        {"messages": [[{"role": "user", "content": ""}], [{"role": "user", "content": "hello"}]]},
        {"prompt": "hello"},
        {"prompt": [0, 0]},
        {"prompt": [[1, 2], []]},
        {"prompt_embeds": b"x"},
        {"input": "hello"},
        {"input": "", "previous_response_id": "resp_1"},
        {"input": [{"role": "user", "content": "hello"}]},
    ],
)
def test_a_body_that_says_something_has_one(fields: dict[str, Any]) -> None:
    assert _says_something(Body(**fields))


def test_a_session_that_goes_on_here_is_known_from_here() -> None:
    tracker = SessionKeyTracker(1_000)
    tracker.register(KEY, Content([b"1"], 16), 0.0, at_most=1)
    tracker.set_origin(KEY, Origin.PROMPT)
    found = tracker.get(KEY)
    assert found is not None
    assert found.origin is Origin.PROMPT
    tracker.register(KEY, Content([b"1", b"2"], 16), 0.0, at_most=1)
    assert found.origin is Origin.RUN
