"""A bounded store that several tenants share: what is too much is taken from who has most."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")

Key = tuple[str, str]
"""Tenant, and a name that is its own."""


class Shelf(Generic[Value]):
    """Entries in the order in which they were put there.

    Above the bound the oldest entry of the tenant that has most is dropped (among equals: of the
    last that came to have so many), so that no tenant can flush what another, which has no more,
    wants to keep. All methods are O(1).

    Args:
        bound: Entries of all tenants together.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._entries: dict[Key, Value] = {}
        self._names: dict[str, dict[str, None]] = {}
        """Of each tenant, oldest first."""
        self._tenants_with: defaultdict[int, dict[str, None]] = defaultdict(dict)
        """Tenants by how many entries they have, to find who has most."""
        self._most = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        """Oldest first."""
        return iter(self._entries)

    def get(self, key: Key) -> Value | None:
        return self._entries.get(key)

    def put(self, key: Key, value: Value) -> Key | None:
        """Add an entry as the youngest, in place of one of the same key.

        Returns:
            Which one it has crowded out, if any.
        """
        self.drop(key)
        self._entries[key] = value
        self._count(key[0], +1, key[1])
        if len(self._entries) <= self._bound:
            return None
        tenant = next(reversed(self._tenants_with[self._most]))
        oldest = tenant, next(iter(self._names[tenant]))
        self.drop(oldest)
        return oldest

    def drop(self, key: Key) -> None:
        """No-op for what is not there."""
        if self._entries.pop(key, None) is not None:
            self._count(key[0], -1, key[1])

    def _count(self, tenant: str, change: int, name: str) -> None:
        names = self._names.setdefault(tenant, {})
        self._tenants_with[len(names)].pop(tenant, None)
        if not self._tenants_with[len(names)]:
            del self._tenants_with[len(names)]
        if change > 0:
            names[name] = None
        else:
            del names[name]
        if names:
            self._tenants_with[len(names)][tenant] = None
        else:
            del self._names[tenant]
        # One entry more or less: nobody else can have come to have most.
        if len(names) > self._most or self._most not in self._tenants_with:
            self._most = len(names)
