"""Between the scheduler, its KV connector and the session core: where pooling comes together."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

from vllm_agent_hint.engine.gpu_cache import GpuCache
from vllm_agent_hint.engine.loads import LoadQueue
from vllm_agent_hint.engine.own_prompt_queue import OwnPromptQueue
from vllm_agent_hint.engine.waking import Waker
from vllm_agent_hint.hints import EditResult, EditStatus, EditType
from vllm_agent_hint.hookspecs import kv_management, kv_store
from vllm_agent_hint.pooling.adapters import why_no_store
from vllm_agent_hint.pooling.capability import (
    Operation,
    OperationHandle,
    Outcome,
    PoolingCounters,
    Residency,
    Span,
    SupportsSessionAwareKVManagement,
)
from vllm_agent_hint.pooling.manager import SessionAwarePoolingManager
from vllm_agent_hint.pooling.resumes import Resumes
from vllm_agent_hint.sessions.intent import Edit, SessionKey
from vllm_agent_hint.sessions.manager import SessionAwareManager
from vllm_agent_hint.sessions.session import LiveRequest
from vllm_agent_hint.settings import Settings

logger = logging.getLogger("vllm.agent_hint")

P = ParamSpec("P")


def _outlives_pooling(
    hook: Callable[Concatenate["RemoteSessions", P], None],
) -> Callable[Concatenate["RemoteSessions", P], None]:
    """Let no fault of ours reach vLLM or the session core: go on without the connector."""

    @wraps(hook)
    def guarded(self: "RemoteSessions", /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.reason:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception:
            self.drop(hook.__name__)

    return guarded


class NoAdapterError(Exception):
    """Nobody knows how to use a connector for sessions."""


class RemoteSessions:
    """One scheduler's sessions in its KV connector. A ``RemoteKV``.

    Args:
        scheduler: With the mixin laid over it.
        sam: Its session core.
        settings: Bounds.
    """

    def __init__(
        self,
        scheduler: Any,
        sam: SessionAwareManager,
        settings: Settings,
    ) -> None:
        self._scheduler = scheduler
        self._sam = sam
        self._cache = GpuCache(scheduler.kv_cache_manager, sam, scheduler.agent_hint.drop_sessions)
        self.reason = ""
        """Why the connector is not used any more; empty while it is."""
        self.counters = PoolingCounters()
        self.waker: Waker | None = None
        """Wakes the engine; None where that can't be done."""
        self._resumes = Resumes()
        self._prompts: Sequence[Mapping[str, Any]] = ()
        """Of the call whose edits are being started."""
        self.capability: SupportsSessionAwareKVManagement
        self.spm: SessionAwarePoolingManager | None = None
        direct = kv_management(scheduler.connector, settings)
        if direct is not None:
            self.loads = LoadQueue(scheduler, settings, self._cache.adopt, self.counters)
            self.own_prompts = OwnPromptQueue(scheduler, needs_tokens=False)
            self.capability = direct
            return
        store = kv_store(scheduler, scheduler.connector)
        if store is None:
            raise NoAdapterError(why_no_store(scheduler.connector))
        self.loads = LoadQueue(scheduler, settings, self._cache.adopt, self.counters)
        self.loads.on_load = self._resumes.note_load
        self.own_prompts = OwnPromptQueue(scheduler, needs_tokens=store.needs_tokens)
        self.capability = self.spm = SessionAwarePoolingManager(
            store, self._cache, self.loads, settings, self.counters, time.monotonic(), self.drop
        )

    # -- what the session core asks ------------------------------------------------------------

    def transfer(self, key: SessionKey, edit: Edit, done: Callable[[EditResult], None]) -> None:
        """See ``RemoteKV``."""
        span = Span(edit.start_token, edit.end_token)
        self._set_time()
        start = (
            self.capability.offload if edit.type is EditType.OFFLOAD else self.capability.prefetch
        )
        if edit.type is EditType.PREFETCH and self.spm is not None and self._prompts:
            ask_own = partial(self.own_prompts.ask, key, self._prompts)
            start = partial(self.spm.prefetch, ask_own=ask_own)
        handle = self._start(lambda: start(key, span))
        handle.when_done(lambda outcome: done(_result(edit, outcome)))

    @contextmanager
    def prompts_at_hand(self, prompts: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """While edits are started: the prompts with which their session will be back."""
        self._prompts = prompts
        try:
            yield
        finally:
            self._prompts = ()

    def evict(
        self, key: SessionKey, edit: Edit, done: Callable[[EditResult], None]
    ) -> Callable[[EditResult], None]:
        """See ``RemoteKV``."""
        self._set_time()
        self._drop_prefetches(key, "an evict of the session has overtaken it")
        span = Span(edit.start_token, edit.end_token)
        handle = self._start(lambda: self.capability.evict(key, span))
        return lambda local: handle.when_done(lambda outcome: done(_both(local, outcome)))

    def session_ended(self, key: SessionKey) -> None:
        """See ``RemoteKV``."""
        self._set_time()
        reason = "the session has ended"
        if self.spm is not None:
            self.spm.refuse_waiting(key, reason)
        self._drop_prefetches(key, reason)
        self._resumes.forget(key)

        def release() -> OperationHandle:
            self.capability.release(key)
            return OperationHandle()

        self._start(release)

    def _drop_prefetches(self, key: SessionKey, reason: str) -> None:
        if self.spm is not None:
            self.spm.refuse_waiting_prefetches(key, reason)
        self.own_prompts.drop(key, reason)
        self.loads.drop(key, reason)

    def _abort_all_prefetches(self, reason: str) -> None:
        if self.spm is not None:
            self.spm.refuse_waiting_prefetches(None, reason)
        self.own_prompts.abort_all(reason)
        self.loads.abort_all(reason)

    def keeps(self, key: SessionKey, now: float) -> bool:
        """See ``RemoteKV``."""
        return not self.reason and self.spm is not None and self.spm.keeps(key, now)

    def knows(self, key: SessionKey) -> bool:
        """Whether something of a session lies elsewhere, though it may never have been here."""
        if self.reason or self.spm is None:
            return False
        try:
            return self.spm.knows(key)
        except Exception:
            self.drop("asking whether a session is known")
            return False

    def _start(self, start: Callable[[], OperationHandle]) -> OperationHandle:
        if self.reason:
            return OperationHandle.ended(Outcome(EditStatus.FAILED, reason=self.reason))
        try:
            return start()
        except Exception:
            self.drop("asking the KV connector")
            return OperationHandle.ended(Outcome(EditStatus.FAILED, reason=self.reason))

    # -- what the scheduler reports ------------------------------------------------------------

    @_outlives_pooling
    def request_recorded(self, request: Any, live: LiveRequest) -> None:
        """A hinted request has succeeded and its context is recorded; it holds its blocks yet."""
        key = live.session.key
        if not isinstance(key, SessionKey) or live.session.is_freed:
            return
        self._resumes.forget(key)
        needs_tokens = self.spm is not None and self.spm.store.needs_tokens
        content = self._cache.content_of(request, with_tokens=needs_tokens)
        ttl = max((p.ttl for p in live.session.protections), default=0.0)
        self._set_time()
        if self.spm is not None:
            at_most = len(live.session.lineages)
            self.spm.register_cache(key, request.request_id, content, ttl, at_most=at_most)
        else:
            self.capability.register_cache(key, request.request_id, content, ttl)

    @_outlives_pooling
    def expect(self, key: SessionKey, seconds: float) -> None:
        """A session will be back in about so many seconds."""
        if self.spm is None or self.spm.why_not(Operation.PREFETCH):
            return
        found = self.spm.tracker.get(key)
        if found is not None:
            self._resumes.expect(key, found.latest.num_tokens, time.monotonic(), seconds)

    def _begin_expected_loads(self, now: float) -> None:
        assert self.spm is not None
        self.spm.now = now
        for key in self._resumes.take_due(now):
            session = self._sam.sessions.get(key)
            if session is not None and not session.live:
                self.spm.prefetch(key, Span(), is_guess=True)

    @_outlives_pooling
    def request_ends(self, request: Any) -> None:
        """Vllm ends a request, ours or not."""
        self.loads.ended(request)

    def request_freed(self, request_id: str) -> None:
        """Vllm has freed a request's blocks."""
        self.loads.freed(request_id)

    def before_schedule(self) -> None:
        """On the path of every step of an engine with a KV connector."""
        self._prepare_step()
        self.loads.end_given_up()

    def after_schedule(self) -> None:
        """The same, once vLLM has scheduled."""
        self._look_at_step()
        self.loads.end_given_up()

    @_outlives_pooling
    def _prepare_step(self) -> None:
        now = time.monotonic()
        if self.spm is not None:
            self.spm.now = now
        # Before the loads: what is known by now may begin to be loaded in this step.
        self.own_prompts.step()
        self.loads.before_schedule(now)
        if self.spm is not None:
            self.spm.step(now)

    @_outlives_pooling
    def _look_at_step(self) -> None:
        self.loads.after_schedule()

    @_outlives_pooling
    def look(self) -> None:
        """Whenever the engine looks whether there is work, also while it idles or is paused."""
        now = time.monotonic()
        if self.spm is not None:
            self.spm.now = now
        if self.spm is not None and now >= self.spm.next_keep_alive_at:
            self.spm.keep_alive(now)
        if now >= self._resumes.next_at:
            self._begin_expected_loads(now)
        if now >= self.loads.next_end_of_patience:
            self.loads.give_up_late_ones(now)
        if self.waker is not None:
            self.waker.set(self._next_due)

    @property
    def _next_due(self) -> float:
        keep_alive = math.inf if self.spm is None else self.spm.next_keep_alive_at
        return min(keep_alive, self.loads.next_end_of_patience, self._resumes.next_at)

    def residency(self, key: SessionKey) -> dict[str, int | None]:
        """Where a session's latest context is; plain data."""
        try:
            found = self.capability.query_residency(key)
        except Exception:
            self.drop("asking where a session is")
            found = Residency()
        return {"tokens": found.tokens, "local": found.local, "remote": found.remote}

    @property
    def num_prefetches_waiting(self) -> int:
        """See ``SessionAwarePoolingManager``."""
        return 0 if self.spm is None else self.spm.num_prefetches_waiting

    def statistics(self) -> dict[str, Any]:
        """Gauges as they are, events since the last time; plain data for msgpack."""
        taken = self.counters.take()
        tracker = None if self.spm is None else self.spm.tracker
        return {
            "remote_tracked_keys": 0 if tracker is None else tracker.num_tracked,
            "remote_shared_keys": 0 if tracker is None else tracker.num_shared,
            "prefetches_waiting": self.num_prefetches_waiting,
            "prefetches_loading": self.loads.num_loading,
            "remote_orphaned_keys": taken.orphaned_keys,
            "keep_alives": taken.keep_alives,
            "keep_alive_losses": taken.keep_alive_losses,
            "remote_evictions": taken.remote_evictions,
            "transfer_failures": taken.failures,
            "transfer_back_pressure": taken.back_pressure,
            "transfer_bytes": {
                "offload": taken.saved_tokens * self._cache.bytes_per_token,
                "prefetch": taken.loaded_tokens * self._cache.bytes_per_token,
            },
            "queue_seconds": list(taken.queue_seconds),
            "transfer_seconds": [list(one) for one in taken.transfer_seconds],
        }

    def pause_changed(self, *, is_paused: bool) -> None:
        """Before vLLM pauses: no load may hold a block then."""
        self._note_pause(is_paused=is_paused)
        self.loads.end_given_up()

    @_outlives_pooling
    def _note_pause(self, *, is_paused: bool) -> None:
        self.loads.is_paused = is_paused
        if is_paused:
            self._set_time()
            self._abort_all_prefetches("vLLM was paused")

    @_outlives_pooling
    def about_to_reset(self) -> None:
        """Before the prefix cache is emptied."""
        self._set_time()
        self._abort_all_prefetches("the prefix cache was reset")

    @property
    def wants_steps(self) -> bool:
        """Whether a step would bring something on that nothing else asks a step for."""
        if self.reason:
            return False
        if len(self.own_prompts) or self.loads.wants_steps:
            return True
        return self.spm is not None and self.spm.wants_steps

    def drop(self, where: str) -> None:
        """Go on without the connector: sessions are local from now on.

        At any moment, in the midst of what the scheduler does, too: see ``LoadQueue``.
        """
        logger.exception(
            "vllm-agent-hint: %s failed; sessions go on without the KV connector", where
        )
        self.reason = f"{where} failed, see the server's log"
        wishes = self.loads.close(self.reason)
        # What waits behind others first, so that it does not begin when those end.
        if self.spm is not None:
            _try_to(self.spm.abandon, self.reason)
        _try_to(self.own_prompts.abort_all, self.reason)
        for wish in wishes:
            _try_to(wish.handle.finish, Outcome.refused(self.reason))

    def _set_time(self) -> None:
        if self.spm is not None:
            self.spm.now = time.monotonic()


def _try_to(give_up: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
    """Whoever is called back may fail, too, and the others have to be told all the same."""
    try:
        give_up(*args, **kwargs)
    except Exception:
        logger.exception("vllm-agent-hint: giving up what waits for the KV connector failed")


def why_no_remote(scheduler: Any, settings: Settings) -> str:
    """Why sessions of a scheduler can't be kept elsewhere; empty if they can."""
    if not settings.pooling:
        return "offload and prefetch are off (VLLM_AGENT_HINT_POOLING=0)"
    connector = getattr(scheduler, "connector", None)
    if connector is None:
        return "no KV connector is in use"
    return ""


def _result(edit: Edit, outcome: Outcome) -> EditResult:
    return EditResult(
        type=edit.type,
        status=outcome.status,
        blocks=outcome.blocks,
        tokens=outcome.tokens,
        reason=outcome.reason,
    )


def _both(local: EditResult, remote: Outcome) -> EditResult:
    """What an evict has done here and elsewhere, as one result; the counts are the local ones."""
    changes: dict[str, Any] = {}
    reasons = [local.reason] if local.reason else []
    if remote.status is EditStatus.APPLIED and remote.blocks:
        reasons.append(f"{remote.blocks} blocks were deleted from the store")
        if local.status is EditStatus.MISSING:
            reasons.pop(0)
            changes = {"status": EditStatus.APPLIED, "tokens": remote.tokens}
    elif remote.status in (EditStatus.UNSUPPORTED, EditStatus.REJECTED):
        reasons.append(f"in the store its retention has ended: {remote.reason}")
    elif remote.status is EditStatus.FAILED:
        reasons.append(remote.reason)
        if local.status is EditStatus.APPLIED:
            changes = {"status": EditStatus.PARTIAL}
    return local.model_copy(update={**changes, "reason": "; ".join(reasons)})
