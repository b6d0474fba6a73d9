"""WEKA's kv-cache-tester traces of coding agents, one session per line.

Per request ``hash_ids = previous[:keep] + runs``, within its own array of requests. The ids are
local to a line. A sub-agent stands in its parent's array as a marker with requests of its own,
whose times count from the marker; it becomes a session of its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from vllm_agent_hint.traces.line import Line
from vllm_agent_hint.traces.model import Trace, TracedRequest, TracedSession, by_time

SUBAGENT = "subagent"


def read_weka(name: str, lines: Iterable[Line]) -> Trace:
    """See the module.

    Raises:
        TraceError: A line isn't as it should be.
    """
    sessions: list[TracedSession] = []
    block_size = 0
    first_id = 0
    for line in lines:
        size = line.whole("block_size", minimum=1)
        if block_size and size != block_size:
            raise line.error("block_size", f"must be {block_size}, as in the lines before")
        block_size = size
        in_line = list(_sessions_of(line, block_size, first_id))
        ids = [r.blocks.max() for s in in_line for r in s.requests if len(r.blocks)]
        first_id = max([first_id, *(int(highest) + 1 for highest in ids)])
        sessions += in_line
    return Trace(name, block_size, tuple(sessions))


def _sessions_of(line: Line, block_size: int, first_id: int) -> Iterator[TracedSession]:
    name = line.text("id")
    if not name:
        raise line.error("id", "is missing; give each session a name of its own")
    parts = list(line.parts("requests"))
    own = _requests(parts, block_size, first_id)
    start = own[0].at if own else 0.0
    if own:
        yield TracedSession(name, _from_zero(own))
    for number, part in enumerate(p for p in parts if p.text("type") == SUBAGENT):
        requests = _requests(list(part.parts("requests")), block_size, first_id)
        if requests:
            begins = part.seconds("t") + requests[0].at - start
            yield TracedSession(
                f"{name}/{part.text('agent_id') or 'agent'}-{number}",
                _from_zero(requests),
                parent=name if own else None,
                after_parent=max(0.0, begins),
            )


def _requests(parts: Iterable[Line], block_size: int, first_id: int) -> list[TracedRequest]:
    requests: list[TracedRequest] = []
    before = np.empty(0, dtype=np.int64)
    for part in parts:
        if part.text("type") == SUBAGENT:
            continue
        keep = part.whole("keep")
        if keep > len(before):
            raise part.error("keep", f"must be at most {len(before)}, the blocks of the one before")
        before = np.concatenate((before[:keep], part.runs() + first_id))
        tokens = part.whole("in")
        requests.append(
            TracedRequest(
                part.seconds("t"),
                tokens,
                part.whole("out"),
                part.complete_blocks("runs", before, tokens, block_size),
                stop=part.text("stop"),
                service_seconds=part.maybe_seconds("api_time"),
            )
        )
    return [request for request in requests if request.prompt_tokens]


def _from_zero(requests: Iterable[TracedRequest]) -> tuple[TracedRequest, ...]:
    ordered = by_time(requests)
    return tuple(replace(request, at=request.at - ordered[0].at) for request in ordered)
