"""Keep-alive: a store forgets what nobody uses, so what sessions keep there is used at times."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from vllm_agent_hint.pooling.announcements import Announcements
from vllm_agent_hint.pooling.books import Books
from vllm_agent_hint.pooling.capability import Content, Operation
from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.pooling.tracker import Origin, Registration
from vllm_agent_hint.sessions.intent import SessionKey

SLICE_HASHES: Final = 4_096  # A power of two: no chunk of a store that spans several is cut.
"""Refreshed or let go of in one go; the rest follows soon after. One session at least is let go."""
SLICE_PAUSE_SECONDS: Final = 0.05

_Piece = tuple[SessionKey, Content, int]
"""A slice of one content at most: from which hash on."""


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
        self._pieces: deque[_Piece] = deque()
        """Of the session whose turn it is."""
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
        tracker = self._books.tracker
        if not self._pieces and not self._to_come:
            self._to_come = list(tracker)
        left = SLICE_HASHES
        while self._pieces or self._to_come:
            if not self._pieces:
                to_end = self._num_to_end(self._to_come[-1], now)
                if to_end > left and left < SLICE_HASHES:
                    break
                left -= to_end
                self._pieces.extend(self._pieces_of(self._to_come.pop(), now))
                continue
            session, content, begin = self._pieces[0]
            hashes = content.hashes[begin : begin + SLICE_HASHES]
            if len(hashes) > left:
                break
            self._pieces.popleft()
            if self._is_registered(session, content):
                left -= len(hashes)
                self._refresh(hashes)
        if self._pieces or self._to_come:
            self.next_at = now + SLICE_PAUSE_SECONDS
        elif any(self.keeps(session, now) for session in tracker):
            self.next_at = now + self._books.settings.keep_alive_seconds
        else:
            self.next_at = math.inf

    def _num_to_end(self, session: SessionKey, now: float) -> int:
        """How many hashes the store has to be told of, because a session's time is over."""
        found = self._books.tracker.get(session)
        if found is None or found.keep_until > now:
            return 0
        if found.claim is Claim.ORDINARY and found.origin is Origin.RUN:
            return 0
        return sum(len(content.hashes) for content in found.contents)

    def _pieces_of(self, session: SessionKey, now: float) -> Iterator[_Piece]:
        """All that is to be refreshed of a session; nothing once its time is over."""
        found = self._books.tracker.get(session)
        if found is None:
            return
        if found.keep_until <= now:
            self._announcements.end_protection(session)
            self._forget_hearsay(session, found)
            return
        for content in found.contents:
            for begin in range(0, len(content.hashes), SLICE_HASHES):
                yield session, content, begin

    def _forget_hearsay(self, session: SessionKey, found: Registration) -> None:
        """Nothing has come of what another server has noted: no end of a session will do it."""
        if found.origin is not Origin.RUN and not self._books.local.has_session(session):
            self._announcements.let_go(self._books.tracker.forget(session))

    def _is_registered(self, session: SessionKey, content: Content) -> bool:
        """Whether a session still has a content: much may have happened since the last slice."""
        found = self._books.tracker.get(session)
        return found is not None and any(each is content for each in found.contents)

    def _refresh(self, hashes: Sequence[bytes]) -> None:
        there, gone = self._books.store.refresh(hashes)
        self._books.counters.keep_alives += there
        self._books.counters.keep_alive_losses += gone
