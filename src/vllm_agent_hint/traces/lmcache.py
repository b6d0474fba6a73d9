"""LMCache's agent traces, as hashed for ``shared/traces``: rows of sessions by time.

The sessions were recorded one after another, so their times say nothing of each other: overlap is
imposed. Rows without a prompt (the recorder's failures) are left out.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from vllm_agent_hint.traces.line import Line
from vllm_agent_hint.traces.model import Trace, TracedRequest, TracedSession, by_time

BLOCK_SIZE: Final = 16


def read_lmcache(name: str, lines: Iterable[Line]) -> Trace:
    """See the module.

    Raises:
        TraceError: A line isn't as it should be.
    """
    sessions: dict[str, list[TracedRequest]] = {}
    for line in lines:
        session = line.text("s")
        if not session:
            raise line.error("s", "is missing; name the session")
        tokens = line.whole("in")
        request = TracedRequest(
            line.seconds("t"),
            tokens,
            line.whole("out"),
            line.complete_blocks("runs", line.runs(), tokens, BLOCK_SIZE),
        )
        if tokens:
            sessions.setdefault(session, []).append(request)
    return Trace(
        name,
        BLOCK_SIZE,
        tuple(TracedSession(each, _from_zero(requests)) for each, requests in sessions.items()),
    )


def _from_zero(requests: Iterable[TracedRequest]) -> tuple[TracedRequest, ...]:
    ordered = by_time(requests)
    return tuple(replace(request, at=request.at - ordered[0].at) for request in ordered)
