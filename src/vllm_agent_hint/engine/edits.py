"""Operations of ordinary requests: when their edits may run, and what is told of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vllm_agent_hint.engine.operations import OperationStore
from vllm_agent_hint.hints import EditResult, EditType, RetentionResult
from vllm_agent_hint.stamp import Stamp

MAX_WAITING_OPERATIONS: Final = 10_000


@dataclass(slots=True)
class _Operation:
    alive: int = 0
    ended: int = 0
    has_failed: bool = False


class EditOperations:
    """Counts the engine requests that one HTTP request has become (``n > 1``, several prompts).

    Their edits run once, after the last has ended, and only if all have succeeded. Where they may
    be spread over several engines no engine knows how many it will get: each runs the edits as
    soon as none is alive on it, if all that it has had by then have succeeded. One that comes
    later still makes them run again, so that the last to end leaves what the edits say. A request
    without a stamp is one by itself, and nobody can ask for it.

    Args:
        outcomes: Where clients find what became of the edits.
    """

    def __init__(self, outcomes: OperationStore) -> None:
        self._outcomes = outcomes
        self._alive: dict[str, _Operation] = {}
        self._waiting: dict[str, _Operation] = {}
        """None of their requests is alive, and some have not come yet."""

    def request_added(self, stamp: Stamp | None, edits: Sequence[EditType]) -> None:
        """Count one engine request that has arrived, with these edits."""
        if stamp is None:
            return
        self._outcomes.open(stamp.operation_id, stamp.tenant, edits)
        key = stamp.operation_id
        if key not in self._alive:
            known = key in self._waiting
            self._alive[key] = self._waiting.pop(key) if known else _Operation()
        self._alive[key].alive += 1

    def request_ended(self, stamp: Stamp | None, now: float, *, succeeded: bool) -> bool | None:
        """Count one that was added, and is over. What waits for others does so for a while only.

        Args:
            stamp: As the front end made it, or None.
            now: Monotonic seconds.
            succeeded: Whether this request came to a regular end.

        Returns:
            Whether all have succeeded, if this was the last; None if others are still out.
        """
        if stamp is None:
            return succeeded
        key = stamp.operation_id
        entry = self._alive[key]
        entry.alive -= 1
        entry.ended += 1
        entry.has_failed |= not succeeded
        if entry.alive:
            return None
        del self._alive[key]
        if stamp.may_spread or entry.ended >= stamp.engine_requests:
            return not entry.has_failed
        self._waiting[key] = entry
        if len(self._waiting) > MAX_WAITING_OPERATIONS:
            del self._waiting[next(iter(self._waiting))]
        self._outcomes.fall_silent(stamp.operation_id, stamp.tenant, now)
        return None

    def finish(
        self,
        stamp: Stamp | None,
        results: Sequence[EditResult],
        now: float,
        *,
        retention: RetentionResult | None = None,
    ) -> None:
        """Its edits are done, and the context of its request is kept as ``retention`` says."""
        if stamp is not None:
            plain = None if retention is None else retention.model_dump(mode="json")
            self._outcomes.finish(stamp.operation_id, stamp.tenant, results, plain, now)
