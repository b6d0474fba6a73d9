"""How a turn ended, read off replies of vLLM's own classes, whole and streamed, and told once."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from vllm.entrypoints.anthropic.protocol import (
    AnthropicContentBlock,
    AnthropicDelta,
    AnthropicMessagesResponse,
    AnthropicStreamEvent,
    AnthropicUsage,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionRequest,
    CompletionResponse,
    CompletionStreamResponse,
)
from vllm.entrypoints.openai.responses.protocol import (
    ResponseCompletedEvent,
    ResponsesRequest,
    ResponsesResponse,
)
from vllm.sampling_params import SamplingParams

from tests.engine.conftest import Log
from vllm_agent_hint.frontend import facts as frontend_facts
from vllm_agent_hint.frontend.carry import CarriedHint
from vllm_agent_hint.frontend.chat import ChatDoor
from vllm_agent_hint.frontend.facts import watch_turn
from vllm_agent_hint.frontend.sse import DONE, data_event
from vllm_agent_hint.frontend.witnesses import (
    ChoicesWitness,
    MessagesWitness,
    ResponsesWitness,
    Witness,
)
from vllm_agent_hint.hints import AgentHintParams
from vllm_agent_hint.sessions.facts import MAX_TOOL_NAME, MAX_TOOLS, TurnFacts
from vllm_agent_hint.settings import Settings

USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def said(witness: Witness) -> tuple[str, tuple[str, ...]] | None:
    facts = witness.facts(None)
    return None if facts is None else (facts.ended, facts.tools)


# -- chat and completions --------------------------------------------------------------------------


def call(name: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}


def whole_chat(*choices: dict[str, Any]) -> Any:
    message = {"role": "assistant", "content": 'says "finish_reason":"length"'}
    full = [
        {"index": k, **choice, "message": {**message, **choice.get("message", {})}}
        for k, choice in enumerate(choices)
    ]
    return ChatCompletionResponse(model="m", choices=full, usage=USAGE)


def chunk(index: int = 0, **choice: Any) -> str:
    """As vLLM's stream generator writes it."""
    whole = ChatCompletionStreamResponse(
        model="m", choices=[{"index": index, "delta": {}, **choice}]
    )
    return f"data: {whole.model_dump_json(exclude_unset=True)}\n\n"


def streamed_chat(*choices: dict[str, Any]) -> list[str]:
    """The same choices in pieces: a tool's name first, its arguments later, as vLLM sends them."""
    text = {"content": 'says "finish_reason":"length" and "tool_calls":[{"name":"no"}]'}
    events = [chunk(k, delta=text, finish_reason=None) for k in range(len(choices))]
    for k, choice in enumerate(choices):
        for number, made in enumerate(choice.get("message", {}).get("tool_calls", ())):
            name = {"name": made["function"]["name"]}
            for function in (name, {"arguments": '{"name":"x"}'}):
                piece = {"tool_calls": [{"index": number, "function": function}]}
                events.append(chunk(k, delta=piece, finish_reason=None))
        rest = {key: value for key, value in choice.items() if key != "message"}
        events.append(chunk(k, **rest))
    return [*events, DONE]


def stop(**more: Any) -> dict[str, Any]:
    return {"finish_reason": "stop", **more}


CALLS = {"message": {"tool_calls": [call("read"), call("bash")]}}
CHAT_ENDS: list[tuple[str, list[dict[str, Any]], bool, tuple[str, tuple[str, ...]]]] = [
    ("a final message", [stop()], True, ("final_message", ())),
    ("an end of which nobody can tell", [stop()], False, ("unknown", ())),
    ("a stop token", [stop(stop_reason=7)], True, ("final_message", ())),
    ("a stop string", [stop(stop_reason="Observation:")], True, ("unknown", ())),
    ("tools", [{"finish_reason": "tool_calls", **CALLS}], True, ("tool_call", ("read", "bash"))),
    ("a forced tool", [stop(**CALLS)], False, ("tool_call", ("read", "bash"))),
    ("a cut", [{"finish_reason": "length"}], True, ("cut", ())),
    ("a cut call", [{"finish_reason": "length", **CALLS}], True, ("cut", ("read", "bash"))),
    ("an abort", [{"finish_reason": "abort"}], True, ("unknown", ())),
    ("one choice of two calls", [stop(), stop(**CALLS)], True, ("tool_call", ("read", "bash"))),
    ("one of two is cut", [stop(), {"finish_reason": "length"}], True, ("cut", ())),
    ("one of two is unknown", [stop(), stop(stop_reason="x")], True, ("unknown", ())),
]


