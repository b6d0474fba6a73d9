"""From what a server hands out to a trace: order, numbers, what is shared, how turns ended."""

import base64
import io
import json
import struct
from typing import Any

import pytest

from vllm_agent_hint.cli.capture.assembly import TraceAssembly
from vllm_agent_hint.cli.capture.run import summary
from vllm_agent_hint.traces.line import read_lines
from vllm_agent_hint.traces.plain import PlainWriter, read_plain

BLOCK = 16


class Recording:
    """An assembly and the file that it writes."""

    def __init__(self) -> None:
        self.file = io.StringIO()
        self.assembly = TraceAssembly(PlainWriter(self.file, BLOCK))

    def take(self, *requests: dict[str, Any], until: float = 0.0, **more: Any) -> None:
        part = {"requests": list(requests), "until": until, "dropped": 0, "unfinished": 0, **more}
        self.assembly.add(part)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.getvalue().splitlines()][1:]


def ended(at: float, digests: list[int], **more: Any) -> dict[str, Any]:
    return {
        "t": at,
        "seconds": 0.5,
        "session": None,
        "parent": None,
        "prompt_tokens": len(digests) * BLOCK + 3,
        "output_tokens": 7,
        "finish": "stop",
        "ended": None,
        "tool": None,
        "hinted": False,
        "blocks": base64.b64encode(struct.pack(f"<{len(digests)}Q", *digests)).decode(),
        **more,
    }


def test_requests_stand_in_the_order_of_arrival_though_they_end_in_another() -> None:
    recording = Recording()
    recording.take(ended(3.0, [1]), until=1.0)
    assert recording.lines == [], "one that arrived earlier may still run"
    recording.take(ended(1.0, [2]), ended(4.0, [3]), until=3.5)
    assert [line["t"] for line in recording.lines] == [1.0, 3.0]
    recording.assembly.finish()
    assert [line["t"] for line in recording.lines] == [1.0, 3.0, 4.0]


def test_digests_become_consecutive_numbers_that_say_what_is_shared() -> None:
    recording = Recording()
    recording.take(ended(1.0, [2**64 - 1, 5, 9]), ended(2.0, [2**64 - 1, 5, 7, 8]), until=9.0)
    assert [line["runs"] for line in recording.lines] == [[0, 3], [0, 2, 3, 2]]
    assert "18446744073709551615" not in recording.file.getvalue()


def test_a_sessions_next_prompt_is_written_as_what_it_adds() -> None:
    recording = Recording()
    recording.take(ended(1.0, [4, 5, 6], session="s"), until=9.0)
    recording.take(ended(10.0, [4, 5, 7], session="s", parent="p", hinted=True), until=11.0)
    first, second = recording.lines
    assert ("keep" in first, second["keep"], second["runs"]) == (False, 2, [3, 1])
    assert (second["session"], second["parent"], second["hinted"]) == ("s", "p", True)
    lines = read_lines("f", io.StringIO(recording.file.getvalue()))
    [session] = read_plain("f", lines).sessions
    assert [list(request.blocks) for request in session.requests] == [[0, 1, 2], [0, 1, 3]]
    assert [request.at for request in session.requests] == [0.0, 9.0]


@pytest.mark.parametrize(
    ("how", "finish", "stop"),
    [
        (None, "stop", None),
        (None, "length", ""),
        (None, "abort", ""),
        ("tool_call", "stop", "tool_use"),
        ("final_message", "stop", "end_turn"),
        ("disconnected", "stop", ""),
    ],
)
def test_a_stop_is_said_as_far_as_it_is_known(
    how: str | None, finish: str, stop: str | None
) -> None:
    recording = Recording()
    recording.take(ended(1.0, [1], ended=how, finish=finish, tool="digest"), until=2.0)
    [line] = recording.lines
    assert line.get("stop") == stop
    assert line["tool"] == "digest"


def test_the_summary_counts_requests_sessions_tokens_and_what_is_missing() -> None:
    recording = Recording()
    recording.take(ended(1.0, [1], session="a", hinted=True), ended(2.0, [1]), until=3.0)
    recording.take(ended(4.0, [1, 2], session="a"), until=5.0, dropped=3, unfinished=2)
    said = summary(recording.assembly.finish())
    assert said == (
        "3 requests (1 hinted, 2 not) of 1 named sessions, 73 prompt and 21 output tokens, "
        "3 dropped, 2 not finished and left out"
    )
