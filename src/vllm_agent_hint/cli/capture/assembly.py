"""Makes a trace of what a server hands out: in the order of arrival, with numbers for digests."""

import base64
import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import numpy as np

from vllm_agent_hint.traces.model import ChainIds, TracedRequest
from vllm_agent_hint.traces.plain import PlainWriter

MAX_SESSIONS: Final = 100_000
"""Sessions whose last prompt is remembered, to write only what the next one adds."""

_STOPS: Final = {
    "tool_call": "tool_use",
    "final_message": "end_turn",
    "cut": "",
    "disconnected": "",
    "length": "",
    "abort": "",
    "error": "",
}
"""As a trace says it. A regular end of which no more is known has none."""


@dataclass(slots=True)
class CaptureTotals:
    """What has been written, and what has not."""

    requests: int = 0
    hinted: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    sessions: int = 0
    dropped: int = 0
    unfinished: int = 0


class TraceAssembly:
    """Holds requests back until none can come that arrived earlier.

    Args:
        writer: Of the trace.
    """

    def __init__(self, writer: PlainWriter) -> None:
        self.totals = CaptureTotals()
        self._writer = writer
        self._held: list[tuple[float, int, Mapping[str, Any]]] = []
        self._serial = count()
        self._numbers: dict[int, int] = {}
        """Of each digest that has been written."""
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._seen: set[str] = set()

    def add(self, part: Mapping[str, Any]) -> None:
        """Take in a ``CapturePart``, and write what is settled."""
        for request in part["requests"]:
            heapq.heappush(self._held, (request["t"], next(self._serial), request))
        self.totals.dropped, self.totals.unfinished = part["dropped"], part["unfinished"]
        self._write_before(part["until"])

    def finish(self) -> CaptureTotals:
        """Write what is left: nothing more comes."""
        self._write_before(math.inf)
        return self.totals

    def _write_before(self, until: float) -> None:
        while self._held and self._held[0][0] < until:
            at, _, request = heapq.heappop(self._held)
            self._write(at, request)

    def _write(self, at: float, request: Mapping[str, Any]) -> None:
        traced = TracedRequest(
            at=0.0,
            prompt_tokens=request["prompt_tokens"],
            output_tokens=request["output_tokens"],
            blocks=self._numbered(base64.b64decode(request["blocks"])),
            stop=_STOPS.get(request["ended"] or request["finish"]),
            tool=request["tool"],
            service_seconds=round(request["seconds"], 6),
            is_hinted=request["hinted"],
        )
        session = request["session"]
        self._writer.write(round(at, 6), traced, session=session, parent=request["parent"])
        self._count(traced, session)

    def _numbered(self, digests: bytes) -> ChainIds:
        """Consecutive numbers, in the order in which the digests are first seen."""
        numbers = self._numbers
        return np.fromiter(
            (
                numbers.setdefault(digest, len(numbers))
                for digest in np.frombuffer(digests, dtype="<u8").tolist()
            ),
            dtype=np.int64,
        )

    def _count(self, traced: TracedRequest, session: str | None) -> None:
        totals = self.totals
        totals.requests += 1
        totals.hinted += bool(traced.is_hinted)
        totals.prompt_tokens += traced.prompt_tokens
        totals.output_tokens += traced.output_tokens
        if session is None:
            return
        self._seen.add(session)
        totals.sessions = len(self._seen)
        self._recent[session] = None
        self._recent.move_to_end(session)
        if len(self._recent) > MAX_SESSIONS:
            self._writer.forget(self._recent.popitem(last=False)[0])
