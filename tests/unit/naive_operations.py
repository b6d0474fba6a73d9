"""What became of operations, kept in one plain list and looked through from end to end."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm_agent_hint.hints import EditResult, EditStatus, EditType

NEVER_CAME = "other requests of the same operation never reached this engine"


@dataclass
class Entry:
    name: tuple[str, str]
    edits: list[EditType]
    results: list[EditResult] = field(default_factory=list)
    retention: dict[str, Any] | None = None
    ended_at: float | None = None
    silent_since: float | None = None

    @property
    def kind(self) -> str:
        if self.ended_at is None:
            return "pending"
        return "edited" if self.results else "plain"


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
            known.silent_since = None
            return
        self._remove(known)
        self._add(Entry((tenant, operation_id), edits))

    def fall_silent(self, operation_id: str, tenant: str, now: float) -> None:
        known = self._find(operation_id, tenant)
        if known is not None and known.ended_at is None:
            known.silent_since = now

    def finish(
        self,
        operation_id: str,
        tenant: str,
        results: list[EditResult],
        retention: dict[str, Any] | None,
        now: float,
    ) -> None:
        self._expire(now)
        self._remove(self._find(operation_id, tenant))
        self._add(Entry((tenant, operation_id), [], results, retention, now))

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
        self._expire(now)
        for entry in [e for e in self.entries if e.ended_at is None]:
            self._fail(entry, reason, now)

    def _fail(self, entry: Entry, reason: str, now: float) -> None:
        failed = [EditResult(type=e, status=EditStatus.FAILED, reason=reason) for e in entry.edits]
        self._remove(entry)
        self._add(Entry(entry.name, [], failed, None, now))

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

        silent = [e for e in self.entries if e.silent_since is not None]
        for entry in sorted(silent, key=lambda e: e.silent_since or 0.0):
            if (entry.silent_since or 0.0) + self.kept_seconds <= now:
                self._fail(entry, NEVER_CAME, now)

    def _add(self, entry: Entry) -> None:
        """Above the bound the oldest of the kind goes, of the tenant that has most of it."""
        self.entries.append(entry)
        kind = [e for e in self.entries if e.kind == entry.kind]
        if len(kind) > self.max_operations:
            of_tenants = Counter(e.name[0] for e in kind)
            most = max(of_tenants.values())
            tenants = {tenant for tenant, number in of_tenants.items() if number == most}
            if entry.name[0] in tenants:
                tenants = {entry.name[0]}
            self.entries.remove(next(e for e in kind if e.name[0] in tenants))
