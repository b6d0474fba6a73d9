"""SessionAwarePoolingManager: the capability, for connectors that don't have it themselves."""

from collections.abc import Callable
from functools import partial

from vllm_agent_hint.hints import EditStatus
from vllm_agent_hint.pooling.announcements import Announcements
from vllm_agent_hint.pooling.books import Books
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
from vllm_agent_hint.pooling.evictions import Evictions
from vllm_agent_hint.pooling.hearsay import Hearsay
from vllm_agent_hint.pooling.keep_alive import KeepAlive
from vllm_agent_hint.pooling.lanes import Lanes, Start
from vllm_agent_hint.pooling.own_contents import AskOwnContents, nothing_is_said
from vllm_agent_hint.pooling.prefetches import Asked, Prefetches
from vllm_agent_hint.pooling.reasons import TOO_MANY_WAIT
from vllm_agent_hint.pooling.saves import Saves
from vllm_agent_hint.pooling.store import Loads, LocalCache, Store
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.settings import Settings


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
        counters: Of what has happened.
        now: Monotonic seconds.
        on_fault: Called while an error of ours is handled, with what has failed; calls
            ``abandon``.
    """

    def __init__(
        self,
        store: Store,
        local: LocalCache,
        loads: Loads,
        settings: Settings,
        counters: PoolingCounters,
        now: float,
        on_fault: Callable[[str], object],
    ) -> None:
        self.store = store
        self.counters = counters
        self._books = books = Books(store, local, settings, counters, now)
        self.tracker = books.tracker
        self._announcements = Announcements(books)
        self._keep_alive = KeepAlive(books, self._announcements)
        self._hearsay = Hearsay(books, self._announcements, self._keep_alive)
        self._saves = Saves(books, self._announcements, self._keep_alive)
        self._prefetches = Prefetches(books, self._hearsay, loads)
        self._evictions = Evictions(books, self._announcements)
        self._loads = loads
        self._lanes = Lanes()
        self._on_fault = on_fault
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
        keep_until = self._books.now + ttl
        change = self.tracker.register(session, content, keep_until, at_most=at_most)
        self._announcements.let_go(change.orphans)
        self._announcements.claim(session, Claim.PROTECTED if ttl else Claim.ORDINARY, change.fresh)
        self._announcements.note_in_manifest(session)
        if ttl:
            self._keep_alive.begin()

    def offload(self, session: SessionKey, span: Span) -> OperationHandle:
        """See ``SupportsSessionAwareKVManagement``. Local retention ends once all is saved."""
        if reason := self.why_not(Operation.OFFLOAD):
            return OperationHandle.ended(Outcome(EditStatus.UNSUPPORTED, reason=reason))
        return self._run(session, Operation.OFFLOAD, partial(self._saves.start, session, span))

    def prefetch(
        self,
        session: SessionKey,
        span: Span,
        *,
        ask_own: AskOwnContents = nothing_is_said,
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
            return OperationHandle.ended(Outcome(EditStatus.UNSUPPORTED, reason=reason))
        if not self._has_room_for_prefetch(is_guess=is_guess):
            return OperationHandle.ended(Outcome.refused(TOO_MANY_WAIT))
        asked = Asked(session, span, self._books.now, is_guess)
        start = partial(self._prefetches.start, asked, ask_own)
        return self._run(session, Operation.PREFETCH, start)

    @property
    def num_prefetches_waiting(self) -> int:
        """For earlier operations of their session, for their prompts to be hashed, or for room;
        once for each context where those are known."""
        behind_others = self._lanes.num_waiting(Operation.PREFETCH)
        return behind_others + self._prefetches.num_asking + self._loads.num_waiting

    def _has_room_for_prefetch(self, *, is_guess: bool) -> bool:
        """What somebody asks for goes before a guess."""
        if self.num_prefetches_waiting < self._books.settings.max_prefetches_queued:
            return True
        return not is_guess and self._loads.give_up_a_guess()

    def evict(self, session: SessionKey, span: Span) -> OperationHandle:
        """See ``SupportsSessionAwareKVManagement``. What lies behind the span goes too."""
        return self._run(session, Operation.EVICT, partial(self._evictions.start, session, span))

    def refuse_waiting_prefetches(self, session: SessionKey | None, reason: str) -> None:
        """Prefetches that have not begun, of one session or of all, never begin.

        Whoever drops one that has begun does this before: its end is the begin of the next.
        """
        refused = Outcome.refused(reason)
        if session is None:
            self._lanes.refuse_all_waiting(refused, Operation.PREFETCH)
        else:
            self._lanes.refuse_waiting(session, refused, Operation.PREFETCH)

    def refuse_waiting(self, session: SessionKey, reason: str) -> None:
        """The same of all that a session has asked for."""
        self._lanes.refuse_waiting(session, Outcome.refused(reason))

    def release(self, session: SessionKey) -> None:
        """See ``SupportsSessionAwareKVManagement``."""
        self._announcements.let_go(self.tracker.forget(session))

    def query_residency(self, session: SessionKey) -> Residency:
        """See ``SupportsSessionAwareKVManagement``."""
        found = self.tracker.get(session)
        if found is None:
            return Residency()
        content = found.latest
        return Residency(
            tokens=content.num_tokens,
            local=self._books.local.prefix_tokens(content),
            remote=self._books.store.loadable_tokens(content),
        )

    def _run(self, session: SessionKey, kind: Operation, start: Start) -> OperationHandle:
        """One of a session's operations after the other."""

        def start_if_not_gone() -> OperationHandle:
            if not self._gone:
                try:
                    return start()
                except Exception:
                    # In the stack of whoever has ended the one before, who is no part of it.
                    self._on_fault("beginning what was asked for")
            return OperationHandle.ended(Outcome(EditStatus.FAILED, reason=self._gone))

        return self._lanes.run(session, kind, start_if_not_gone)

    # -- what is known of sessions -------------------------------------------------------------

    def knows(self, session: SessionKey) -> bool:
        """Whether a session has registered anything, here or with another server."""
        return self._hearsay.knows(session)

    def keeps(self, session: SessionKey, now: float) -> bool:
        """Whether a session has something in the store that is still to be kept."""
        return self._keep_alive.keeps(session, now)

    @property
    def num_open(self) -> int:
        """Operations that are not over."""
        return len(self._lanes)

    # -- time ----------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Monotonic seconds, as somebody has told them last."""
        return self._books.now

    @now.setter
    def now(self, now: float) -> None:
        self._books.now = now

    def step(self, now: float) -> None:
        """See how far the saves are. Cheap where none is under way."""
        self._books.now = now
        if len(self._saves):
            self._saves.settle()

    @property
    def wants_steps(self) -> bool:
        """Whether the scheduler has to step for something to go on."""
        return len(self._saves) > 0

    @property
    def next_keep_alive_at(self) -> float:
        """When ``keep_alive`` has something to do next; infinity if nothing is kept."""
        return self._keep_alive.next_at

    def keep_alive(self, now: float) -> None:
        """Refresh what is due in the store, a slice at a time."""
        self._books.now = now
        self._keep_alive.run(now)

    def abandon(self, reason: str) -> None:
        """The store is not used any more: all that is under way has failed."""
        self._gone = reason
        self._lanes.refuse_all_waiting(Outcome(EditStatus.FAILED, reason=reason))
        self._keep_alive.stop()
        self._saves.abandon(reason)