@pytest.mark.parametrize(
    ("choices", "can_tell", "ended"),
    [case[1:] for case in CHAT_ENDS],
    ids=[case[0] for case in CHAT_ENDS],
)
def test_how_a_chat_ended(
    choices: list[dict[str, Any]], can_tell: bool, ended: tuple[str, tuple[str, ...]]
) -> None:
    whole = ChoicesWitness(can_tell=can_tell, num_choices=len(choices))
    whole.see_whole(whole_chat(*choices))
    assert said(whole) == ended
    streamed = ChoicesWitness(can_tell=can_tell, num_choices=len(choices))
    events = streamed_chat(*choices)
    assert [streamed.see_event(event) for event in events] == [*([False] * (len(events) - 1)), True]
    assert said(streamed) == ended


def test_a_chat_has_not_ended_before_each_of_its_choices_has() -> None:
    witness = ChoicesWitness(can_tell=True, num_choices=2)
    first, last, _ = streamed_chat(stop(), stop())[2:]
    witness.see_event(first)
    assert said(witness) is None
    witness.see_event(last)
    assert said(witness) == ("final_message", ())


@pytest.mark.parametrize(
    ("reason", "stop_reason", "ended"),
    [("stop", None, "unknown"), ("length", None, "cut"), ("stop", "end", "unknown")],
)
def test_how_a_completion_ended(reason: str, stop_reason: str | None, ended: str) -> None:
    choice = {"index": 0, "text": "", "finish_reason": reason, "stop_reason": stop_reason}
    whole = ChoicesWitness(can_tell=False, num_choices=1)
    whole.see_whole(CompletionResponse(model="m", choices=[choice], usage=USAGE))
    assert said(whole) == (ended, ())
    streamed = ChoicesWitness(can_tell=False, num_choices=1)
    response = CompletionStreamResponse(model="m", choices=[choice])
    streamed.see_event(f"data: {response.model_dump_json(exclude_unset=True)}\n\n")
    assert said(streamed) == (ended, ())


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "tools", "can_tell", "ended"),
    [
        ("end_turn", (), True, "final_message"),
        ("end_turn", (), False, "unknown"),
        ("tool_use", ("read", "bash"), True, "tool_call"),
        ("max_tokens", ("read",), True, "cut"),
        ("stop_sequence", (), True, "unknown"),
        (None, (), True, "unknown"),
    ],
)
def test_how_a_message_ended(
    reason: Any, tools: tuple[str, ...], can_tell: bool, ended: str
) -> None:
    blocks = [AnthropicContentBlock(type="text", text='"type":"tool_use"')] + [
        AnthropicContentBlock(type="tool_use", id="t", name=name, input={}) for name in tools
    ]
    whole = MessagesWitness(can_tell=can_tell)
    usage = AnthropicUsage(input_tokens=1, output_tokens=1)
    about = {"id": "msg", "model": "m", "usage": usage}
    whole.see_whole(AnthropicMessagesResponse(content=blocks, stop_reason=reason, **about))
    assert said(whole) == (ended, tools)

    streamed = MessagesWitness(can_tell=can_tell)
    events = [
        AnthropicStreamEvent(type="content_block_start", index=k, content_block=block)
        for k, block in enumerate(blocks)
    ]
    delta = AnthropicDelta(stop_reason=reason, stop_sequence=None)
    events.append(AnthropicStreamEvent(type="message_delta", delta=delta))
    events.append(AnthropicStreamEvent(type="message_stop"))
    seen = [
        streamed.see_event(f"event: {e.type}\ndata: {e.model_dump_json(exclude_unset=True)}\n\n")
        for e in events
    ]
    assert seen == [*([False] * (len(events) - 1)), True]
    assert said(streamed) == (ended, tools)


