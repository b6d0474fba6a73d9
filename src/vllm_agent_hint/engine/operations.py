"""What became of operations, for those who ask at ``/v1/agent_hint/operations``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from vllm_agent_hint.engine.shelf import Key, Shelf
from vllm_agent_hint.hints import EditResult, EditStatus, EditType

KEPT_SECONDS: Final = 600.0
_NEVER_CAME: Final = "other requests of the same operation never reached this engine"


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


class _Ended(NamedTuple):
    """When an operation is forgotten, and its outcome: JSON, since objects for it would be many
    and are hardly ever asked for."""

    forgotten_at: float
    outcome: bytes


class OperationStore:
    """Operations that are pending, and for a while those that have ended.

    An operation is known from the moment when the engine learns of it, which is before a client
    can learn its id. It belongs to one tenant: to any other it is as unknown as one that never
    was. All methods are O(1), amortised over the operations that they drop, and none reads a
    clock: ``now`` is monotonic seconds and never goes back.

    Pending ones, ended ones with edits, and ended ones without (ordinary requests, of which there
    are many) are bounded apart, so that none of the three crowds out another.

    Args:
        max_operations: Bound on each of the three. Above it the oldest of the tenant that has
            most is forgotten.
        kept_seconds: How long an operation is kept after its end, or pending after anything was
            last heard of it.
    """

    def __init__(self, *, max_operations: int, kept_seconds: float = KEPT_SECONDS) -> None:
        self._kept_seconds = kept_seconds
        self._pending: Shelf[tuple[EditType, ...]] = Shelf(max_operations)
        self._silent: dict[Key, float] = {}
        """When each of the pending ones of which nothing is alive is given up, soonest first."""
        self._edited: Shelf[_Ended] = Shelf(max_operations)
        self._plain: Shelf[_Ended] = Shelf(max_operations)

    def __len__(self) -> int:
        return len(self._pending) + len(self._edited) + len(self._plain)

    def open(self, operation_id: str, tenant: str, edits: Sequence[EditType] = ()) -> None:
        """An operation has begun, or goes on: one of the siblings of an HTTP request is there.

        Args:
            operation_id: As the front end has minted it.
            tenant: Whose it is.
            edits: What it will answer for.
        """
        key = (tenant, operation_id)
        self._silent.pop(key, None)
        if key in self._pending:
            return
        self._edited.drop(key)
        self._plain.drop(key)
        crowded_out = self._pending.put(key, tuple(edits))
        if crowded_out is not None:
            self._silent.pop(crowded_out, None)

    def fall_silent(self, operation_id: str, tenant: str, now: float) -> None:
        """Nothing of a pending operation is alive here: it fails if nothing is heard of it."""
        key = (tenant, operation_id)
        if key in self._pending:
            self._silent.pop(key, None)
            self._silent[key] = now + self._kept_seconds

    def finish(
        self,
        operation_id: str,
        tenant: str,
        results: Sequence[EditResult],
        retention: Mapping[str, Any] | None,
        now: float,
    ) -> None:
        """An operation has ended, whether it was opened or not. The last end counts."""
        self._forget_old(now)
        self._put((tenant, operation_id), Operation(False, tuple(results), retention), now)

    def get(self, operation_id: str, tenant: str, now: float) -> Operation | None:
        """An operation of this tenant; None if it has none of that id, or has it no longer."""
        self._forget_old(now)
        key = (tenant, operation_id)
        edits = self._pending.get(key)
        if edits is not None:
            return Operation(True, _same_for_all(edits, EditStatus.PENDING))
        ended = self._edited.get(key) or self._plain.get(key)
        if ended is None:
            return None
        plain = json.loads(ended.outcome)
        return Operation(
            False,
            tuple(EditResult.model_validate(result) for result in plain["results"]),
            plain["retention"],
        )

    def abandon(self, reason: str, now: float) -> None:
        """Nothing that is pending will come to its end any more. O(pending)."""
        self._forget_old(now)
        for key in list(self._pending):
            self._fail(key, reason, now)

    def _fail(self, key: Key, reason: str, now: float) -> None:
        failed = _same_for_all(self._pending.get(key) or (), EditStatus.FAILED, reason)
        self._put(key, Operation(False, failed), now)

    def _put(self, key: Key, operation: Operation, now: float) -> None:
        for shelf in (self._pending, self._edited, self._plain):
            shelf.drop(key)
        self._silent.pop(key, None)
        shelf = self._edited if operation.results else self._plain
        outcome = json.dumps(operation.as_plain()).encode()
        shelf.put(key, _Ended(now + self._kept_seconds, outcome))

    def _forget_old(self, now: float) -> None:
        for shelf in (self._edited, self._plain):
            while (oldest := next(iter(shelf), None)) is not None:
                ended = shelf.get(oldest)
                if ended is None or ended.forgotten_at > now:
                    break
                shelf.drop(oldest)
        while self._silent:
            key, given_up_at = next(iter(self._silent.items()))
            if given_up_at > now:
                return
            self._fail(key, _NEVER_CAME, now)


def _same_for_all(
    edits: Sequence[EditType], status: EditStatus, reason: str = ""
) -> tuple[EditResult, ...]:
    return tuple(EditResult(type=edit, status=status, reason=reason) for edit in edits)
