"""Counts the cold-start table of the reuse estimator on every second session of two traces.

    python benchmarks/cold_start.py weka/bench.jsonl.gz mooncake/conversation_trace.jsonl.gz \\
        > cold_start.json

The other sessions stay unseen, to measure what the table is worth. A gap runs from the end of a
turn to the arrival of the session's next one, so that it is what a server sees.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm_agent_hint.sessions.reuse import CONVERSATION, EDGES, NEVER, bin_of, turn_class
from vllm_agent_hint.settings import Settings
from vllm_agent_hint.traces.model import TracedRequest, TracedSession
from vllm_agent_hint.traces.reading import read_trace

ENDED = {"tool_use": "tool_call", "end_turn": "final_message", "": "cut"}


def ended_at(request: TracedRequest) -> float:
    return request.at + (request.service_seconds or 0.0)


def new_table() -> dict[str, dict[str, list[int]]]:
    return defaultdict(lambda: defaultdict(lambda: [0] * len(EDGES)))


def count(sessions: Iterable[TracedSession]) -> dict[str, dict[str, list[int]]]:
    """By ending."""
    table = new_table()
    for session in sessions:
        for request, last_gap, gap in turns_of(session):
            where = NEVER if gap is None else bin_of(gap)
            for ended in (ENDED.get(request.stop or "", "unknown"), "unknown"):
                add(table[ended], request, last_gap, where)
    return table


def count_conversations(sessions: Iterable[TracedSession]) -> dict[str, dict[str, list[int]]]:
    """Turns by which a conversation is recognised, so from the second on.

    One that comes back when its blocks are ordinary again has not been waited for.
    """
    waits = Settings().associated_seconds
    table = new_table()
    for session in sessions:
        for request, last_gap, gap in turns_of(session):
            if last_gap is not None:
                where = NEVER if gap is None or gap >= waits else bin_of(gap)
                add(table[CONVERSATION], request, last_gap, where)
    return table


def turns_of(
    session: TracedSession,
) -> Iterator[tuple[TracedRequest, float | None, float | None]]:
    """Each request with the gap before it and the one behind it."""
    last_gap = None
    for request, following in zip(session.requests, [*session.requests[1:], None], strict=True):
        gap = None if following is None else max(0.0, following.at - ended_at(request))
        yield request, last_gap, gap
        last_gap = gap


def add(
    of_ending: dict[str, list[int]], request: TracedRequest, last_gap: float | None, where: int
) -> None:
    turns = turn_class("", "", "", last_gap, request.output_tokens)
    of_ending["all"][where] += 1
    of_ending[f"{turns.gap}/{turns.output}"][where] += 1


def main(agents: str, chats: str) -> None:
    table = count(read_trace(Path(agents)).sessions[::2])
    table |= count_conversations(read_trace(Path(chats)).sessions[::2])
    rows = [
        f'  "{ended}": {{\n'
        + ",\n".join(f'    "{cell}": {json.dumps(table[ended][cell])}' for cell in sorted(cells))
        + "\n  }"
        for ended, cells in sorted(table.items())
    ]
    print("{\n" + ",\n".join(rows) + "\n}")


if __name__ == "__main__":
    main(*sys.argv[1:])
