"""What the scheduler tells the session core, and what happens when the core fails."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

from vllm.v1.request import RequestStatus

from vllm_agent_hint.engine.arrival import ArrivedHint, take_hint
from vllm_agent_hint.engine.capture import TrafficCapture
from vllm_agent_hint.engine.completion import completed
from vllm_agent_hint.engine.edits import EditOperations
from vllm_agent_hint.engine.fail_open import answers
from vllm_agent_hint.engine.operations import OperationStore
from vllm_agent_hint.engine.preconditions import why_unfit
from vllm_agent_hint.engine.remote import NoAdapterError, RemoteSessions, why_no_remote
from vllm_agent_hint.engine.scheduler_stats import FIELD
from vllm_agent_hint.engine.statistics import MAX_SLICES, take_hinted_tokens, take_statistics
from vllm_agent_hint.engine.traffic import TrafficRecorder
from vllm_agent_hint.hints import (
    EditResult,
    EditStatus,
    HintError,
    RetentionResult,
    parse_agent_hint,
)
from vllm_agent_hint.hookspecs import retention_policy
from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.kvcache.manager import TrackedRequest
from vllm_agent_hint.kvcache.pool import AgentBlockPool
from vllm_agent_hint.sessions.facts import TurnFacts
from vllm_agent_hint.sessions.intent import SessionIntent, SessionKey
from vllm_agent_hint.sessions.manager import SessionAwareManager
from vllm_agent_hint.sessions.remote import NoRemote
from vllm_agent_hint.settings import load_settings
from vllm_agent_hint.stamp import DEFAULT_TENANT

logger = logging.getLogger("vllm.agent_hint")

_SUCCESSES: Final = {
    getattr(RequestStatus, name)
    for name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
    if hasattr(RequestStatus, name)
}


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
        """Requests with a hint, and of recognised conversations, by request id, until their blocks
        are freed."""
        self.outcomes = OperationStore(max_operations=1)
        """What became of edits, for those who ask. Where hints have no effect, nothing does."""
        self.operations = EditOperations(self.outcomes)
        self.unanswered: set[Future[list[EditResult]]] = set()
        """Of management calls whose edits are not done yet."""
        self.remote: RemoteSessions | None = None
        """Sessions in the scheduler's KV connector, if it has one that can be used."""
        self.traffic: TrafficRecorder | None = None
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
        self.reason = why_unfit(manager, self._parallel_config)
        if self.reason:
            pool = getattr(manager, "block_pool", None)
            if isinstance(pool, AgentBlockPool):
                pool.stand_down()
            return
        settings = load_settings()
        self.outcomes = OperationStore(max_operations=settings.max_operations)
        self.operations = EditOperations(self.outcomes)
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

    @answers(None)
    def request_added(self, request: Any, arrived: ArrivedHint) -> None:
        """A request that carried a hint has been added."""
        assert self.sam is not None
        stamp = arrived.stamp
        if arrived.hint is None:
            if self.recognizes:
                self.unhinted_added(request, DEFAULT_TENANT if stamp is None else stamp.tenant)
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
            self.operations.finish(stamp, [], time.monotonic())
            return
        self.has_news = True
        self.operations.request_added(stamp, [edit.type for edit in intent.edits])
        now = time.monotonic()
        live = self.sam.request_added(intent, now)
        if live is not None:
            self.tracked[request.request_id] = TrackedRequest(live, stamp)
        elif self.operations.request_ended(stamp, now, succeeded=False) is not None:
            reason = "there is no room for another session"
            self.operations.finish(
                stamp,
                self.sam.reject_edits(intent.edits, reason),
                now,
                retention=RetentionResult(
                    status=EditStatus.REJECTED, bounds=["max_sessions"], reason=reason
                ),
            )

    @property
    def recognizes(self) -> bool:
        """Whether to tell of requests without a hint, too."""
        return self.sam is not None and self.sam.recognizes

    @answers(None)
    def unhinted_added(self, request: Any, tenant: str = DEFAULT_TENANT) -> None:
        """A request without a hint has been added, which may go on with an earlier one."""
        assert self.sam is not None
        if request.request_id in self.manager.loads:
            return
        hashes = max(self.manager.prompt_hashes(request), key=len)
        live = self.sam.unhinted_added(hashes, time.monotonic(), tenant=tenant)
        if live is not None:
            self.has_news = True
            self.tracked[request.request_id] = TrackedRequest(live)

    def requests_complete(self, request_ids: list[str]) -> None:
        """Note which of the requests that the front end ends are complete; see ``completed``."""
        for request_id in completed(request_ids):
            self.request_complete(request_id)

    def request_complete(self, request_id: str) -> None:
        """However the request ends now, it has come to a regular end."""
        if request_id in self.tracked:
            self.tracked[request_id].is_complete = True

    @answers(None)
    def request_served(self, request: Any, groups: Sequence[Sequence[Any]]) -> None:
        """A request comes to run, on these cached blocks."""
        assert self.sam is not None
        if not self.sam.sessions:
            return
        tracked = self.tracked.get(request.request_id)
        if tracked is not None and not tracked.live.is_placed:
            self.sam.request_scheduled(tracked.live, self.manager.prompt_hashes(request))
        self.manager.note_hits(self.sam, request, groups)

    @answers(None)
    def request_preempted(self, request: Any) -> None:
        """A hinted request is about to lose its blocks."""
        assert self.sam is not None
        self.sam.request_preempted(
            self.tracked[request.request_id].live,
            self.manager.recorded_prefixes(request),
            time.monotonic(),
        )

    @answers(None)
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

    @answers(None)
    def run_edits(self, request: Any, tracked: TrackedRequest) -> None:
        """A hinted request is over, its blocks freed or in the hands of a connector."""
        assert self.sam is not None
        if tracked.is_conversation:
            return
        intent = tracked.live.intent
        all_succeeded = self.operations.request_ended(
            tracked.stamp, time.monotonic(), succeeded=_has_succeeded(request, tracked)
        )
        if all_succeeded is None:
            return

        def note(results: list[EditResult]) -> None:
            self.operations.finish(
                tracked.stamp, results, time.monotonic(), retention=tracked.retention
            )

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

    @answers(None)
    def pause_changed(self, *, is_paused: bool) -> None:
        """Vllm pauses or goes on. No edit stays open while it is paused."""
        assert self.sam is not None
        self.is_paused = is_paused
        if self.sam.num_open_edits:
            self.sam.finish_releases()

    # -- facts about a finished turn -------------------------------------------------------------

    @answers(False)
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
        if self.traffic is not None:
            self.traffic.turn_ended(operation_id, facts)
        return is_of_use

    # -- all traffic, while somebody records it --------------------------------------------------

    def record_traffic(self, capture: TrafficCapture) -> None:
        """Record all traffic in a capture from now on."""
        self.traffic = TrafficRecorder(capture, end=self.end_traffic)

    def is_load(self, request: Any) -> bool:
        """Whether a request is one of ours, which brings what a prefetch has asked for."""
        return self.remote is not None and request.request_id in self.remote.loads

    def end_traffic(self) -> None:
        """Record no more."""
        self.traffic = None

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

    @answers(None)
    def tick(self, now: float) -> None:
        """Expire what has fallen due."""
        assert self.sam is not None
        self.sam.tick(now)
        self.slices.append(time.monotonic() - now)

    # -- what the pool reports -------------------------------------------------------------------

    @answers(None)
    def blocks_reused(self, block_ids: Sequence[int]) -> None:
        """See ``PoolObserver``."""
        assert self.sam is not None
        self.sam.ledger.blocks_reused(block_ids)

    @answers(None)
    def block_moved(self, old_id: int, new_id: int) -> None:
        """See ``PoolObserver``."""
        assert self.sam is not None
        self.sam.ledger.block_moved(old_id, new_id)

    @answers(None)
    def pool_short(self, num_blocks: int) -> None:
        """See ``PoolObserver``. The one other place where the clock is read."""
        assert self.sam is not None
        self.sam.release_due(time.monotonic(), num_blocks)

    @answers(0)
    def blocks_wanted(self, zone: Zone, num_blocks: int) -> int:
        """See ``PoolObserver``."""
        assert self.sam is not None
        return self.sam.give_way(time.monotonic(), num_blocks, leased=zone is Zone.TTL)

    @answers(None)
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
        self.traffic = None
        self.manager.on_served = None
        pool = self.manager.block_pool
        pool.observer = None
        pool.drop_all_meta()


def _has_succeeded(request: Any, tracked: TrackedRequest) -> bool:
    return tracked.is_complete or request.status in _SUCCESSES
