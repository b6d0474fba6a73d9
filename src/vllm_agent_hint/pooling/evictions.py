"""Evict: what a session alone has registered is deleted in the store, or may at least go first."""

from vllm_agent_hint.hints import EditStatus
from vllm_agent_hint.pooling.announcements import Announcements
from vllm_agent_hint.pooling.books import Books
from vllm_agent_hint.pooling.capability import Operation, OperationHandle, Outcome, Span
from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.pooling.reasons import NOTHING_RECORDED
from vllm_agent_hint.pooling.tracker import Origin, Registration
from vllm_agent_hint.sessions.intent import SessionKey


class Evictions:
    """Ends what sessions have in the store.

    Args:
        books: Shared with the rooms beside this one.
        announcements: Tells other servers what is left.
    """

    def __init__(self, books: Books, announcements: Announcements) -> None:
        self._books = books
        self._announcements = announcements

    def start(self, session: SessionKey, span: Span) -> OperationHandle:
        """Evict a part of a session's contexts, and all that lies behind it."""
        return OperationHandle.ended(self._evict(session, span))

    def _evict(self, session: SessionKey, span: Span) -> Outcome:
        found = self._books.tracker.get(session)
        if found is None:
            return Outcome(EditStatus.MISSING, reason=NOTHING_RECORDED)
        beyond = self._alone_beyond(session, found, span)
        self._shorten(session, found, span)
        counters, store = self._books.counters, self._books.store
        counters.orphaned_keys += len(beyond)
        reason = store.why_not(Operation.EVICT)
        if found.origin is Origin.PROMPT:
            reason = reason or "what it holds of this prompt may be another session's"
        if reason:
            is_ours = found.origin is not Origin.PROMPT
            store.claim(beyond, Claim.DEAD if is_ours else Claim.ORDINARY)
            return Outcome(EditStatus.UNSUPPORTED, reason=reason)
        deleted = store.delete(beyond, session)
        if deleted is None:
            counters.failures += 1
            return Outcome(EditStatus.FAILED, reason="the store could not be asked to delete it")
        counters.remote_evictions += deleted
        tokens = min(deleted, len(beyond)) * found.latest.tokens_per_hash
        return Outcome(EditStatus.APPLIED, tokens, deleted)

    def _alone_beyond(self, session: SessionKey, found: Registration, span: Span) -> list[bytes]:
        """What lies from the span on and nobody else has registered."""
        alone = set(self._books.tracker.owned_alone(session))
        beyond: list[bytes] = []
        for content in found.contents:
            first = span.start_token // content.tokens_per_hash
            beyond += [h for h in content.hashes[first:] if h in alone]
        return beyond

    def _shorten(self, session: SessionKey, found: Registration, span: Span) -> None:
        """Only what lies before the span stays registered."""
        tracker = self._books.tracker
        contents = found.contents
        kept = [content.up_to(span.start_token) for content in contents]
        tracker.forget(session)
        for content in kept:
            if content.hashes:
                tracker.register(session, content, found.keep_until, at_most=len(contents))
        left = tracker.get(session)
        if left is not None:
            # What the store was told of it still stands, and has to be taken back some day.
            left.claim = found.claim
            tracker.set_origin(session, found.origin)
            self._announcements.note_in_manifest(session)
        else:
            self._books.store.forget_page(session)
