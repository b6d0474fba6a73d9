"""Sessions that are expected back: their contexts are brought shortly before."""

import heapq
import itertools
import math
from typing import Final

from vllm_agent_hint.sessions.intent import SessionKey

MARGIN_SECONDS: Final = 1.0
"""Between the expected end of a load and the expected resume."""


class Resumes:
    """When to begin to load for whom. O(log sessions) each; one expectation per session."""

    def __init__(self) -> None:
        self._serial = itertools.count()
        self._heap: list[tuple[float, int, SessionKey]] = []
        self._current: dict[SessionKey, int] = {}
        self._tokens_per_second = 0.0

    def __len__(self) -> int:
        return len(self._current)

    @property
    def next_at(self) -> float:
        """When the next load is to begin; infinity if none is."""
        self._forget_outdated()
        return self._heap[0][0] if self._heap else math.inf

    def note_load(self, tokens: int, seconds: float) -> None:
        """A load has ended: the next ones will take about as long."""
        if tokens and seconds > 0:
            before = self._tokens_per_second or tokens / seconds
            self._tokens_per_second = 0.7 * before + 0.3 * tokens / seconds

    def expect(self, session: SessionKey, tokens: int, now: float, seconds: float) -> None:
        """A session has said that it will be back in about so many seconds.

        Args:
            session: Which.
            tokens: To be loaded for it, at most.
            now: Monotonic seconds.
            seconds: Until it is back.
        """
        takes = tokens / self._tokens_per_second if self._tokens_per_second else seconds / 4
        begin = now + max(0.0, seconds - 2 * takes - MARGIN_SECONDS)
        serial = next(self._serial)
        self._current[session] = serial
        heapq.heappush(self._heap, (begin, serial, session))

    def forget(self, session: SessionKey) -> None:
        """The session is back, or will not be."""
        self._current.pop(session, None)

    def take_due(self, now: float) -> list[SessionKey]:
        """Those whose load is to begin by now; each is named once."""
        due: list[SessionKey] = []
        while self.next_at <= now:
            _, _, session = heapq.heappop(self._heap)
            del self._current[session]
            due.append(session)
        return due

    def _forget_outdated(self) -> None:
        while self._heap and self._current.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
