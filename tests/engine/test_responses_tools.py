"""Tools that the server runs make a response of several engine requests, nobody knows how many."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from vllm_agent_hint.frontend.responses import ResponsesDoor
from vllm_agent_hint.hints import HintError

FUNCTION = {"type": "function", "name": "f", "parameters": {}, "strict": False}
INTERPRETER = {"type": "code_interpreter", "container": {"type": "auto"}}
WITH_TOOLS = SimpleNamespace(tool_server=object())
WITHOUT = SimpleNamespace(tool_server=None)


def check(serving: Any, *tools: dict[str, Any]) -> None:
    request = ResponsesRequest.model_validate({"input": "x", "tools": list(tools)})
    ResponsesDoor().check_edits_can_follow(serving, request)


def test_edits_follow_a_response_whose_tools_the_client_runs() -> None:
    check(WITH_TOOLS)
    check(WITH_TOOLS, FUNCTION)


def test_edits_follow_a_response_of_a_server_that_runs_no_tools() -> None:
    check(WITHOUT, FUNCTION, INTERPRETER)


def test_edits_do_not_wait_for_tools_that_the_server_runs() -> None:
    with pytest.raises(HintError, match="manage_request") as caught:
        check(WITH_TOOLS, FUNCTION, INTERPRETER)
    assert caught.value.field == "tools"
