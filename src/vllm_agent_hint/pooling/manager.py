"""SessionAwarePoolingManager: the capability, for connectors that don't have it themselves."""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from vllm_agent_hint.hints import EditStatus
from vllm_agent_hint.pooling.capability import (
    Content,
    Operation,
    OperationHandle,
    Outcome,
    PoolingCounters,
    Residency,
    Span,
)
from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.pooling.lanes import Lanes
from vllm_agent_hint.pooling.manifest import IncompatibleError, Page
from vllm_agent_hint.pooling.own_contents import AskOwnContents, OwnContents
from vllm_agent_hint.pooling.store import Loads, LocalCache, Store, Wish
from vllm_agent_hint.pooling.tracker import Origin, Registration, SessionKeyTracker
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.settings import Settings

logger = logging.getLogger("vllm.agent_hint")

SAVE_ID_PREFIX = "agent-hint-save-"
KEEP_ALIVE_SLICE = 4_096
"""Hashes refreshed in one go; the rest follows soon after."""
SLICE_PAUSE_SECONDS = 0.05

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Save:
    """The saves of one offload.

    Args:
        session: Whose.
        span: What of it.
        parts: ``(save id, content, tokens that the GPU cache would have served)``.
        version: Of the session's registration when it began.
        handle: Finished when all are over.
        began_at: Monotonic seconds.
    """

    session: SessionKey
    span: Span
    parts: list[tuple[str, Content, int]]
    version: int
    handle: OperationHandle
    began_at: float


@dataclass(slots=True)
class _Round:
    """One round of keep-alive: the sessions whose turn is still to come in it."""

    sessions: list[SessionKey] = field(default_factory=list)


