"""Operations of one session one after the other, those of different sessions side by side."""

from collections import deque
from collections.abc import Callable

from vllm_agent_hint.pooling.capability import OperationHandle, Outcome
from vllm_agent_hint.sessions.intent import SessionKey

Start = Callable[[], OperationHandle]


class Lanes:
    """A session's operations wait for each other. O(1) each."""

    def __init__(self) -> None:
        self._lanes: dict[SessionKey, deque[tuple[Start, OperationHandle]]] = {}
        """The first of each lane is under way."""

    def __len__(self) -> int:
        """Operations that are not over."""
        return sum(map(len, self._lanes.values()))

    def run(self, session: SessionKey, start: Start) -> OperationHandle:
        """Start an operation, at once or after those that the session has asked for before."""
        outer = OperationHandle()
        lane = self._lanes.setdefault(session, deque())
        lane.append((start, outer))
        if len(lane) == 1:
            self._start_first(session)
        return outer

    def _start_first(self, session: SessionKey) -> None:
        start, outer = self._lanes[session][0]

        def over(outcome: Outcome) -> None:
            lane = self._lanes[session]
            lane.popleft()
            if not lane:
                del self._lanes[session]
            outer.finish(outcome)
            # What it has called back may have started another one in an empty lane.
            if lane and self._lanes.get(session) is lane:
                self._start_first(session)

        start().when_done(over)
