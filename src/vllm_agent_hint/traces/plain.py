"""Our own format, for those who write traces themselves; see ``docs/traces.md``."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, TextIO

import numpy as np

from vllm_agent_hint.traces.inference import infer_sessions
from vllm_agent_hint.traces.line import Line
from vllm_agent_hint.traces.model import (
    ChainIds,
    Trace,
    TracedRequest,
    TracedSession,
    common_blocks,
    runs_of,
)

FORMAT: Final = "vllm-agent-hint-trace"
VERSION: Final = 1
NOTHING: Final = np.empty(0, dtype=np.int64)


class PlainWriter:
    """Writes a trace line by line, in the order of arrival.

    Args:
        file: Open for writing text.
        block_size: Tokens in a block.
    """

    def __init__(self, file: TextIO, block_size: int) -> None:
        self._file = file
        self._block_size = block_size
        self._latest: dict[str, ChainIds] = {}
        """Of each session, the blocks of its last request."""
        self._write({"format": FORMAT, "version": VERSION, "block_size": block_size})

    def write(
        self,
        at: float,
        request: TracedRequest,
        *,
        session: str | None = None,
        parent: str | None = None,
    ) -> None:
        """Add a request.

        Args:
            at: Seconds since the start of the trace; ``request.at`` is not written.
            request: The request.
            session: Its identity; None if it carried none.
            parent: The session that started this one.
        """
        ids = request.blocks
        keep = common_blocks(self._latest.get(session, NOTHING), ids) if session else 0
        if session:
            self._latest[session] = ids
        fields = {
            "t": at,
            "session": session,
            "parent": parent,
            "in": request.prompt_tokens,
            "out": request.output_tokens,
            "keep": keep or None,
            "runs": runs_of(ids[keep:]),
            "stop": request.stop,
            "tool": request.tool,
            "seconds": request.service_seconds,
            "hinted": request.is_hinted,
        }
        self._write({name: value for name, value in fields.items() if value is not None})

    def forget(self, session: str) -> None:
        """A session has ended: what its last request shared is no longer remembered."""
        self._latest.pop(session, None)

    def _write(self, fields: dict[str, object]) -> None:
        self._file.write(json.dumps(fields, separators=(",", ":")) + "\n")


def write_plain(trace: Trace, file: TextIO) -> None:
    """Write a whole trace.

    Raises:
        ValueError: A session has no start: only what was recorded beside what can be written.
    """
    arrivals = []
    for session in trace.sessions:
        if session.starts_at is None:
            raise ValueError(f"session {session.name!r} has no start; impose an overlap first")
        for request in session.requests:
            arrivals.append((session.starts_at + request.at, session, request))
    arrivals.sort(key=lambda arrival: arrival[0])
    writer = PlainWriter(file, trace.block_size)
    for at, session, request in arrivals:
        name = session.name if session.is_named else None
        writer.write(at, request, session=name, parent=session.parent)


def read_plain(name: str, lines: Iterable[Line]) -> Trace:
    """Read the format.

    Raises:
        TraceError: A line isn't as it should be.
    """
    rest = iter(lines)
    header = next(rest)
    if header.values.get("format") != FORMAT:
        raise header.error("format", f"must be {FORMAT!r} in the first line")
    if header.whole("version") != VERSION:
        raise header.error("version", f"must be {VERSION}; a newer version of the tool may read it")
    block_size = header.whole("block_size", minimum=1)
    named: dict[str, list[tuple[float, TracedRequest]]] = {}
    parents: dict[str, str | None] = {}
    nameless: list[tuple[float, TracedRequest]] = []
    for line in rest:
        at, session = line.seconds("t"), line.text("session")
        arrivals = nameless if session is None else named.setdefault(session, [])
        before = arrivals[-1][1].blocks if session is not None and arrivals else NOTHING
        request = _request(line, before, block_size)
        arrivals.append((at, request))
        if session is not None:
            parent = line.text("parent")
            if parent == session:
                raise line.error("parent", "must differ from session")
            parents[session] = parents.get(session) or parent
    sessions = [
        TracedSession(
            session,
            _from_zero(arrivals),
            starts_at=min(at for at, _ in arrivals),
            parent=parents[session],
        )
        for session, arrivals in named.items()
    ]
    nameless.sort(key=lambda arrival: arrival[0])
    sessions += infer_sessions(nameless)
    return Trace(name, block_size, tuple(sessions))


def _request(line: Line, before: ChainIds, block_size: int) -> TracedRequest:
    keep = line.whole("keep", default=0)
    if keep > len(before):
        raise line.error(
            "keep",
            f"must be at most {len(before)}, the complete blocks of the session's request before",
        )
    tokens = line.whole("in", minimum=1)
    ids = np.concatenate((before[:keep], line.runs()))
    return TracedRequest(
        0.0,
        tokens,
        line.whole("out"),
        line.complete_blocks("runs", ids, tokens, block_size),
        stop=line.text("stop"),
        tool=line.text("tool"),
        service_seconds=line.maybe_seconds("seconds"),
        is_hinted=line.flag("hinted"),
    )


def _from_zero(arrivals: list[tuple[float, TracedRequest]]) -> tuple[TracedRequest, ...]:
    ordered = sorted(arrivals, key=lambda arrival: arrival[0])
    return tuple(replace(request, at=at - ordered[0][0]) for at, request in ordered)
