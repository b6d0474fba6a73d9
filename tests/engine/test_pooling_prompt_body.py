"""The way of a management request's prompt to the engine, and what goes wrong on it."""

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from vllm.entrypoints.serve import create_error_response

from vllm_agent_hint.frontend.own_prompt import Rendered, render_own_prompts
from vllm_agent_hint.hints import AgentHintParams
from vllm_agent_hint.settings import Settings


class Body(BaseModel):
    """A request body of any API."""

    model_config = ConfigDict(extra="allow")


class Door:
    """An API whose bodies are lists of prompts of tokens."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    async def rendered(self, serving: Any, request: Any) -> Any:
        if self._error is not None:
            raise self._error
        return Rendered(request.prompt, None)


def serving() -> Any:
    """As much of vLLM's handler as is asked for here; real ones are in ``tests/serve``."""

    def process_inputs(name: str, tokens: Any, *_: Any, lora_request: Any) -> Any:
        return SimpleNamespace(
            prompt_embeds=None,
            prompt_token_ids=tokens,
            cache_salt=None,
            lora_request=None,
            mm_features=None,
        )

    config = SimpleNamespace(kv_transfer_config=object())
    processor = SimpleNamespace(process_inputs=process_inputs)
    client = SimpleNamespace(vllm_config=config, input_processor=processor)
    return SimpleNamespace(engine_client=client, create_error_response=create_error_response)


HINT = AgentHintParams.model_validate(
    {
        "session_id": "a",
        "context_management": {"manage_request": True, "edits": [{"type": "prefetch"}]},
    }
)


def rendered(door: Door, **fields: Any) -> list[dict[str, Any]]:
    found = asyncio.run(render_own_prompts(door, serving(), Body(**fields), HINT))
    return list(found)


def test_of_several_prompts_as_many_go_along_as_a_session_may_run() -> None:
    bound = Settings().max_lineages
    plain = rendered(Door(), prompt=[[k] for k in range(1, bound + 5)])
    assert [each["token_ids"] for each in plain] == [
        array("I", [k]).tobytes() for k in range(1, bound + 1)
    ]


def test_what_the_client_has_to_correct_is_raised() -> None:
    with pytest.raises(ValueError, match="too long"):
        rendered(Door(ValueError("too long")), prompt=[[1]])


@pytest.mark.parametrize("error", [AttributeError("moved"), TypeError("moved"), KeyError("moved")])
def test_a_vllm_that_renders_in_another_way_leaves_it_to_the_manifest(error: Exception) -> None:
    assert rendered(Door(error), prompt=[[1]]) == []


def test_a_body_too_deep_to_look_through_leaves_it_to_the_manifest() -> None:
    deep: Any = ""
    for _ in range(3_000):
        deep = [deep]
    assert rendered(Door(), prompt=deep) == []
