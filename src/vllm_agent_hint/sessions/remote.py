"""What the session core asks of those who can keep a context elsewhere."""

from collections.abc import Callable
from typing import Protocol

from vllm_agent_hint.hints import EditResult
from vllm_agent_hint.sessions.intent import Edit, SessionKey


class RemoteKV(Protocol):
    """A KV connector, seen from the session core. ``engine.remote`` is one."""

    def transfer(self, key: SessionKey, edit: Edit, done: Callable[[EditResult], None]) -> None:
        """Run an ``offload`` or a ``prefetch``; ``done`` gets the result, now or later."""

    def evict(
        self, key: SessionKey, edit: Edit, local: EditResult, done: Callable[[EditResult], None]
    ) -> None:
        """An ``evict`` has ended what is local; end what lies elsewhere, and say both."""

    def session_ended(self, key: SessionKey) -> None:
        """Nobody wants what the session has anywhere."""

    def keeps(self, key: SessionKey, now: float) -> bool:
        """Whether something of the session lies elsewhere and is still to be kept."""
