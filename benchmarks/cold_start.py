"""Counts the cold-start table of the reuse estimator on every second session of a trace.

    python benchmarks/cold_start.py weka/bench.jsonl.gz > cold_start.json

The other sessions stay unseen, to measure what the table is worth. A gap runs from the end of a
turn to the arrival of the session's next one, so that it is what a server sees.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from vllm_agent_hint.sessions.reuse import EDGES, NEVER, bin_of, turn_class
from vllm_agent_hint.traces.model import TracedRequest, TracedSession
from vllm_agent_hint.traces.reading import read_trace

ENDED = {"tool_use": "tool_call", "end_turn": "final_message", "": "cut"}


def ended_at(request: TracedRequest) -> float:
    return request.at + (request.service_seconds or 0.0)


def count(sessions: Iterable[TracedSession]) -> dict[str, dict[str, list[int]]]:
    table: dict[str, dict[str, list[int]]] = defaultdict(
        lambda: defaultdict(lambda: [0] * len(EDGES))
    )
    for session in sessions:
        last_gap = None
        followers = [*session.requests[1:], None]
        for request, following in zip(session.requests, followers, strict=True):
            gap = None if following is None else max(0.0, following.at - ended_at(request))
            where = NEVER if gap is None else bin_of(gap)
            turns = turn_class("", "", "", last_gap, request.output_tokens)
            for ended in (ENDED.get(request.stop or "", "unknown"), "unknown"):
                table[ended]["all"][where] += 1
                table[ended][f"{turns.gap}/{turns.output}"][where] += 1
            last_gap = gap
    return table


def main(path: str) -> None:
    table = count(read_trace(Path(path)).sessions[::2])
    rows = [
        f'  "{ended}": {{\n'
        + ",\n".join(f'    "{cell}": {json.dumps(table[ended][cell])}' for cell in sorted(cells))
        + "\n  }"
        for ended, cells in sorted(table.items())
    ]
    print("{\n" + ",\n".join(rows) + "\n}")


if __name__ == "__main__":
    main(sys.argv[1])
