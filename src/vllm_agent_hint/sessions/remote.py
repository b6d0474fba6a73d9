"""What the session core asks of those who can keep a context elsewhere."""

from collections.abc import Callable
from typing import Protocol

from vllm_agent_hint.hints import EditResult, EditStatus
from vllm_agent_hint.sessions.intent import Edit, SessionKey


class RemoteKV(Protocol):
    """A KV connector, seen from the session core. ``engine.remote`` is one."""

    def transfer(self, key: SessionKey, edit: Edit, done: Callable[[EditResult], None]) -> None:
        """Run an ``offload`` or a ``prefetch``; ``done`` gets the result, now or later."""

    def evict(
        self, key: SessionKey, edit: Edit, done: Callable[[EditResult], None]
    ) -> Callable[[EditResult], None]:
        """Begin to end what an ``evict`` finds elsewhere.

        Returns:
            Takes the result of the local part; ``done`` gets that of both once both are there.
        """

    def session_ended(self, key: SessionKey) -> None:
        """Nobody wants what the session has anywhere."""

    def keeps(self, key: SessionKey, now: float) -> bool:
        """Whether something of the session lies elsewhere and is still to be kept."""


class NoRemote:
    """Nobody keeps anything elsewhere.

    Args:
        reason: Why not, for those who ask for it.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def transfer(self, key: SessionKey, edit: Edit, done: Callable[[EditResult], None]) -> None:
        """See ``RemoteKV``: unsupported, with the reason."""
        done(EditResult(type=edit.type, status=EditStatus.UNSUPPORTED, reason=self._reason))

    def evict(
        self, key: SessionKey, edit: Edit, done: Callable[[EditResult], None]
    ) -> Callable[[EditResult], None]:
        """See ``RemoteKV``: the local part is all of it."""
        return done

    def session_ended(self, key: SessionKey) -> None:
        """See ``RemoteKV``."""

    def keeps(self, key: SessionKey, now: float) -> bool:
        """See ``RemoteKV``."""
        return False
