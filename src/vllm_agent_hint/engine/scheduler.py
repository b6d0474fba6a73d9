"""The scheduler mixin: tells SAM about requests at the boundaries that vLLM has anyway."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, wraps
from types import new_class
from typing import Any, Concatenate, ParamSpec

from vllm.v1.request import RequestStatus

from vllm_agent_hint.engine.edits import OPERATION_KEY, EditOperations
from vllm_agent_hint.engine.scheduler_stats import FIELD
from vllm_agent_hint.engine.statistics import take_statistics
from vllm_agent_hint.hints import AgentHintParams, HintError, parse_agent_hint
from vllm_agent_hint.hookspecs import release_policy
from vllm_agent_hint.kvcache.block import AgentKVCacheBlock
from vllm_agent_hint.kvcache.manager import (
    KVCacheManagerMixin,
    TrackedRequest,
    agent_kv_cache_manager,
    rebound,
)
from vllm_agent_hint.kvcache.pool import AgentBlockPool
from vllm_agent_hint.kvcache.queue import AgentFreeKVCacheBlockQueue
from vllm_agent_hint.sessions.intent import SessionIntent
from vllm_agent_hint.sessions.manager import SessionAwareManager
from vllm_agent_hint.settings import load_settings

logger = logging.getLogger("vllm.agent_hint")

HINT_KEY = "agent_hint"
_SUCCESSES = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)

P = ParamSpec("P")


def _outlives_sam(
    hook: Callable[Concatenate["AgentSchedulerMixin", P], None],
) -> Callable[Concatenate["AgentSchedulerMixin", P], None]:
    """Let no fault of the session core reach vLLM: drop it and go on as plain LRU."""

    @wraps(hook)
    def guarded(self: "AgentSchedulerMixin", /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self._sam is None:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception:
            self.drop_sessions(hook.__name__)

    return guarded


class AgentSchedulerMixin:
    """Laid over whatever scheduler class vLLM would have used.

    Every override calls ``super()`` exactly once and passes on what it got. With ``_sam`` None,
    each is that call and nothing else.
    """

    kv_cache_manager: Any
    requests: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._sam: SessionAwareManager | None = None
        self._tracked: dict[str, TrackedRequest] = {}
        self._operations = EditOperations()
        self._had_sessions = False
        """Whether there were sessions at the last statistics report."""
        self.agent_hint_reason = ""
        """Why hints have no effect; empty if they have."""
        modules = [sys.modules[c.__module__] for c in type(self).__mro__]
        with rebound(modules, "KVCacheManager", agent_kv_cache_manager):
            super().__init__(*args, **kwargs)
        try:
            self._attach()
        except Exception as error:
            self._sam = None
            self.agent_hint_reason = f"attaching to the scheduler failed: {error!r}"
        if self.agent_hint_reason:
            logger.warning("vllm-agent-hint: inactive (%s)", self.agent_hint_reason)

    def _attach(self) -> None:
        """Check what vLLM has built (the third ring of failing open), then start SAM."""
        manager = self.kv_cache_manager
        self.agent_hint_reason = _why_not(manager)
        if self.agent_hint_reason:
            if isinstance(manager.block_pool, AgentBlockPool):
                manager.block_pool.stand_down()
            return
        settings = load_settings()
        self._sam = SessionAwareManager(
            manager.block_pool,
            manager.group_layouts(),
            settings,
            time.monotonic(),
            release_policy(settings),
        )
        manager.on_served = self._request_served
        manager.on_fault = self.drop_sessions
        manager.tracked = self._tracked
        manager.block_pool.observer = self

    # -- requests ------------------------------------------------------------------------------

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """As stock; then read the hint, once."""
        is_known = request.request_id in self.requests
        super().add_request(request, *args, **kwargs)  # type: ignore[misc]
        params = request.sampling_params
        if params is None or not params.extra_args or is_known:
            return
        hint = params.extra_args.get(HINT_KEY)
        if hint is not None:
            self._track(request, hint)

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """As stock, after noting which requests the front end ends because they are complete.

        A stop string is found by the front end, which then aborts the request here. It names such
        a request twice (see ``frontend.stops``); stock takes the ids as a set.
        """
        if self._tracked and isinstance(request_ids, list):
            for request_id, times in Counter(request_ids).items():
                if times > 1 and request_id in self._tracked:
                    self._tracked[request_id].is_complete = True
        return super().finish_requests(request_ids, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Record what a request has computed before its blocks go."""
        if request.request_id in self._tracked:
            self._record_preempted(request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a request's context while it still holds its blocks."""
        if request.request_id in self._tracked:
            self._record_finished(request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _free_blocks(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """As stock, at once or after a transfer; then the request's own edits run."""
        super()._free_blocks(request, *args, **kwargs)  # type: ignore[misc]
        if request.request_id in self._tracked:
            self._conclude(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As stock, after expiring what is due. On the path of every step: one comparison."""
        self._expire_due()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _expire_due(self) -> None:
        if self._sam is not None:
            now = time.monotonic()
            if now >= self._sam.next_tick_at:
                self._tick(now)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """As stock, with our part in the field that ``statistics`` has added."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None and hasattr(stats, FIELD):
            self._report(stats)
        return stats

    @_outlives_sam
    def _report(self, stats: Any) -> None:
        assert self._sam is not None
        has_sessions = bool(self._sam.sessions)
        if has_sessions or self._had_sessions:
            setattr(stats, FIELD, self.agent_hint_statistics())
        self._had_sessions = has_sessions

    @_outlives_sam
    def _track(self, request: Any, hint: Any) -> None:
        assert self._sam is not None
        try:
            params = hint if isinstance(hint, AgentHintParams) else parse_agent_hint(hint)
        except HintError as error:
            # The front end refuses such a hint; this one came by a route that has none.
            logger.warning("vllm-agent-hint: ignored a hint (%s)", error)
            return
        intent = SessionIntent.from_agent_hint(params, cache_salt=request.cache_salt)
        if intent.is_empty or request.request_id not in self.requests:
            return
        live = self._sam.request_added(intent)
        if live is not None:
            self._tracked[request.request_id] = TrackedRequest(live)

    @_outlives_sam
    def _request_served(self, request: Any, groups: Sequence[Sequence[Any]]) -> None:
        assert self._sam is not None
        if self._sam.sessions:
            self.kv_cache_manager.note_hits(self._sam, request, groups)

    @_outlives_sam
    def _record_preempted(self, request: Any) -> None:
        assert self._sam is not None
        self._sam.request_preempted(
            self._tracked[request.request_id].live,
            self.kv_cache_manager.recorded_prefixes(request),
            time.monotonic(),
        )

    @_outlives_sam
    def _record_finished(self, request: Any) -> None:
        assert self._sam is not None
        self._sam.request_finished(
            self._tracked[request.request_id].live,
            self.kv_cache_manager.recorded_prefixes(request),
            time.monotonic(),
            succeeded=_has_succeeded(request, self._tracked[request.request_id]),
        )

    @_outlives_sam
    def _conclude(self, request: Any) -> None:
        assert self._sam is not None
        tracked = self._tracked.pop(request.request_id)
        intent = tracked.live.intent
        if not intent.edits or intent.key is None:
            return
        all_succeeded = self._operations.request_ended(
            request.sampling_params.extra_args.get(OPERATION_KEY),
            succeeded=_has_succeeded(request, tracked),
        )
        if all_succeeded:
            self._sam.apply_edits(intent.key, intent.edits, time.monotonic())
        elif all_succeeded is False:
            self._sam.reject_edits(intent.edits, "the request did not succeed")

    @_outlives_sam
    def _tick(self, now: float) -> None:
        assert self._sam is not None
        self._sam.tick(now)

    # -- what the pool reports -------------------------------------------------------------------

    @_outlives_sam
    def blocks_reused(self, block_ids: Sequence[int]) -> None:
        """See ``PoolObserver``."""
        assert self._sam is not None
        self._sam.ledger.blocks_reused(block_ids)

    @_outlives_sam
    def block_moved(self, old_id: int, new_id: int) -> None:
        """See ``PoolObserver``."""
        assert self._sam is not None
        self._sam.ledger.block_moved(old_id, new_id)

    @_outlives_sam
    def pool_short(self, num_blocks: int) -> None:
        """See ``PoolObserver``. The one other place where the clock is read."""
        assert self._sam is not None
        self._sam.release_due(time.monotonic(), num_blocks)

    @_outlives_sam
    def pool_reset(self) -> None:
        """See ``PoolObserver``."""
        assert self._sam is not None
        self._sam.reset(time.monotonic())

    # -- for the front end -----------------------------------------------------------------------

    @property
    def agent_hint_sam(self) -> SessionAwareManager | None:
        """The session core, or None if hints have no effect here."""
        return self._sam

    def agent_hint_statistics(self) -> dict[str, Any] | None:
        """See ``take_statistics``; each event is handed out once."""
        if self._sam is None:
            return None
        return take_statistics(self._sam, self.kv_cache_manager.block_pool)

    def drop_sessions(self, where: str) -> None:
        """Go on without sessions: no block is marked, the free queue is plain LRU."""
        logger.exception(
            "vllm-agent-hint: %s failed; sessions are dropped and vLLM goes on with plain LRU",
            where,
        )
        self.agent_hint_reason = f"{where} failed, see the log"
        self._sam = None
        self._tracked.clear()
        self.kv_cache_manager.on_served = None
        pool = self.kv_cache_manager.block_pool
        pool.observer = None
        pool.drop_all_meta()


def _has_succeeded(request: Any, tracked: TrackedRequest) -> bool:
    return tracked.is_complete or request.status in _SUCCESSES


def _why_not(manager: Any) -> str:
    """Why retention can't work with what the scheduler has built; empty if it can."""
    if not isinstance(manager, KVCacheManagerMixin):
        return f"the scheduler built its own KV cache manager, {type(manager).__name__}"
    if getattr(manager.kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        return "HiSparse orders the free queue itself"
    pool = manager.block_pool
    if not isinstance(pool, AgentBlockPool):
        return f"the coordinator built its own block pool, {type(pool).__name__}"
    if not pool.enable_caching:
        return "prefix caching is off"
    queue = pool.free_block_queue
    if type(queue) is not AgentFreeKVCacheBlockQueue:
        return f"the pool has another free queue, {type(queue).__name__}"
    if any(type(block) is not AgentKVCacheBlock for block in pool.blocks):
        return "the pool holds blocks of another class"
    if queue.num_free_blocks != len(pool.blocks) - 1:
        return "the pool does not start with every block free"
    return ""


@cache
def agent_scheduler(base: type) -> type:
    """``base`` with the mixin laid over it."""
    return new_class("AgentHint" + base.__name__, (AgentSchedulerMixin, base))
