"""Operations of one session one after the other, those of different sessions side by side."""

from collections import deque
from collections.abc import Callable

from vllm_agent_hint.pooling.capability import OperationHandle, Outcome
from vllm_agent_hint.sessions.intent import SessionKey

Start = Callable[[], OperationHandle]


class _Lane:
    """The operations of one session; the first is under way, or about to be."""

    __slots__ = ("is_moving", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[Start, OperationHandle]] = deque()
        self.is_moving = False
        """Whether somebody up the stack goes through it: a thousand that end at once are a loop
        and no recursion."""


class Lanes:
    """A session's operations wait for each other. O(1) each."""

    def __init__(self) -> None:
        self._lanes: dict[SessionKey, _Lane] = {}

    def __len__(self) -> int:
        """Operations that are not over."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    def run(self, session: SessionKey, start: Start) -> OperationHandle:
        """Start an operation, at once or after those that the session has asked for before."""
        handle = OperationHandle()
        lane = self._lanes.setdefault(session, _Lane())
        lane.waiting.append((start, handle))
        if len(lane.waiting) == 1:
            self._move(session, lane)
        return handle

    def _move(self, session: SessionKey, lane: _Lane) -> None:
        if lane.is_moving:
            return
        lane.is_moving = True
        while lane.waiting:
            start, handle = lane.waiting[0]
            inner = start()
            if inner.outcome is None:
                inner.when_done(lambda outcome: self._first_is_over(session, lane, outcome))
                break
            lane.waiting.popleft()
            handle.finish(inner.outcome)
        lane.is_moving = False
        if not lane.waiting:
            self._lanes.pop(session, None)

    def _first_is_over(self, session: SessionKey, lane: _Lane, outcome: Outcome) -> None:
        _, handle = lane.waiting.popleft()
        # Whoever it calls back may ask for more, which goes behind what waits.
        lane.is_moving = True
        handle.finish(outcome)
        lane.is_moving = False
        self._move(session, lane)
