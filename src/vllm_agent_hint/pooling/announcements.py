"""What a store is told of sessions: who wants its content; for other servers, what is whose."""

from collections.abc import Sequence

from vllm_agent_hint.pooling.books import Books
from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.sessions.intent import SessionKey


class Announcements:
    """Tells the store what has changed.

    Args:
        books: Shared with the rooms beside this one.
    """

    def __init__(self, books: Books) -> None:
        self._books = books

    def claim(
        self, session: SessionKey, claim: Claim, fresh: Sequence[bytes] | None = None
    ) -> None:
        """Say who wants a session's content.

        Args:
            session: Whose.
            claim: Of all of it.
            fresh: All that the store has not been told of; None for everything.
        """
        found = self._books.tracker.get(session)
        if found is None:
            return
        if fresh is not None and found.claim is claim:
            self._books.store.claim(fresh, claim)
            return
        found.claim = claim
        for content in found.contents:
            self._books.store.claim(content.hashes, claim)

    def end_protection(self, session: SessionKey) -> None:
        """A session's time is over: what it shares with others is theirs to speak for."""
        found = self._books.tracker.get(session)
        if found is not None and found.claim is not Claim.ORDINARY:
            found.claim = Claim.ORDINARY
            self._books.store.claim(self._books.tracker.owned_alone(session), Claim.ORDINARY)

    def let_go(self, orphans: Sequence[bytes]) -> None:
        """Nobody wants these any more."""
        if orphans:
            self._books.counters.orphaned_keys += len(orphans)
            self._books.store.claim(orphans, Claim.DEAD)

    def note_in_manifest(self, session: SessionKey) -> None:
        """Tell other servers what a session has; nothing, if it has nothing registered."""
        found = self._books.tracker.get(session)
        if found is not None:
            ttl = max(0.0, found.keep_until - self._books.now)
            self._books.store.write_page(session, found.contents, ttl)
