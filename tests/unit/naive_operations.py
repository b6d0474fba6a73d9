"""What became of operations, kept in one plain list and looked through from end to end."""

from dataclasses import dataclass, field
from typing import Any

from vllm_agent_hint.hints import EditResult, EditStatus, EditType


@dataclass
class Entry:
    name: tuple[str, str]
    edits: list[EditType]
    results: list[EditResult] = field(default_factory=list)
    retention: dict[str, Any] | None = None
    ended_at: float | None = None


class NaiveOperations:
    """The specification of ``OperationStore``."""

    def __init__(self, kept_seconds: float, max_operations: int) -> None:
        self.kept_seconds = kept_seconds
        self.max_operations = max_operations
        self.entries: list[Entry] = []
        """In the order in which they came to be pending or ended."""

    def open(self, operation_id: str, tenant: str, edits: list[EditType]) -> None:
        known = self._find(operation_id, tenant)
        if known is not None and known.ended_at is None:
            return
        self._remove(known)
        self.entries.append(Entry((tenant, operation_id), edits))
        self._keep_the_last([e for e in self.entries if e.ended_at is None])

    def finish(
        self,
        operation_id: str,
        tenant: str,
        results: list[EditResult],
        retention: dict[str, Any] | None,
        now: float,
    ) -> None:
        self._remove(self._find(operation_id, tenant))
        self.entries.append(Entry((tenant, operation_id), [], results, retention, now))
        self._expire(now)
        self._keep_the_last([e for e in self.entries if e.ended_at is not None])

    def get(
        self, operation_id: str, tenant: str, now: float
    ) -> tuple[bool, list[EditResult], dict[str, Any] | None] | None:
        self._expire(now)
        known = self._find(operation_id, tenant)
        if known is None:
            return None
        if known.ended_at is None:
            pending = [EditResult(type=e, status=EditStatus.PENDING) for e in known.edits]
            return True, pending, None
        return False, known.results, known.retention

    def abandon(self, reason: str, now: float) -> None:
        for entry in [e for e in self.entries if e.ended_at is None]:
            failed = [
                EditResult(type=e, status=EditStatus.FAILED, reason=reason) for e in entry.edits
            ]
            self.finish(entry.name[1], entry.name[0], failed, None, now)

    def _find(self, operation_id: str, tenant: str) -> Entry | None:
        found = [e for e in self.entries if e.name == (tenant, operation_id)]
        return found[0] if found else None

    def _remove(self, entry: Entry | None) -> None:
        if entry is not None:
            self.entries.remove(entry)

    def _expire(self, now: float) -> None:
        self.entries = [
            e for e in self.entries if e.ended_at is None or e.ended_at + self.kept_seconds > now
        ]

    def _keep_the_last(self, kind: list[Entry]) -> None:
        for entry in kind[: -self.max_operations]:
            self.entries.remove(entry)
