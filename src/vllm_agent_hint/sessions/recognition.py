"""Requests without a hint beside sessions that have one: which of them make a conversation."""

from collections.abc import Hashable, Sequence

from vllm_agent_hint.sessions.books import Books
from vllm_agent_hint.sessions.intent import SessionIntent
from vllm_agent_hint.sessions.lifetimes import Lifetimes
from vllm_agent_hint.sessions.session import LiveRequest


class Recognizer:
    """Finds the conversation that a request goes on with, and makes it a session.

    Args:
        books: Shared with the rooms beside this one.
        lifetimes: Begin and end the sessions of conversations.
    """

    def __init__(self, books: Books, lifetimes: Lifetimes) -> None:
        self._books = books
        self._lifetimes = lifetimes

    @property
    def is_active(self) -> bool:
        """Whether requests without a hint are looked at: only beside sessions that have one."""
        return self._books.settings.conversations and self._books.num_hinted_sessions > 0

    def added(self, hashes: Sequence[bytes], now: float, tenant: str) -> LiveRequest | None:
        """See ``SessionAwareManager.unhinted_added``."""
        conversations = self._books.conversations
        known_by, conversation = conversations.find(hashes) or (None, None)
        if (
            conversation is not None
            and conversation.tenant == tenant
            and conversation.is_continued_by(hashes)
        ):
            session = self._books.sessions.get(conversation.key)
            if session is None or not session.live:
                return self._go_on(known_by, hashes, now)
            # Two at once: what they begin with is a prefix that many have.
            conversation.is_shared = True
        forgotten = conversations.begin(hashes, now, tenant)
        if forgotten is not None and forgotten.key in self._books.sessions:
            self._lifetimes.free(self._books.sessions[forgotten.key])
        return None

    def _go_on(self, known_by: Hashable, hashes: Sequence[bytes], now: float) -> LiveRequest:
        conversation, since_it_came = self._books.conversations.go_on(known_by, hashes, now)
        tenant = conversation.tenant
        session = self._lifetimes.use_conversation(conversation.key, tenant)
        self._lifetimes.suspend(session)
        live = LiveRequest(session, SessionIntent(None, tenant=tenant))
        rested = self._books.standing.come_back(session, now)
        live.gap = since_it_came if rested is None else rested
        live.conversation_turns = conversation.num_turns
        session.live.add(live)
        return live
