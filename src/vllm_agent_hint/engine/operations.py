"""What became of operations, for those who ask at ``/v1/agent_hint/operations``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_agent_hint.hints import EditResult, EditStatus, EditType

KEPT_SECONDS: Final = 600.0
MAX_OPERATIONS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation as far as it has come.

    Args:
        is_pending: Whether it has not ended. Its results then say ``pending``.
        results: One per edit, in the order of the edits.
        retention: What is kept of the request's context; None where nothing was asked for, or the
            operation was no request.
    """

    is_pending: bool
    results: tuple[EditResult, ...] = ()
    retention: Mapping[str, Any] | None = None

    def as_plain(self) -> dict[str, Any]:
        """For msgpack and JSON."""
        return {
            "status": "pending" if self.is_pending else "done",
            "results": [result.model_dump(mode="json") for result in self.results],
            "retention": None if self.retention is None else dict(self.retention),
        }


_Key = tuple[str, str]


class OperationStore:
    """Operations that are pending, and for a while those that have ended.

    An operation is known from the moment when the engine learns of it, which is before a client
    can learn its id. It belongs to one tenant: to any other it is as unknown as one that never
    was. All methods are O(1), amortised over the operations that they drop, and none reads a
    clock: ``now`` is monotonic seconds and never goes back.

    Args:
        kept_seconds: How long after its end an operation is kept.
        max_operations: Bound on the pending ones, and on those that have ended. Above it the
            oldest of them is forgotten.
    """

    def __init__(
        self, *, kept_seconds: float = KEPT_SECONDS, max_operations: int = MAX_OPERATIONS
    ) -> None:
        self._kept_seconds = kept_seconds
        self._max_operations = max_operations
        self._pending: dict[_Key, tuple[EditType, ...]] = {}
        self._ended: dict[_Key, tuple[float, bytes]] = {}
        """When each is forgotten, soonest first, and its outcome: JSON, since objects for it
        would be many and are hardly ever asked for."""

    def __len__(self) -> int:
        return len(self._pending) + len(self._ended)

    def open(self, operation_id: str, tenant: str, edits: Sequence[EditType] = ()) -> None:
        """An operation has begun. No-op for one that is pending: siblings of one HTTP request.

        Args:
            operation_id: As the front end has minted it.
            tenant: Whose it is.
            edits: What it will answer for.
        """
        key = (tenant, operation_id)
        if key in self._pending:
            return
        self._ended.pop(key, None)
        self._pending[key] = tuple(edits)
        _drop_oldest(self._pending, self._max_operations)

    def finish(
        self,
        operation_id: str,
        tenant: str,
        results: Sequence[EditResult],
        retention: Mapping[str, Any] | None,
        now: float,
    ) -> None:
        """An operation has ended, whether it was opened or not. The last end counts."""
        key = (tenant, operation_id)
        self._pending.pop(key, None)
        self._ended.pop(key, None)
        plain = Operation(False, tuple(results), retention).as_plain()
        self._ended[key] = (now + self._kept_seconds, json.dumps(plain).encode())
        self._forget_old(now)
        _drop_oldest(self._ended, self._max_operations)

    def get(self, operation_id: str, tenant: str, now: float) -> Operation | None:
        """An operation of this tenant; None if it has none of that id, or has it no longer."""
        self._forget_old(now)
        key = (tenant, operation_id)
        if key in self._pending:
            waiting = [
                EditResult(type=edit, status=EditStatus.PENDING) for edit in self._pending[key]
            ]
            return Operation(True, tuple(waiting))
        if key not in self._ended:
            return None
        plain = json.loads(self._ended[key][1])
        return Operation(
            False,
            tuple(EditResult.model_validate(result) for result in plain["results"]),
            plain["retention"],
        )

    def abandon(self, reason: str, now: float) -> None:
        """Nothing that is pending will come to its end any more. O(pending)."""
        for (tenant, operation_id), edits in list(self._pending.items()):
            failed = [
                EditResult(type=edit, status=EditStatus.FAILED, reason=reason) for edit in edits
            ]
            self.finish(operation_id, tenant, failed, None, now)

    def _forget_old(self, now: float) -> None:
        while self._ended:
            key = next(iter(self._ended))
            if self._ended[key][0] > now:
                return
            del self._ended[key]


def _drop_oldest(entries: dict[_Key, Any], bound: int) -> None:
    while len(entries) > bound:
        del entries[next(iter(entries))]
