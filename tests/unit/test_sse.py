"""One more field in a stream that is already written: where it stands, and what stays as it was."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from vllm_agent_hint.frontend.sse import DONE, report_on_event, report_on_last_chunk, with_field

REPORT = {"session_id": 'a"}\n\n', "operation_id": "0" * 32}


def chunk(text: str, finish: str | None = None, index: int = 0) -> str:
    choice = {"index": index, "text": text, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]}, separators=(',', ':'))}\n\n"


USAGE = 'data: {"choices":[],"usage":{"total_tokens":3}}\n\n'
ERROR = 'data: {"error":{"message":"gone"}}\n\n'


def through(*stock: str) -> list[str]:
    async def stream() -> AsyncGenerator[str, None]:
        for event in stock:
            yield event

    async def collect() -> list[str]:
        return [event async for event in report_on_last_chunk(stream(), REPORT)]

    return asyncio.run(collect())


def test_the_field_comes_last_and_leaves_the_rest_byte_for_byte() -> None:
    event = chunk("a", "stop")
    assert with_field(event, REPORT).startswith(event.removesuffix("}\n\n") + ',"agent_hint":')
    data = json.loads(with_field(event, REPORT).removeprefix("data: "))
    assert data == {**json.loads(event.removeprefix("data: ")), "agent_hint": REPORT}


@pytest.mark.parametrize(
    "event",
    [DONE, ": keep-alive\n\n", "", "data: {}\r\n\r\n", chunk("a") * 2, "data: {", "data: []\n\n"],
)
def test_what_does_not_end_one_object_stays_as_it_is(event: str) -> None:
    assert with_field(event, REPORT) == event


def test_the_chunk_that_finishes_the_choice_has_it() -> None:
    *others, last = stock = [chunk("a"), chunk("b"), chunk("c", "stop")]
    assert through(*stock, DONE) == [*others, with_field(last, REPORT), DONE]


def test_the_usage_chunk_has_it_too() -> None:
    first, last = chunk("a"), chunk("b", "length")
    assert through(first, last, USAGE, DONE) == [
        first,
        with_field(last, REPORT),
        with_field(USAGE, REPORT),
        DONE,
    ]


def test_of_several_choices_only_the_one_that_ends_last_has_it() -> None:
    stock = [chunk("a", "stop", 0), chunk("b", None, 1), chunk("c", "stop", 1)]
    assert through(*stock, DONE) == [*stock[:2], with_field(stock[2], REPORT), DONE]


def test_a_stream_that_fails_after_a_choice_reports_nothing() -> None:
    stock = [chunk("a", "stop", 0), ERROR, DONE]
    assert through(*stock) == stock


def test_text_that_looks_like_an_ending_is_text() -> None:
    stock = [chunk('"finish_reason":"stop"'), chunk('{"choices":[]}'), chunk("}\n\n", "stop")]
    assert through(*stock, DONE) == [*stock[:2], with_field(stock[2], REPORT), DONE]


def test_a_chunk_goes_out_before_the_next_one_is_asked_for() -> None:
    made: list[str] = []

    async def stream() -> AsyncGenerator[str, None]:
        for event in (chunk("a"), chunk("b"), chunk("c", "stop"), DONE):
            made.append(event)
            yield event

    async def check() -> None:
        ours = report_on_last_chunk(stream(), REPORT)
        for so_far in (1, 2):
            assert await anext(ours) == made[-1]
            assert len(made) == so_far

    asyncio.run(check())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda stock: report_on_last_chunk(stock, REPORT),
        lambda stock: report_on_event(stock, "message_delta", REPORT),
    ],
)
def test_a_client_that_leaves_closes_stocks_stream(wrap: Any) -> None:
    closed = []

    async def stream() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield chunk("a")
        finally:
            closed.append(True)

    async def leave() -> None:
        stock = stream()
        ours = wrap(stock)
        await anext(ours)
        await ours.aclose()
        # Now, not when somebody collects it.
        assert closed

    asyncio.run(leave())
