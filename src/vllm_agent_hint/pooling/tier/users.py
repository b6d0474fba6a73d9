"""Whose a chunk is: what one session alone has brought and used may be deleted with it."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from enum import Enum, auto
from typing import Final


class OwnRequest(Enum):
    """In place of a session: a request of ours, made for sessions that have registered it all."""

    TRANSFER = auto()


User = Hashable | None
"""A session; None for a request that belongs to none."""

_MAX_KEYS: Final = 1 << 20


class SoleUsers:
    """Chunks that one session has brought and nobody else has asked for since.

    What is not in here is taken to be everybody's: what requests without a session have stored,
    what was there before this server, and what it has forgotten above its bound.

    Args:
        max_keys: The bound; what was brought longest ago is forgotten first.
    """

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._users: OrderedDict[bytes, Hashable] = OrderedDict()

    def __len__(self) -> int:
        return len(self._users)

    def __contains__(self, key: bytes) -> bool:
        return key in self._users

    def brought(self, keys: Iterable[bytes], user: User) -> None:
        """Chunks come into the tier."""
        if user is None:
            return
        for key in keys:
            self._users[key] = user
        while len(self._users) > self._max_keys:
            self._users.popitem(last=False)

    def used(self, keys: Iterable[bytes], user: User) -> None:
        """A request has asked for chunks, or would have stored them if they were not there.

        What an offload has brought is the first session's that comes for it.
        """
        users = self._users
        if user is OwnRequest.TRANSFER or not users:
            return
        # Of thousands of keys the session's own are told at once: it is always the same object.
        owned = [(key, owner) for key in keys if (owner := users.get(key, user)) is not user]
        for key, owner in owned:
            if owner is OwnRequest.TRANSFER and user is not None:
                users[key] = user
            elif owner != user:
                del users[key]

    def is_alone(self, key: bytes, session: Hashable) -> bool:
        """Whether nobody but a session has a use for a chunk.

        Args:
            key: Of the chunk.
            session: The only one that has it registered.
        """
        owner = self._users.get(key)
        return owner is OwnRequest.TRANSFER or (owner is not None and owner == session)

    def forget(self, key: bytes) -> None:
        """A chunk is gone, or its session."""
        self._users.pop(key, None)

    def clear(self) -> None:
        """All chunks are gone."""
        self._users.clear()