class SessionAwarePoolingManager:
    """Keeps the account ``session -> hashes``, and asks a store and the scheduler to act on it.

    It reads no clock: ``step`` and ``keep_alive`` are told the time, and everything in between
    counts from the last that they were told. A store that fails is asked again later; nothing of
    that reaches vLLM.

    Args:
        store: The connector's adapter.
        local: The GPU cache.
        loads: Brings content into it.
        settings: Bounds.
        now: Monotonic seconds.
    """

    def __init__(
        self, store: Store, local: LocalCache, loads: Loads, settings: Settings, now: float
    ) -> None:
        self.store = store
        self._local = local
        self._loads = loads
        self._settings = settings
        self.now = now
        self.tracker = SessionKeyTracker(settings.max_tracked)
        self.counters = PoolingCounters()
        self._lanes = Lanes()
        self._saves: list[_Save] = []
        self._ids = itertools.count()
        self._round = _Round()
        self.next_keep_alive_at = math.inf
        self._has_named_fault = False
        self._gone = ""
        """Why the store is not used any more."""

    # -- the capability ------------------------------------------------------------------------

    def why_not(self, operation: Operation) -> str:
        """See ``SupportsSessionAwareKVManagement``."""
        return self.store.why_not(operation)

    def register_cache(
        self,
        session: SessionKey,
        request_id: str,
        content: Content,
        ttl: float,
        *,
        at_most: int = 1,
    ) -> None:
        """See ``SupportsSessionAwareKVManagement``.

        Args:
            session: Whose.
            request_id: vLLM's.
            content: The cacheable prefix.
            ttl: Seconds.
            at_most: Contexts that the session runs side by side.
        """
        if not content.hashes:
            return
        change = self.tracker.register(session, content, self.now + ttl, at_most=at_most)
        self._let_go(change.orphans)
        self._claim(session, Claim.PROTECTED if ttl else Claim.ORDINARY, change.fresh)
        self._note_in_manifest(session)
        if ttl:
            self._begin_keep_alive()

    def offload(self, session: SessionKey, span: Span) -> OperationHandle:
        """See ``SupportsSessionAwareKVManagement``. Local retention ends once all is saved."""
        if reason := self.why_not(Operation.OFFLOAD):
            return _ended(EditStatus.UNSUPPORTED, reason)
        return self._lanes.run(session, partial(self._start_offload, session, span))

    def prefetch(
        self,
        session: SessionKey,
        span: Span,
        *,
        ask_own: AskOwnContents = OwnContents.unknown,
        is_guess: bool = False,
    ) -> OperationHandle:
        """See ``SupportsSessionAwareKVManagement``.

        What lies before the span comes too: without it nothing of the span could be used.

        Args:
            session: Whose.
            span: What of it.
            ask_own: For the contexts with which the session will be back; it is asked only if no
                request of it has run here. They go before what a manifest says.
            is_guess: Nobody has asked for it yet.
        """
        if reason := self.why_not(Operation.PREFETCH):
            return _ended(EditStatus.UNSUPPORTED, reason)
        start = partial(self._start_prefetch, session, span, ask_own, is_guess=is_guess)
        return self._lanes.run(session, start)

    def evict(self, session: SessionKey, span: Span) -> OperationHandle:
        """See ``SupportsSessionAwareKVManagement``. What lies behind the span goes too."""
        return self._lanes.run(session, partial(self._start_evict, session, span))

    def release(self, session: SessionKey) -> None:
        """See ``SupportsSessionAwareKVManagement``."""
        self._let_go(self.tracker.forget(session))

    def query_residency(self, session: SessionKey) -> Residency:
        """See ``SupportsSessionAwareKVManagement``."""
        found = self.tracker.get(session)
        if found is None:
            return Residency()
        content = found.latest
        return Residency(
            tokens=content.num_tokens,
            local=self._local.prefix_tokens(content),
            remote=self._loadable_tokens(content),
        )

    # -- the manifest --------------------------------------------------------------------------

    def _note_in_manifest(self, session: SessionKey) -> None:
        found, manifest = self.tracker.get(session), self.store.manifest
        if manifest is not None and found is not None:
            ttl = max(0.0, found.keep_until - self.now)
            self._ask(manifest.write, session, list(found.contents), ttl, default=None)

    def knows(self, session: SessionKey) -> bool:
        """Whether a session has registered anything, here or with another server."""
        manifest = self.store.manifest
        return session in self.tracker or (manifest is not None and manifest.holds(session))

    def _learn(self, session: SessionKey, own: Sequence[Content]) -> str:
        """Take over what is said of a session that has not run here.

        Its own prompts say best what it will ask for; how long it is kept stands in a manifest
        only.

        Returns:
            Why there is nothing to take over; empty if there was.
        """
        page, reason = self._page_of(session)
        ttl = 0.0 if page is None else page.ttl
        if own:
            contents = [part for each in own if (part := self._part_there(each)).hashes]
            origin, reason = Origin.PROMPT, STORE_HAS_NONE_OF_IT
        else:
            contents = [] if page is None else list(page.contents)
            origin = Origin.MANIFEST
        if not contents:
            return reason
        self._take_over(session, contents, ttl, origin)
        return ""

    def _page_of(self, session: SessionKey) -> tuple[Page | None, str]:
        """What another server has noted of a session, or why there is nothing."""
        if self.store.manifest is None:
            return None, _NOTHING_RECORDED
        try:
            page = self.store.manifest.read(session)
        except IncompatibleError as error:
            return None, f"incompatible: {error}"
        return page, _NOTHING_RECORDED

    def _part_there(self, content: Content) -> Content:
        """As much of a prompt as is anywhere: nobody has ever saved the rest.

        All of it where the store can't tell without waiting.
        """
        loadable = self._loadable_tokens(content)
        if loadable is None:
            return content
        return content.up_to(max(loadable, self._local.prefix_tokens(content)))

    def _take_over(
        self, session: SessionKey, contents: Sequence[Content], ttl: float, origin: Origin
    ) -> None:
        """Register what is said of a session that has not run here, in place of earlier hearsay."""
        for content in contents:
            keep_until = self.now + ttl
            change = self.tracker.register(session, content, keep_until, at_most=len(contents))
            self._let_go(change.orphans)
        self.tracker.set_origin(session, origin)
        self._claim(session, Claim.PROTECTED if ttl else Claim.ORDINARY)
        if ttl:
            self._begin_keep_alive()

    # -- offload -------------------------------------------------------------------------------

    def _start_offload(self, session: SessionKey, span: Span) -> OperationHandle:
        if self._gone:
            return _ended(EditStatus.FAILED, self._gone)
        found = self.tracker.get(session)
        if found is None:
            return _ended(EditStatus.MISSING, _NOTHING_RECORDED)
        save = _Save(session, span, [], found.version, OperationHandle(), self.now)
        for content in found.contents:
            part = content.up_to(span.end_token)
            if part.num_tokens <= span.start_token:
                continue
            save_id = f"{SAVE_ID_PREFIX}{next(self._ids)}"
            blocks = self._local.blocks_of(part, span)
            save.parts.append((save_id, part, self._local.prefix_tokens(part)))
            if any(map(any, blocks)):
                self._ask(self.store.start_save, save_id, part, blocks, default=None)
        if not save.parts:
            return _ended(EditStatus.MISSING, "nothing is recorded for the range")
        self._saves.append(save)
        self._settle_saves()
        return save.handle

    def _settle_saves(self) -> None:
        for save in list(self._saves):
            if save not in self._saves:
                continue  # What was waiting for another one has settled it meanwhile.
            is_late = self.now - save.began_at > self._settings.transfer_seconds
            # What a request of its own has begun to save is not taken again, and not there yet.
            busy = any(
                self._ask(self.store.is_saving, save_id, default=False)
                or self._loadable_tokens(content, if_it_fails=0) is None
                for save_id, content, _ in save.parts
            )
            if busy and not is_late:
                continue
            self._saves.remove(save)
            self._save_is_over(save, is_late=busy)

    def _save_is_over(self, save: _Save, *, is_late: bool) -> None:
        """Look at what the store holds now: what it was asked to do proves nothing."""
        saved = wanted = 0
        for _, content, local in save.parts:
            if save.span.is_whole or not save.span.start_token:
                there = self._loadable_tokens(content) or 0
                saved += there
                wanted += max(local, there)
            else:
                first = save.span.start_token // content.tokens_per_hash
                hashes = content.hashes[first:]
                found, _ = self._ask(self.store.refresh, hashes, default=(0, 0))
                saved += min(found, len(hashes)) * content.tokens_per_hash
                wanted += len(hashes) * content.tokens_per_hash
        unit = save.parts[0][1].tokens_per_hash
        seconds = self.now - save.began_at
        self.counters.transfer_seconds.append((Operation.OFFLOAD.value, seconds))
        self.counters.saved_tokens += saved
        outcome = Outcome(EditStatus.APPLIED, saved, saved // unit)
        if is_late:
            reason = f"the store has not answered for {seconds:.0f} s; what is local stays"
            outcome = Outcome(EditStatus.FAILED, saved, saved // unit, reason)
        elif not saved and not wanted:
            outcome = Outcome(EditStatus.MISSING, reason="nothing of it is in the cache any more")
        elif not saved:
            reason = "the store has taken nothing; what is local stays"
            outcome = Outcome(EditStatus.FAILED, reason=reason, has_back_pressure=True)
        elif saved < wanted:
            reason = "the store has not taken all of it; what is local stays"
            outcome = Outcome(EditStatus.PARTIAL, saved, saved // unit, reason, True)
        self.counters.failures += outcome.status is EditStatus.FAILED
        self.counters.back_pressure += outcome.has_back_pressure
        if outcome.status is not EditStatus.APPLIED:
            save.handle.finish(outcome)
            return
        found_now = self.tracker.get(save.session)
        if found_now is None or found_now.version != save.version:
            reason = "saved; the session has gone on since, so that what is local stays"
            save.handle.finish(Outcome(outcome.status, saved, saved // unit, reason))
            return
        # An offloaded context is worth keeping although nothing protects it here any more.
        horizon = self.now + self._settings.idle_seconds
        found_now.keep_until = max(found_now.keep_until, horizon)
        self._claim(save.session, Claim.PROTECTED)
        self._note_in_manifest(save.session)
        self._begin_keep_alive()
        reason = self._local.release(save.session, save.span, lambda: save.handle.finish(outcome))
        if reason:
            save.handle.finish(
                Outcome(
                    outcome.status, saved, saved // unit, f"saved; what is local stays: {reason}"
                )
            )

    # -- prefetch ------------------------------------------------------------------------------

    def _start_prefetch(
        self, session: SessionKey, span: Span, ask_own: AskOwnContents, *, is_guess: bool
    ) -> OperationHandle:
        if self._gone:
            return _ended(EditStatus.FAILED, self._gone)
        if self._has_run(session):
            return self._load(session, span, (), is_guess=is_guess)
        own, whole = ask_own(), OperationHandle()

        def are_known(outcome: Outcome) -> None:
            if outcome.status is not EditStatus.APPLIED:
                whole.finish(outcome)
                return
            load = self._load(session, span, own.contents, is_guess=is_guess)
            load.when_done(whole.finish)

        own.handle.when_done(are_known)
        return whole

    def _has_run(self, session: SessionKey) -> bool:
        found = self.tracker.get(session)
        return found is not None and found.origin is Origin.RUN

    def _load(
        self, session: SessionKey, span: Span, own: Sequence[Content], *, is_guess: bool
    ) -> OperationHandle:
        found = self.tracker.get(session)
        # A request of it may have run while its prompts were being looked at.
        if found is None or found.origin is not Origin.RUN:
            reason = self._learn(session, own)
            found = self.tracker.get(session)
            if found is None or (own and reason):
                return _ended(EditStatus.MISSING, reason)
        wishes = self._wishes(session, found, span, is_guess=is_guess)
        if not wishes:
            return _ended(EditStatus.MISSING, "nothing is recorded for the range")
        whole = OperationHandle()
        whole.when_done(partial(self._forget_if_nothing_came, session, found.version))
        for wish in wishes:
            wish.handle.when_done(lambda _: _finish_with_all(whole, wishes))
        for wish in wishes:
            if not wish.handle.is_done:
                self._loads.ask(wish)
        return whole

    def _forget_if_nothing_came(self, session: SessionKey, version: int, outcome: Outcome) -> None:
        """Nobody else would: a session of which nothing has ever been here never ends here."""
        found = self.tracker.get(session)
        if found is None or found.version != version or found.origin is Origin.RUN:
            return
        if not outcome.tokens and found.keep_until <= self.now:
            self._let_go(self.tracker.forget(session))

    def _wishes(
        self, session: SessionKey, found: Registration, span: Span, *, is_guess: bool
    ) -> list[Wish]:
        """The latest context first: it is the likeliest to be asked for."""
        wishes: list[Wish] = []
        for content in reversed(found.contents):
            whole = content.up_to(span.end_token)
            if whole.num_tokens <= span.start_token:
                continue
            loadable = self._loadable_tokens(whole)
            reach = whole.num_servable
            if loadable is not None:
                reach = max(loadable, self._local.prefix_tokens(whole))
            part = whole.up_to(reach)
            is_guessed = found.origin is Origin.PROMPT and loadable is None
            wish = Wish(
                session=session,
                content=part,
                wanted_tokens=0 if is_guessed else whole.num_servable,
                ttl=max(0.0, found.keep_until - self.now),
                handle=OperationHandle(),
                wanted_at=self.now,
                give_up_at=self.now + self._settings.prefetch_patience_seconds,
                is_guess=is_guess,
            )
            if not part.hashes:
                wish.handle.finish(Outcome(EditStatus.MISSING, reason=STORE_LOST_IT))
            wishes.append(wish)
        return wishes

    # -- evict ---------------------------------------------------------------------------------

    def _start_evict(self, session: SessionKey, span: Span) -> OperationHandle:
        if self._gone:
            return _ended(EditStatus.FAILED, self._gone)
        found = self.tracker.get(session)
        if found is None:
            return _ended(EditStatus.MISSING, _NOTHING_RECORDED)
        alone = set(self.tracker.owned_alone(session))
        beyond: list[bytes] = []
        for content in found.contents:
            first = span.start_token // content.tokens_per_hash
            beyond += [h for h in content.hashes[first:] if h in alone]
        kept = [content.up_to(span.start_token) for content in found.contents]
        self.tracker.forget(session)
        for content in kept:
            if content.hashes:
                self.tracker.register(
                    session, content, found.keep_until, at_most=len(found.contents)
                )
        if session in self.tracker:
            self.tracker.set_origin(session, found.origin)
            self._note_in_manifest(session)
        elif self.store.manifest is not None:
            self._ask(self.store.manifest.forget, session, default=None)
        self.counters.orphaned_keys += len(beyond)
        reason = self.why_not(Operation.EVICT)
        if found.origin is Origin.PROMPT:
            reason = reason or "what it holds of this prompt may be another session's"
        if reason:
            self._ask(self.store.claim, beyond, Claim.DEAD, default=None)
            return _ended(EditStatus.UNSUPPORTED, reason)
        deleted = self._ask(self.store.delete, beyond, default=-1)
        if deleted < 0:
            self.counters.failures += 1
            return _ended(EditStatus.FAILED, "the store could not be asked to delete it")
        self.counters.remote_evictions += deleted
        tokens_per_hash = found.latest.tokens_per_hash
        tokens = min(deleted, len(beyond)) * tokens_per_hash
        return OperationHandle.ended(Outcome(EditStatus.APPLIED, tokens, deleted))

    def _claim(
        self, session: SessionKey, claim: Claim, fresh: Sequence[bytes] | None = None
    ) -> None:
        """Tell the store who wants a session's content.

        Args:
            session: Whose.
            claim: Of all of it.
            fresh: All that it has not been told of; None for everything.
        """
        found = self.tracker.get(session)
        if found is None:
            return
        if fresh is not None and found.claim is claim:
            self._ask(self.store.claim, fresh, claim, default=None)
            return
        found.claim = claim
        for content in found.contents:
            self._ask(self.store.claim, content.hashes, claim, default=None)

    def _let_go(self, orphans: Sequence[bytes]) -> None:
        if orphans:
            self.counters.orphaned_keys += len(orphans)
            self._ask(self.store.claim, orphans, Claim.DEAD, default=None)

    # -- time ----------------------------------------------------------------------------------

    def step(self, now: float) -> None:
        """See how far the saves are. Cheap where none is under way."""
        self.now = now
        if self._saves:
            self._settle_saves()

    @property
    def num_open(self) -> int:
        """Operations that are not over."""
        return len(self._lanes)

    @property
    def wants_steps(self) -> bool:
        """Whether the scheduler has to step for something to go on."""
        return bool(self._saves)

    def _begin_keep_alive(self) -> None:
        if self.next_keep_alive_at == math.inf and not self.why_not(Operation.KEEP_ALIVE):
            self.next_keep_alive_at = self.now + self._settings.keep_alive_seconds

    def keep_alive(self, now: float) -> None:
        """Refresh what is due in the store, a slice at a time; see ``next_keep_alive_at``."""
        self.now = now
        if now < self.next_keep_alive_at:
            return
        if not self._round.sessions:
            self._round.sessions = list(self.tracker)
        budget = KEEP_ALIVE_SLICE
        wanted = False
        while self._round.sessions and budget > 0:
            session = self._round.sessions.pop()
            found = self.tracker.get(session)
            if found is None:
                continue
            if found.keep_until <= now:
                self._end_protection(session, found)
                continue
            wanted = True
            for content in found.contents:
                budget -= len(content.hashes)
                there, gone = self._ask(self.store.refresh, content.hashes, default=(0, 0))
                self.counters.keep_alives += there
                self.counters.keep_alive_losses += gone
        if self._round.sessions:
            self.next_keep_alive_at = now + SLICE_PAUSE_SECONDS
        elif wanted or any(self.keeps(session, now) for session in self.tracker):
            self.next_keep_alive_at = now + self._settings.keep_alive_seconds
        else:
            self.next_keep_alive_at = math.inf

    def _end_protection(self, session: SessionKey, found: Registration) -> None:
        """Its time is over: what it shares with others is theirs to speak for."""
        if found.claim is not Claim.ORDINARY:
            found.claim = Claim.ORDINARY
            alone = self.tracker.owned_alone(session)
            self._ask(self.store.claim, alone, Claim.ORDINARY, default=None)

    def keeps(self, session: SessionKey, now: float) -> bool:
        """Whether a session has something in the store that is still to be kept."""
        found = self.tracker.get(session)
        return found is not None and found.keep_until > now

    def _loadable_tokens(self, content: Content, if_it_fails: int | None = None) -> int | None:
        return self._ask(self.store.loadable_tokens, content, default=if_it_fails)

    def abandon(self, reason: str) -> None:
        """The store is not used any more: all that is under way has failed."""
        self._gone = reason
        self.next_keep_alive_at = math.inf
        saves, self._saves = self._saves, []
        for save in saves:
            save.handle.finish(Outcome(EditStatus.FAILED, reason=reason))

    # -- the store may be dead -----------------------------------------------------------------

    def _ask(self, call: Callable[..., T], *args: object, default: T) -> T:
        """Ask the store; what it can't answer is what it does not have."""
        try:
            return call(*args)
        except Exception:
            self.counters.failures += 1
            if not self._has_named_fault:
                self._has_named_fault = True
                logger.exception(
                    "vllm-agent-hint: asking %s failed; sessions go on without it (said once)",
                    self.store.name,
                )
            return default


STORE_LOST_IT = "the store has nothing of it any more"
STORE_HAS_NONE_OF_IT = "the store has nothing of this prompt"
_NOTHING_RECORDED = "nothing is recorded for this session"

_WORST_FIRST = (
    EditStatus.UNSUPPORTED,
    EditStatus.FAILED,
    EditStatus.REJECTED,
    EditStatus.MISSING,
    EditStatus.PARTIAL,
    EditStatus.APPLIED,
)


def _ended(status: EditStatus, reason: str) -> OperationHandle:
    return OperationHandle.ended(Outcome(status, reason=reason))


def _finish_with_all(whole: OperationHandle, wishes: Iterable[Wish]) -> None:
    """Once every part is over: the sum, and as status the one that all share, or ``partial``."""
    outcomes = [wish.handle.outcome for wish in wishes]
    done = [outcome for outcome in outcomes if outcome is not None]
    if len(done) < len(outcomes):
        return
    tokens, blocks = sum(o.tokens for o in done), sum(o.blocks for o in done)
    worst = min((o.status for o in done), key=_WORST_FIRST.index)
    status = worst
    if len({o.status for o in done}) > 1 and tokens:
        status = EditStatus.PARTIAL
    reasons = dict.fromkeys(o.reason for o in done if o.reason)
    whole.finish(
        Outcome(status, tokens, blocks, "; ".join(reasons), any(o.has_back_pressure for o in done))
    )
