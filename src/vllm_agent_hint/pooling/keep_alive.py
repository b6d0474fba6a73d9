"""Keep-alive: a store forgets what nobody uses, so what sessions keep there is used at times."""

import math
from typing import Final

from vllm_agent_hint.pooling.announcements import Announcements
from vllm_agent_hint.pooling.books import Books
from vllm_agent_hint.pooling.capability import Operation
from vllm_agent_hint.pooling.tracker import Origin, Registration
from vllm_agent_hint.sessions.intent import SessionKey

SLICE_HASHES: Final = 4_096
"""Refreshed in one go; the rest follows soon after."""
SLICE_PAUSE_SECONDS: Final = 0.05


class KeepAlive:
    """Rounds through all sessions, a slice at a time.

    Args:
        books: Shared with the rooms beside this one.
        announcements: Tells the store that a session's time is over.
    """

    def __init__(self, books: Books, announcements: Announcements) -> None:
        self._books = books
        self._announcements = announcements
        self._to_come: list[SessionKey] = []
        """Sessions whose turn is still to come in this round."""
        self.next_at = math.inf
        """When ``run`` has something to do next; infinity if nothing is kept."""

    def keeps(self, session: SessionKey, now: float) -> bool:
        """Whether a session has something in the store that is still to be kept."""
        found = self._books.tracker.get(session)
        return found is not None and found.keep_until > now

    def begin(self) -> None:
        """A session has something that is to be kept."""
        if self.next_at == math.inf and not self._books.store.why_not(Operation.KEEP_ALIVE):
            self.next_at = self._books.now + self._books.settings.keep_alive_seconds

    def stop(self) -> None:
        """Keep nothing any more."""
        self.next_at = math.inf

    def run(self, now: float) -> None:
        """Refresh what is due, a slice of it."""
        if now < self.next_at:
            return
        tracker, counters = self._books.tracker, self._books.counters
        if not self._to_come:
            self._to_come = list(tracker)
        budget = SLICE_HASHES
        is_wanted = False
        while self._to_come and budget > 0:
            session = self._to_come.pop()
            found = tracker.get(session)
            if found is None:
                continue
            if found.keep_until <= now:
                self._announcements.end_protection(session)
                self._forget_hearsay(session, found)
                continue
            is_wanted = True
            for content in found.contents:
                budget -= len(content.hashes)
                there, gone = self._books.store.refresh(content.hashes)
                counters.keep_alives += there
                counters.keep_alive_losses += gone
        if self._to_come:
            self.next_at = now + SLICE_PAUSE_SECONDS
        elif is_wanted or any(self.keeps(session, now) for session in tracker):
            self.next_at = now + self._books.settings.keep_alive_seconds
        else:
            self.next_at = math.inf

    def _forget_hearsay(self, session: SessionKey, found: Registration) -> None:
        """Nothing has come of what another server has noted: no end of a session will do it."""
        if found.origin is not Origin.RUN and not self._books.local.has_session(session):
            self._announcements.let_go(self._books.tracker.forget(session))
