"""What the scheduler tells the session core, and what happens when the core fails."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from vllm.v1.request import RequestStatus

from vllm_agent_hint.engine.arrival import ArrivedHint, take_hint
from vllm_agent_hint.engine.capture import TrafficCapture
from vllm_agent_hint.engine.edits import EditOperations
from vllm_agent_hint.engine.operations import OperationStore
from vllm_agent_hint.engine.origins import origin_of
from vllm_agent_hint.engine.remote import NoAdapterError, RemoteSessions, why_no_remote
from vllm_agent_hint.engine.scheduler_stats import FIELD
from vllm_agent_hint.engine.statistics import MAX_SLICES, take_hinted_tokens, take_statistics
from vllm_agent_hint.hints import (
    EditResult,
    EditStatus,
    HintError,
    RetentionResult,
    parse_agent_hint,
)
from vllm_agent_hint.hookspecs import retention_policy
from vllm_agent_hint.kvcache.block import AgentKVCacheBlock, Zone
from vllm_agent_hint.kvcache.manager import KVCacheManagerMixin, TrackedRequest
from vllm_agent_hint.kvcache.pool import AgentBlockPool
from vllm_agent_hint.kvcache.queue import AgentFreeKVCacheBlockQueue
from vllm_agent_hint.sessions.facts import TurnFacts
from vllm_agent_hint.sessions.intent import SessionIntent, SessionKey
from vllm_agent_hint.sessions.manager import SessionAwareManager
from vllm_agent_hint.sessions.remote import NoRemote
from vllm_agent_hint.settings import load_settings
from vllm_agent_hint.stamp import DEFAULT_TENANT, Stamp

logger = logging.getLogger("vllm.agent_hint")

_SUCCESSES: Final = {
    getattr(RequestStatus, name)
    for name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
    if hasattr(RequestStatus, name)
}

P = ParamSpec("P")
T = TypeVar("T")


def _answers(
    otherwise: T,
) -> Callable[
    [Callable[Concatenate["EngineHooks", P], T]], Callable[Concatenate["EngineHooks", P], T]
]:
    """Let no fault of the session core reach vLLM: drop it and go on as plain LRU.

    Args:
        otherwise: What the hook answers without it.
    """

    def guard(
        hook: Callable[Concatenate["EngineHooks", P], T],
    ) -> Callable[Concatenate["EngineHooks", P], T]:
        @wraps(hook)
        def guarded(self: "EngineHooks", /, *args: P.args, **kwargs: P.kwargs) -> T:
            if self.sam is None:
                return otherwise
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                self.drop_sessions(hook.__name__)
                return otherwise

        return guarded

    return guard


_outlives_sam = _answers(None)


def _spares_the_engine(
    hook: Callable[Concatenate["EngineHooks", TrafficCapture, float, P], None],
) -> Callable[Concatenate["EngineHooks", P], None]:
    """Record traffic while somebody reads it; a fault ends the capture and nothing else."""

    @wraps(hook)
    def guarded(self: "EngineHooks", /, *args: P.args, **kwargs: P.kwargs) -> None:
        capture = self.capture
        if capture is None:
            return
        now = time.monotonic()
        try:
            if capture.has_lapsed(now):
                self.capture = None
            else:
                hook(self, capture, now, *args, **kwargs)
        except Exception:
            self.capture = None
            logger.exception("vllm-agent-hint: recording traffic failed; the capture is over")

    return guarded


class EngineHooks:
    """Between one scheduler and one SAM. Also the observer of the scheduler's block pool.

    Args:
        manager: The KV cache manager that the scheduler has built.
        parallel_config: vLLM's; None where it is not known.
    """

    def __init__(self, manager: Any, parallel_config: Any = None) -> None:
        self.manager = manager
        self._parallel_config = parallel_config
        self.sam: SessionAwareManager | None = None
        self.reason = ""
        """Why hints have no effect; empty if they have."""
        self.tracked: dict[str, TrackedRequest] = {}
        """Hinted requests by request id, until their blocks are freed."""
        self.operations = EditOperations()
        self.outcomes = OperationStore(max_operations=1)
        """What became of them, for those who ask. Where hints have no effect, nothing does."""
        self.unanswered: set[Future[list[EditResult]]] = set()
        """Of management calls whose edits are not done yet."""
        self.remote: RemoteSessions | None = None
        """Sessions in the scheduler's KV connector, if it has one that can be used."""
        self.capture: TrafficCapture | None = None
        """Records all traffic, unhinted too; None while nobody has asked for it."""
        self.is_paused = False
        """Whether no step is to be expected."""
        self.has_news = True
        """Whether the next statistics report can differ from the last."""
        self.slices: deque[float] = deque(maxlen=MAX_SLICES)
        """Seconds spent in each slice of expiry since the last report."""
        self._has_named_foreign_stamps = False
        try:
            self._attach()
        except Exception as error:
            self.sam = None
            self.reason = f"attaching to the scheduler failed: {error!r}"
        if self.reason:
            logger.warning("vllm-agent-hint: inactive (%s)", self.reason)

    def _attach(self) -> None:
        """Check what vLLM has built (the third ring of failing open), then start SAM."""
        manager = self.manager
        self.reason = _why_not(manager) or _why_not_alone(self._parallel_config)
        if self.reason:
            pool = getattr(manager, "block_pool", None)
            if isinstance(pool, AgentBlockPool):
                pool.stand_down()
            return
        settings = load_settings()
        self.outcomes = OperationStore(max_operations=settings.max_operations)
        if settings.shadow:
            manager.keep_stock_order()
        self.sam = SessionAwareManager(
            manager.block_pool,
            manager.group_layouts(),
            settings,
            time.monotonic(),
            retention_policy(settings),
        )
        manager.on_served = self.request_served
        manager.on_fault = self.drop_sessions
        manager.tracked = self.tracked
        manager.block_pool.observer = self

    def attach_connector(self, scheduler: Any) -> None:
        """Use the scheduler's KV connector for sessions; if that can't be, they are local."""
        if self.sam is None:
            return
        settings = load_settings()
        try:
            reason = why_no_remote(scheduler, settings)
            if not reason:
                remote = RemoteSessions(scheduler, self.sam, settings)
                self.manager.loads = remote.loads
                self.remote = self.sam.remote = remote
        except NoAdapterError as error:
            reason = str(error)
        except Exception as error:
            self.remote = None
            reason = f"using its KV connector failed: {error!r}"
        if reason:
            self.sam.remote = NoRemote(reason)
            logger.info("vllm-agent-hint: offload and prefetch are unsupported (%s)", reason)

    # -- requests ------------------------------------------------------------------------------

    def take_hint(self, request: Any) -> ArrivedHint | None:
        """Take a new request's hint off it, also where it will have no effect."""
        try:
            arrived = take_hint(request)
        except Exception:
            if self.sam is not None:
                self.drop_sessions("taking a hint off a request")
            return None
        if arrived is not None and arrived.is_foreign and not self._has_named_foreign_stamps:
            self._has_named_foreign_stamps = True
            logger.warning(
                "vllm-agent-hint: ignored a hint whose signature is wrong: the front end that sent "
                "it has another VLLM_AGENT_HINT_SECRET than this engine, or one of them has none; "
                "set the same one for both (said once)"
            )
        return arrived

    @_outlives_sam
    def request_added(self, request: Any, arrived: ArrivedHint) -> None:
        """A request that carried a hint has been added."""
        assert self.sam is not None
        stamp = arrived.stamp
        if arrived.hint is None:
            return
        try:
            wanted = parse_agent_hint(arrived.hint)
        except HintError as error:
            # The front end refuses such a hint; this one came by a route that has none.
            logger.warning("vllm-agent-hint: ignored a hint (%s)", error)
            return
        intent = SessionIntent.from_agent_hint(
            wanted,
            tenant=stamp.tenant if stamp is not None else DEFAULT_TENANT,
            cache_salt=request.cache_salt,
            block_size=self.manager.logical_block_size,
            is_sibling=stamp is not None and stamp.engine_requests > 1,
        )
        if intent.is_empty:
            self._note_outcome(stamp, [])
            return
        self.has_news = True
        self.operations.request_added(stamp)
        if stamp is not None:
            types = [edit.type for edit in intent.edits]
            self.outcomes.open(stamp.operation_id, stamp.tenant, types)
        live = self.sam.request_added(intent, time.monotonic())
        if live is not None:
            self.tracked[request.request_id] = TrackedRequest(live, stamp)
        elif self._count_end(stamp, succeeded=False) is not None:
            reason = "there is no room for another session"
            self._note_outcome(
                stamp,
                self.sam.reject_edits(intent.edits, reason),
                retention=RetentionResult(
                    status=EditStatus.REJECTED, bounds=["max_sessions"], reason=reason
                ),
            )

    def requests_complete(self, request_ids: list[str]) -> None:
        """Note requests that the front end ends because they are complete.

        A stop string is found by the front end, which then aborts the request here. It names such
        a request twice (see ``frontend.stops``); stock takes the ids as a set.
        """
        for request_id in _named_twice(request_ids):
            self.request_complete(request_id)

    def request_complete(self, request_id: str) -> None:
        """However the request ends now, it has come to a regular end."""
        if request_id in self.tracked:
            self.tracked[request_id].is_complete = True

    @_outlives_sam
    def request_served(self, request: Any, groups: Sequence[Sequence[Any]]) -> None:
        """A request comes to run, on these cached blocks."""
        assert self.sam is not None
        if not self.sam.sessions:
            return
        tracked = self.tracked.get(request.request_id)
        if tracked is not None and not tracked.live.is_placed:
            self.sam.request_scheduled(tracked.live, self.manager.prompt_hashes(request))
        self.manager.note_hits(self.sam, request, groups)

    @_outlives_sam
    def request_preempted(self, request: Any) -> None:
        """A hinted request is about to lose its blocks."""
        assert self.sam is not None
        self.sam.request_preempted(
            self.tracked[request.request_id].live,
            self.manager.recorded_prefixes(request),
            time.monotonic(),
        )

    @_outlives_sam
    def request_ended(self, request: Any) -> None:
        """A hinted request has ended and still holds its blocks."""
        assert self.sam is not None
        tracked = self.tracked[request.request_id]
        tracked.retention = self.sam.request_finished(
            tracked.live,
            self.manager.recorded_prefixes(request),
            time.monotonic(),
            succeeded=_has_succeeded(request, tracked),
            output_tokens=request.num_output_tokens,
            operation_id="" if tracked.stamp is None else tracked.stamp.operation_id,
        )
        if self.remote is not None and _has_succeeded(request, tracked):
            self.remote.request_recorded(request, tracked.live)

    @_outlives_sam
    def run_edits(self, request: Any, tracked: TrackedRequest) -> None:
        """A hinted request is over, its blocks freed or in the hands of a connector."""
        assert self.sam is not None
        intent = tracked.live.intent
        all_succeeded = self._count_end(tracked.stamp, succeeded=_has_succeeded(request, tracked))
        if all_succeeded is None:
            return
        note = partial(self._note_outcome, tracked.stamp, retention=tracked.retention)
        if intent.key is None:
            note([])
        elif all_succeeded:
            self.sam.start_edits(intent.key, intent.edits, time.monotonic(), note)
            if self.remote is not None and intent.resumes_in is not None:
                self.remote.expect(intent.key, intent.resumes_in)
            if self.is_paused:
                self.sam.finish_releases()
        else:
            note(self.sam.reject_edits(intent.edits, "the request did not succeed"))

    def _count_end(self, stamp: Stamp | None, *, succeeded: bool) -> bool | None:
        """See ``EditOperations.request_ended``. What waits for others does so for a while only."""
        all_succeeded = self.operations.request_ended(stamp, succeeded=succeeded)
        if stamp is not None and self.operations.is_waiting(stamp):
            self.outcomes.fall_silent(stamp.operation_id, stamp.tenant, time.monotonic())
        return all_succeeded

    def _note_outcome(
        self,
        stamp: Stamp | None,
        results: Sequence[EditResult],
        *,
        retention: RetentionResult | None = None,
    ) -> None:
        if stamp is not None:
            plain = None if retention is None else retention.model_dump(mode="json")
            now = time.monotonic()
            self.outcomes.finish(stamp.operation_id, stamp.tenant, results, plain, now)

    @property
    def wants_steps(self) -> bool:
        """Whether edits wait to be done although no request is there.

        Never while the engine is paused: a pause waits until nothing wants a step. What has
        expired can wait for the next step, whenever that is.
        """
        if self.sam is None or self.is_paused:
            return False
        if self.sam.num_open_edits and len(self.sam.releases):
            return True
        return self.remote is not None and self.remote.wants_steps

    @_outlives_sam
    def pause_changed(self, *, is_paused: bool) -> None:
        """Vllm pauses or goes on. No edit stays open while it is paused."""
        assert self.sam is not None
        self.is_paused = is_paused
        if self.sam.num_open_edits:
            self.sam.finish_releases()

    # -- all traffic, while somebody records it --------------------------------------------------

    @_spares_the_engine
    def traffic_arrived(
        self, capture: TrafficCapture, now: float, request: Any, arrived: ArrivedHint | None
    ) -> None:
        """A request has been added, with or without a hint."""
        capture.request_added(request.request_id, origin_of(request, arrived), now)

    @_spares_the_engine
    def traffic_complete(self, capture: TrafficCapture, now: float, request_ids: list[str]) -> None:
        """See ``requests_complete``."""
        for request_id in _named_twice(request_ids):
            capture.request_complete(request_id)

    @_spares_the_engine
    def traffic_ended(self, capture: TrafficCapture, now: float, request: Any) -> None:
        """A request is over. O(blocks of its prompt)."""
        num_blocks = request.num_prompt_tokens // capture.block_size
        capture.request_ended(
            request.request_id,
            request.block_hashes[:num_blocks],
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            finish=str(request.get_finished_reason()),
            now=now,
        )

    @_spares_the_engine
    def traffic_explained(
        self, capture: TrafficCapture, now: float, operation_id: str, facts: TurnFacts
    ) -> None:
        """See ``turn_facts``."""
        capture.turn_ended(operation_id, facts)

    # -- facts about a finished turn -------------------------------------------------------------

    @_answers(False)
    def turn_facts(
        self, key: SessionKey, operation_id: str, facts: TurnFacts, now: float, *, told: bool
    ) -> bool:
        """How a turn ended; late, twice or never.

        Args:
            key: The session.
            operation_id: The turn; empty for the session's last.
            facts: Of it.
            now: Monotonic seconds.
            told: Whether a client says so; otherwise the front end has seen it.

        Returns:
            Whether it was of use.
        """
        assert self.sam is not None
        is_of_use = self.sam.turn_ended(key, operation_id, facts.ended, facts.tools, now, told=told)
        if self.capture is not None:
            self.traffic_explained(operation_id, facts)
        return is_of_use

    # -- time ----------------------------------------------------------------------------------

    def expire_due(self) -> None:
        """On the path of every step: reads the clock and compares."""
        if self.sam is not None:
            try:
                now = time.monotonic()
                if now >= self.sam.next_tick_at:
                    self.tick(now)
            except Exception:
                self.drop_sessions("expire_due")

    @_outlives_sam
    def tick(self, now: float) -> None:
        """Expire what has fallen due."""
        assert self.sam is not None
        self.sam.tick(now)
        self.slices.append(time.monotonic() - now)

    # -- what the pool reports -------------------------------------------------------------------

    @_outlives_sam
    def blocks_reused(self, block_ids: Sequence[int]) -> None:
        """See ``PoolObserver``."""
        assert self.sam is not None
        self.sam.ledger.blocks_reused(block_ids)

    @_outlives_sam
    def block_moved(self, old_id: int, new_id: int) -> None:
        """See ``PoolObserver``."""
        assert self.sam is not None
        self.sam.ledger.block_moved(old_id, new_id)

    @_outlives_sam
    def pool_short(self, num_blocks: int) -> None:
        """See ``PoolObserver``. The one other place where the clock is read."""
        assert self.sam is not None
        self.sam.release_due(time.monotonic(), num_blocks)

    @_answers(0)
    def blocks_wanted(self, zone: Zone, num_blocks: int) -> int:
        """See ``PoolObserver``."""
        assert self.sam is not None
        return self.sam.give_way(time.monotonic(), num_blocks, leased=zone is Zone.TTL)

    @_outlives_sam
    def pool_reset(self) -> None:
        """See ``PoolObserver``."""
        assert self.sam is not None
        self.sam.reset(time.monotonic())

    # -- for the front end -----------------------------------------------------------------------

    def report(self, stats: Any) -> None:
        """Put our part into a ``SchedulerStats``; for when ``has_news``.

        The first report says that there are no sessions, and so does the last one after a fault.
        """
        if isinstance(getattr(self.manager, "block_pool", None), AgentBlockPool):
            try:
                taken = self.statistics()
                taken["prompt_tokens"] = take_hinted_tokens(self.manager)
                setattr(stats, FIELD, taken)
            except Exception:
                self.drop_sessions("report")
                return
        self.has_news = self.sam is not None and bool(self.sam.sessions or self.tracked)

    def statistics(self) -> dict[str, Any]:
        """See ``take_statistics``; each event is handed out once."""
        taken = take_statistics(self.sam, self.manager.block_pool, self.slices)
        if self.remote is not None:
            taken["remote"] = self.remote.statistics()
        return taken

    def drop_sessions(self, where: str) -> None:
        """Go on without sessions: no block is marked, the free queue is plain LRU."""
        logger.exception(
            "vllm-agent-hint: %s failed; sessions are dropped and vLLM goes on with plain LRU",
            where,
        )
        self.reason = f"{where} failed, see the log"
        self.sam = None
        if self.remote is not None:
            self.remote.drop(where)
        self.has_news = True
        self.outcomes.abandon(self.reason, time.monotonic())
        for answer in list(self.unanswered):
            answer.set_exception(RuntimeError(self.reason))
        self.tracked.clear()
        self.capture = None
        self.manager.on_served = None
        pool = self.manager.block_pool
        pool.observer = None
        pool.drop_all_meta()


def _named_twice(request_ids: list[str]) -> list[str]:
    return [request_id for request_id, times in Counter(request_ids).items() if times > 1]


def _has_succeeded(request: Any, tracked: TrackedRequest) -> bool:
    return tracked.is_complete or request.status in _SUCCESSES


def _why_not_alone(parallel_config: Any) -> str:
    """Why this scheduler must not decide by its own clock; empty if it may."""
    backend = getattr(parallel_config, "distributed_executor_backend", None)
    if backend == "external_launcher" and parallel_config.world_size > 1:
        return (
            "with external_launcher every rank has a scheduler of its own and all must decide the "
            "same, which expiry by the clock can't promise"
        )
    return ""


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
