"""Traces made by hand, for the replay."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_agent_hint.traces.model import Trace, TracedRequest, TracedSession

BLOCK = 16

Prompt = Sequence[int]
"""Content of each complete block."""


class Traces:
    """Makes traces whose chain ids are prefix-exact."""

    def __init__(self, block_size: int = BLOCK) -> None:
        self.block_size = block_size
        self._ids: dict[tuple[int, ...], int] = {}

    def request(
        self, at: float, prompt: Prompt, *, beyond: int = 1, out: int = 1, **more: Any
    ) -> TracedRequest:
        """A request of complete blocks and ``beyond`` tokens more."""
        content = tuple(prompt)
        ids = [self._ids.setdefault(content[: k + 1], len(self._ids)) for k in range(len(content))]
        tokens = len(ids) * self.block_size + beyond
        return TracedRequest(at, tokens, out, np.array(ids, dtype=np.int64), **more)

    def trace(self, *sessions: TracedSession) -> Trace:
        return Trace("t", self.block_size, sessions)


def session(name: str, start: float | None, *requests: TracedRequest, **more: Any) -> TracedSession:
    return TracedSession(name, requests, start, **more)