# -- responses -------------------------------------------------------------------------------------


def response(status: str, *tools: str) -> Any:
    message = {
        "type": "message",
        "id": "m",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "says", "annotations": []}],
    }
    calls = [
        {"type": "function_call", "name": name, "arguments": "{}", "call_id": "c"} for name in tools
    ]
    return ResponsesResponse.from_request(
        ResponsesRequest(model="m", input="x", truncation="disabled"),
        SamplingParams(max_tokens=1),
        model_name="m",
        created_time=0,
        output=[message, *calls],
        status=status,
        usage=None,
    )


@pytest.mark.parametrize(
    ("status", "tools", "can_tell", "ended"),
    [
        ("completed", (), True, "final_message"),
        ("completed", (), False, "unknown"),
        ("completed", ("read", "bash"), False, "tool_call"),
        ("incomplete", ("read",), True, "cut"),
        ("queued", (), True, None),
        ("in_progress", (), True, None),
    ],
)
def test_how_a_response_ended(
    status: str, tools: tuple[str, ...], can_tell: bool, ended: str | None
) -> None:
    whole = ResponsesWitness(can_tell=can_tell)
    whole.see_whole(response(status, *tools))
    assert said(whole) == (None if ended is None else (ended, tools))
    streamed = ResponsesWitness(can_tell=can_tell)
    event = ResponseCompletedEvent(
        type="response.completed", sequence_number=1, response=response(status, *tools)
    )
    assert not streamed.see_event(SimpleNamespace(type="response.output_item.added"))
    assert streamed.see_event(event)
    assert said(streamed) == (None if ended is None else (ended, tools))


# -- bounds ----------------------------------------------------------------------------------------


def test_facts_stay_within_bounds_whatever_a_model_has_made_up() -> None:
    names = ["x" * 1000, "\ud800", "", 5, None, *("again", "again"), *map(str, range(100))]
    facts = TurnFacts.of("exploded", names)
    assert facts.ended == "unknown"
    assert len(facts.tools) == MAX_TOOLS
    assert facts.tools[:3] == ("x" * MAX_TOOL_NAME, "?", "again")
    for name in facts.tools:
        name.encode()
    assert "again" not in repr(facts)


# -- telling ---------------------------------------------------------------------------------------


@pytest.fixture
def told() -> Iterator[list[dict[str, Any]]]:
    """The utility calls that the front end has made."""
    calls: list[dict[str, Any]] = []

    async def call_engines(engine_client: Any, payload: dict[str, Any]) -> list[Any]:
        calls.append(payload)
        return []

    with (
        patch.object(frontend_facts, "call_engines", call_engines),
        patch.object(frontend_facts, "load_settings", lambda: Settings(auto=True)),
    ):
        yield calls


def hinted(session_id: str | None = "s") -> CarriedHint:
    return CarriedHint(AgentHintParams(session_id=session_id), "op", 1, tenant="red")


def watching(ours: CarriedHint | None = None, *, parser: bool = True, **more: Any) -> Any:
    args = SimpleNamespace(
        enable_auto_tool_choice=parser, tool_call_parser="hermes" if parser else None
    )
    raw_request = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(args=args)))
    tools = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
    request = ChatCompletionRequest(
        **{"messages": [{"role": "user", "content": "x"}], "tools": tools, **more}
    )
    serving = SimpleNamespace(engine_client=object())
    return watch_turn(ChatDoor(), ours or hinted(), serving, request, raw_request)


async def stream_of(events: list[str]) -> AsyncGenerator[str, None]:
    for event in events:
        yield event


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_whole_reply_is_told_once_and_stays_the_same(told: list[dict[str, Any]]) -> None:
    async def run() -> None:
        reply = whole_chat(stop())
        assert watching(cache_salt="salt").over(reply) is reply
        assert told == [], "never before the reply is on its way"
        await settle()

    asyncio.run(run())
    assert told == [
        {
            "op": "facts",
            "tenant": "red",
            "session_id": "s",
            "cache_salt": "salt",
            "operation_id": "op",
            "ended": "final_message",
            "tools": [],
        }
    ]


