"""What is remembered of contexts that are gone: digests, without effect on any block."""

from array import array
from collections.abc import Sequence

from vllm_agent_hint.sessions.continuation import Prompt
from vllm_agent_hint.sessions.lineage import DIGEST_BYTES, digests
from vllm_agent_hint.sessions.session import Session, SupersededTail

MAX_SUPERSEDED_TAILS = 4
"""Per session; the oldest gives way."""


class History:
    """The histories of all sessions together, within a bound; the oldest gives way.

    Args:
        bound: Digests, at most.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._sessions: dict[Session, None] = {}
        """Those that have some, the one that was added to longest ago first."""
        self.size = 0

    def remember(self, session: Session, hashes: Sequence[bytes]) -> None:
        """Keep a part of a session's expired context, tail first."""
        if hashes:
            session.history.extend(digests(hashes))
            self._grow(session, len(hashes))

    def supersede(self, session: Session, group: int, first: int, hashes: Sequence[bytes]) -> None:
        """Keep what a turn has replaced.

        Args:
            session: Whose.
            group: KV cache group.
            first: Logical index of the first block.
            hashes: First to last.
        """
        if not hashes or session.is_freed:
            return
        session.superseded.append(SupersededTail(group, first, digests(hashes)))
        if len(session.superseded) > MAX_SUPERSEDED_TAILS:
            self.size -= len(session.superseded.pop(0).digests)
        self._grow(session, len(hashes))

    def asked_again(self, session: Session, prompt: Prompt) -> list[tuple[int, int]]:
        """What a prompt contains of the superseded tails; each block is named once.

        Returns:
            ``(KV cache group, blocks)`` of each tail that it contains a part of.
        """
        found: list[tuple[int, int]] = []
        for tail in session.superseded:
            asked = digests(prompt[tail.group][tail.first :][: len(tail.digests)])
            common = 0
            for mine, theirs in zip(tail.digests, asked, strict=False):
                if mine != theirs:
                    break
                common += 1
            if common:
                found.append((tail.group, common))
                del tail.digests[:common]
                tail.first += common
                self.size -= common
        return found

    def forget(self, session: Session) -> None:
        """Drop a session's expired context; no-op if it has none."""
        self.size -= len(session.history)
        session.history = array("Q")
        if not session.superseded:
            self._sessions.pop(session, None)

    def forget_all(self, session: Session) -> None:
        """Drop what is remembered of a session, what was superseded included."""
        self.size -= sum(len(tail.digests) for tail in session.superseded)
        session.superseded = []
        self.forget(session)

    def _grow(self, session: Session, added: int) -> None:
        self.size += added
        self._sessions.pop(session, None)
        self._sessions[session] = None
        while self.size > self._bound:
            self.forget_all(next(iter(self._sessions)))


assert array("Q").itemsize == DIGEST_BYTES
