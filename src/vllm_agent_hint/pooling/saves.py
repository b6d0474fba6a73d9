"""Offload: what a session has in the GPU cache is saved, and need not be kept there any more."""

import itertools
from dataclasses import dataclass
from typing import Final

from vllm_agent_hint.hints import EditStatus
from vllm_agent_hint.pooling.announcements import Announcements
from vllm_agent_hint.pooling.books import Books
from vllm_agent_hint.pooling.capability import Content, Operation, OperationHandle, Outcome, Span
from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.pooling.keep_alive import KeepAlive
from vllm_agent_hint.pooling.reasons import NOTHING_IN_RANGE, NOTHING_RECORDED
from vllm_agent_hint.pooling.tracker import Registration
from vllm_agent_hint.sessions.intent import SessionKey

SAVE_ID_PREFIX: Final = "agent-hint-save-"


@dataclass(slots=True, eq=False)
class _Save:
    """The saves of one offload.

    Args:
        session: Whose.
        span: What of it.
        parts: ``(save id, content, tokens that the GPU cache would have served)``.
        registration: Of the session when it began; the next session of that name has another.
        version: Of the registration then.
        handle: Finished when all are over.
        began_at: Monotonic seconds.
    """

    session: SessionKey
    span: Span
    parts: list[tuple[str, Content, int]]
    registration: Registration
    version: int
    handle: OperationHandle
    began_at: float


class Saves:
    """Offloads that are under way.

    Args:
        books: Shared with the rooms beside this one.
        announcements: Tells the store that what it has is wanted.
        keep_alive: Keeps it there.
    """

    def __init__(self, books: Books, announcements: Announcements, keep_alive: KeepAlive) -> None:
        self._books = books
        self._announcements = announcements
        self._keep_alive = keep_alive
        self._open: list[_Save] = []
        self._ids = itertools.count()

    def __len__(self) -> int:
        """Offloads that are not over."""
        return len(self._open)

    def start(self, session: SessionKey, span: Span) -> OperationHandle:
        """Begin to save; local retention ends once all is saved."""
        found = self._books.tracker.get(session)
        if found is None:
            return OperationHandle.ended(Outcome(EditStatus.MISSING, reason=NOTHING_RECORDED))
        save = _Save(session, span, [], found, found.version, OperationHandle(), self._books.now)
        for content in found.contents:
            part = content.up_to(span.end_token)
            if part.num_tokens <= span.start_token:
                continue
            save_id = f"{SAVE_ID_PREFIX}{next(self._ids)}"
            blocks = self._books.local.blocks_of(part, span)
            save.parts.append((save_id, part, self._books.local.prefix_tokens(part)))
            if any(map(any, blocks)):
                self._books.store.start_save(save_id, part, blocks)
        if not save.parts:
            return OperationHandle.ended(Outcome(EditStatus.MISSING, reason=NOTHING_IN_RANGE))
        self._open.append(save)
        self.settle()
        return save.handle

    def settle(self) -> None:
        """See which are over."""
        for save in list(self._open):
            if save not in self._open:
                continue  # What was waiting for another one has settled it meanwhile.
            is_busy = self._is_busy(save)
            is_late = self._books.now - save.began_at > self._books.settings.transfer_seconds
            if is_busy and not is_late:
                continue
            self._open.remove(save)
            try:
                self._end(save, is_late=is_busy)
            except Exception:
                # Nobody else knows of it any more.
                save.handle.finish(Outcome(EditStatus.FAILED, reason="its end failed, see the log"))
                raise

    def abandon(self, reason: str) -> None:
        """The store is not used any more."""
        saves, self._open = self._open, []
        for save in saves:
            save.handle.finish(Outcome(EditStatus.FAILED, reason=reason))

    def _is_busy(self, save: _Save) -> bool:
        """What a request of its own has begun to save is not taken again, and not there yet."""
        store = self._books.store
        return any(
            store.is_saving(save_id) or store.loadable_tokens(content, if_it_fails=0) is None
            for save_id, content, _ in save.parts
        )

    def _end(self, save: _Save, *, is_late: bool) -> None:
        outcome = self._outcome(save, is_late=is_late)
        counters = self._books.counters
        seconds = self._books.now - save.began_at
        counters.transfer_seconds.append((Operation.OFFLOAD.value, seconds))
        counters.saved_tokens += outcome.tokens
        counters.failures += outcome.status is EditStatus.FAILED
        counters.back_pressure += outcome.has_back_pressure
        if outcome.status is EditStatus.APPLIED:
            self._release_local(save, outcome)
        else:
            save.handle.finish(outcome)

    def _outcome(self, save: _Save, *, is_late: bool) -> Outcome:
        saved, wanted = self._saved_and_wanted(save)
        blocks = saved // save.parts[0][1].tokens_per_hash
        if is_late:
            seconds = self._books.now - save.began_at
            reason = f"the store has not answered for {seconds:.0f} s; what is local stays"
            return Outcome(EditStatus.FAILED, saved, blocks, reason)
        if not saved and not wanted:
            return Outcome(EditStatus.MISSING, reason="nothing of it is in the cache any more")
        if not saved:
            reason = "the store has taken nothing; what is local stays"
            return Outcome(EditStatus.FAILED, reason=reason, has_back_pressure=True)
        if saved < wanted:
            reason = "the store has not taken all of it; what is local stays"
            return Outcome(EditStatus.PARTIAL, saved, blocks, reason, has_back_pressure=True)
        return Outcome(EditStatus.APPLIED, saved, blocks)

    def _saved_and_wanted(self, save: _Save) -> tuple[int, int]:
        """Tokens that the store holds now, and those that it ought to: what it was asked to do
        proves nothing.
        """
        saved = wanted = 0
        for _, content, local in save.parts:
            if save.span.is_whole or not save.span.start_token:
                there = self._books.store.loadable_tokens(content) or 0
                saved += there
                wanted += max(local, there)
            else:
                first = save.span.start_token // content.tokens_per_hash
                hashes = content.hashes[first:]
                found, _ = self._books.store.refresh(hashes)
                saved += min(found, len(hashes)) * content.tokens_per_hash
                wanted += len(hashes) * content.tokens_per_hash
        return saved, wanted

    def _release_local(self, save: _Save, outcome: Outcome) -> None:
        """All is saved. An offloaded context is worth keeping although nothing protects it here
        any more.
        """

        def finish(reason: str = "") -> None:
            save.handle.finish(Outcome(outcome.status, outcome.tokens, outcome.blocks, reason))

        found = save.registration
        is_same = self._books.tracker.get(save.session) is found
        if not is_same or found.version != save.version:
            finish("saved; the session has gone on since, so that what is local stays")
            return
        horizon = self._books.now + self._books.settings.idle_seconds
        found.keep_until = max(found.keep_until, horizon)
        self._announcements.claim(save.session, Claim.PROTECTED)
        self._announcements.note_in_manifest(save.session)
        self._keep_alive.begin()
        reason = self._books.local.release(save.session, save.span, finish)
        if reason:
            finish(f"saved; what is local stays: {reason}")
