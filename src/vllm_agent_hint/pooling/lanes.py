"""Operations of one session one after the other, those of different sessions side by side."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_agent_hint.pooling.capability import Operation, OperationHandle, Outcome
from vllm_agent_hint.sessions.intent import SessionKey

Start = Callable[[], OperationHandle]
"""Begins an operation; it never raises, since it may be called in anybody's stack."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """An operation that has not begun. ``start`` may hold prompts: nobody keeps it afterwards."""

    kind: Operation
    start: Start
    handle: OperationHandle


@dataclass(eq=False, slots=True)
class _Lane:
    """The operations of one session.

    Args:
        waiting: Those that have not begun, first to last.
        is_busy: Whether one has begun and is not over.
        is_moving: Whether somebody up the stack goes through it: a thousand that end at once are
            a loop and no recursion.
    """

    waiting: deque[_Waiting] = field(default_factory=deque)
    is_busy: bool = False
    is_moving: bool = False


class Lanes:
    """A session's operations wait for each other. O(1) each."""

    def __init__(self) -> None:
        self._lanes: dict[SessionKey, _Lane] = {}
        self._num_waiting: Counter[Operation] = Counter()

    def __len__(self) -> int:
        """Operations that are not over."""
        return sum(len(lane.waiting) + lane.is_busy for lane in self._lanes.values())

    def num_waiting(self, kind: Operation) -> int:
        """Operations of a kind that have not begun."""
        return self._num_waiting[kind]

    def run(self, session: SessionKey, kind: Operation, start: Start) -> OperationHandle:
        """Start an operation, at once or after those that the session has asked for before."""
        handle = OperationHandle()
        lane = self._lanes.setdefault(session, _Lane())
        lane.waiting.append(_Waiting(kind, start, handle))
        self._num_waiting[kind] += 1
        self._move(session, lane)
        return handle

    def refuse_waiting(
        self, session: SessionKey, outcome: Outcome, kind: Operation | None = None
    ) -> None:
        """Let what a session has asked for and has not begun never begin.

        Args:
            session: Whose.
            outcome: How it ends instead.
            kind: Of that kind only; None for all.
        """
        lane = self._lanes.get(session)
        if lane is None:
            return
        refused = [one for one in lane.waiting if kind in (None, one.kind)]
        lane.waiting = deque(one for one in lane.waiting if kind not in (None, one.kind))
        self._num_waiting.subtract(one.kind for one in refused)
        for one in refused:
            one.handle.finish(outcome)

    def refuse_all_waiting(self, outcome: Outcome, kind: Operation | None = None) -> None:
        """The same of all sessions."""
        for session in list(self._lanes):
            self.refuse_waiting(session, outcome, kind)

    def _move(self, session: SessionKey, lane: _Lane) -> None:
        if lane.is_moving:
            return
        lane.is_moving = True
        while lane.waiting and not lane.is_busy:
            self._begin(session, lane)
        lane.is_moving = False
        if not lane.waiting and not lane.is_busy:
            self._lanes.pop(session, None)

    def _begin(self, session: SessionKey, lane: _Lane) -> None:
        first = lane.waiting.popleft()
        self._num_waiting[first.kind] -= 1
        lane.is_busy = True
        handle = first.handle
        first.start().when_done(lambda outcome: self._is_over(session, lane, handle, outcome))

    def _is_over(
        self, session: SessionKey, lane: _Lane, handle: OperationHandle, outcome: Outcome
    ) -> None:
        lane.is_busy = False
        # Whoever it calls back may ask for more, which goes behind what waits.
        was_moving, lane.is_moving = lane.is_moving, True
        handle.finish(outcome)
        lane.is_moving = was_moving
        self._move(session, lane)