def test_a_stream_is_told_before_its_last_event_and_stays_the_same(
    told: list[dict[str, Any]],
) -> None:
    events = streamed_chat({"finish_reason": "tool_calls", **CALLS})

    async def run() -> None:
        passed = []
        async for event in watching().over(stream_of(events)):
            passed.append(event)
            await settle()
            assert len(told) == (event == DONE)
        await settle()
        assert passed == events

    asyncio.run(run())
    [call] = told
    assert (call["ended"], call["tools"]) == ("tool_call", ["read", "bash"])


@pytest.mark.parametrize(
    ("events_read", "ended"), [(1, "disconnected"), (2, "final_message")], ids=["early", "at end"]
)
def test_a_client_that_goes_has_disconnected_unless_the_turn_had_ended(
    told: list[dict[str, Any]], events_read: int, ended: str
) -> None:
    async def run() -> None:
        stock = stream_of(streamed_chat(stop()))
        watched = watching().over(stock)
        for _ in range(events_read):
            await anext(watched)
        await watched.aclose()
        await settle()
        assert stock.ag_frame is None, "vLLM's own generator is closed with ours"

    asyncio.run(run())
    assert [call["ended"] for call in told] == [ended]


def test_a_handler_that_is_cancelled_has_lost_its_client(told: list[dict[str, Any]]) -> None:
    async def run() -> None:
        watch = watching()

        async def handler() -> Any:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                # What vLLM's handlers do.
                return watch.over(SimpleNamespace(error="Client disconnected"))

        task = asyncio.create_task(handler())
        await settle()
        task.cancel()
        await task
        await settle()

    asyncio.run(run())
    assert [call["ended"] for call in told] == ["disconnected"]


def test_an_error_is_no_end_of_a_turn(told: list[dict[str, Any]]) -> None:
    async def run() -> None:
        watching().over(SimpleNamespace(error="no such model"))
        failed = data_event({"error": {"message": "failed"}})
        async for _ in watching().over(stream_of([failed, DONE])):
            pass
        await settle()

    asyncio.run(run())
    assert told == []


@pytest.mark.parametrize(("parser", "more"), [(False, {}), (True, {"tools": None})])
def test_without_a_parser_or_tools_nobody_can_tell_what_a_message_was(
    told: list[dict[str, Any]], parser: bool, more: dict[str, Any]
) -> None:
    async def run() -> None:
        watching(parser=parser, **more).over(whole_chat(stop()))
        await settle()

    asyncio.run(run())
    assert [call["ended"] for call in told] == ["unknown"]


def test_nobody_watches_without_the_flag_or_a_session(told: list[dict[str, Any]]) -> None:
    assert watching(hinted(None)) is None
    with patch.object(frontend_facts, "load_settings", lambda: Settings(auto=False)):
        assert watching() is None


def test_engines_that_lag_behind_are_not_told_more(told: list[dict[str, Any]]) -> None:
    async def run() -> None:
        with patch.object(frontend_facts, "MAX_IN_FLIGHT", 2):
            for _ in range(5):
                watching().over(whole_chat(stop()))
            await settle()
            watching().over(whole_chat(stop()))
            await settle()

    asyncio.run(run())
    assert len(told) == 3


def test_a_reply_of_another_shape_passes_and_is_named_once(
    told: list[dict[str, Any]], log: Log
) -> None:
    events = ['data: {"choices":[{"finish_reason":"stop"}]}\n\n', "data: [DONE]\n\n"]

    async def run() -> list[str]:
        for _ in range(2):
            assert watching().over(reply := SimpleNamespace(strange=1)) is reply
        return [event async for event in watching().over(stream_of(events))]

    with patch("vllm_agent_hint.frontend.fail_open._named", set()):
        assert asyncio.run(run()) == events
    assert told == []
    assert log.text.count("looking at how a turn ended failed") == 1


def test_a_completion_request_counts_its_choices() -> None:
    from vllm_agent_hint.frontend.completion import CompletionDoor

    request = CompletionRequest(prompt=["a", "b"], n=2)
    witness = CompletionDoor().witness(request, can_tell=False)
    assert isinstance(witness, ChoicesWitness)
    assert witness._num_choices == 4
