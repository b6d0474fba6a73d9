"""What is remembered of contexts that have expired: digests, without effect on any block."""

from array import array
from collections.abc import Sequence

from vllm_agent_hint.sessions.lineage import digests
from vllm_agent_hint.sessions.session import Session


class History:
    """The histories of all sessions together, within a bound; the oldest gives way.

    Args:
        bound: Digests, at most.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._sessions: dict[Session, None] = {}
        """Those that have some, oldest first."""
        self.size = 0

    def remember(self, session: Session, hashes: Sequence[bytes]) -> None:
        """Keep a part of a session's context, tail first."""
        session.history.extend(digests(hashes))
        self.size += len(hashes)
        self._sessions[session] = None
        while self.size > self._bound:
            self.forget(next(iter(self._sessions)))

    def forget(self, session: Session) -> None:
        """Drop a session's history; no-op if it has none."""
        self.size -= len(session.history)
        self._sessions.pop(session, None)
        session.history = array("Q")
