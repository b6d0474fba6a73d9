"""Load-only requests: content comes into the GPU cache through the scheduler's own path.

A load is a request that vLLM schedules like any other whose KV lies in a connector, with hashes
instead of a prompt. It allocates blocks, waits for the connector and has them cached; then it is
taken out before the model could run it. It is never more than a guest: it begins only when no
request waits and enough unprotected blocks are free, and it is withdrawn if it has not begun.

Loads are taken out between two calls of the scheduler only: in the midst of ``schedule`` one may be
in no queue, in the midst of ``finish_requests`` it may be next in line. Whoever has to end them at
any moment, because something has failed, gives them up, and they are taken out at the next one
that is safe.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from vllm.v1.request import RequestStatus

from vllm_agent_hint.hints import EditStatus
from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.pooling.capability import Content, Outcome, PoolingCounters
from vllm_agent_hint.pooling.probe import request_of
from vllm_agent_hint.pooling.reasons import STORE_LOST_IT
from vllm_agent_hint.pooling.store import Wish
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.settings import Settings

logger = logging.getLogger("vllm.agent_hint")

LOAD_ID_PREFIX: Final = "agent-hint-load-"
_LOOK_AGAIN_SECONDS: Final = 0.2
LOWEST_PRIORITY: Final = 2**31 - 1
_WAITS: Final = RequestStatus.WAITING_FOR_REMOTE_KVS


class Adoption(Protocol):
    """Records what has been brought for a session.

    ``local_tokens`` were there before.
    """

    def __call__(self, wish: Wish, local_tokens: int) -> None: ...


@dataclass(eq=False, slots=True)
class _Load:
    """One load-only request.

    Args:
        request: vLLM's.
        content: What it brings.
        wishes: Who wants it; nobody any more if their sessions have ended meanwhile.
        began_at: Monotonic seconds.
        local_tokens: The prefix that was there already.
        verdict: What the connector has said of it: nothing yet, ``"loads"``, ``"later"``,
            ``"nothing"`` or ``"not this way"``.
    """

    request: Any
    content: Content
    wishes: list[Wish]
    began_at: float
    local_tokens: int = 0
    verdict: str = ""


class LoadQueue:
    """Loads that wait, and those that are under way.

    Wishes for the same content are one load. A load whose blocks the connector is writing can't
    be stopped: it is given up, and vLLM keeps its blocks until the connector has reported it.

    Args:
        scheduler: With the mixin laid over it.
        settings: Bounds.
        adopt: Records what has come.
        counters: Of what has happened.
    """

    def __init__(
        self, scheduler: Any, settings: Settings, adopt: Adoption, counters: PoolingCounters
    ) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._adopt = adopt
        self._counters = counters
        self._waiting: list[Wish] = []
        self._loads: dict[str, _Load] = {}
        self._abandoned: set[str] = set()
        """Taken out while the connector writes their blocks."""
        self._given_up: set[str] = set()
        """Nobody's any more, and not taken out yet."""
        self._unsettled: list[Wish] = []
        """Of loads that are taken out, until each has been told how it ended."""
        self._closed_because = ""
        self._ids = itertools.count()
        self._blocked_since: dict[str, float] = {}
        """Requests that wait because a load of ours brings what they need."""
        self.on_load: Callable[[int, float], object] | None = None
        """Called with the tokens of a load that has ended, and its seconds."""
        self.is_paused = False
        self._is_blocked = False
        """Whether the last look found no room for what waits."""
        self._ask_connector = scheduler.connector.get_num_new_matched_tokens
        scheduler.connector.get_num_new_matched_tokens = self._matched_tokens

    def __contains__(self, request_id: str) -> bool:
        """Whether a request is one of ours. O(1), on the path of every look-up."""
        return (
            request_id in self._loads
            or request_id in self._abandoned
            or request_id in self._given_up
        )

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_loading(self) -> int:
        """Loads that hold blocks, abandoned ones included."""
        return len(self._loads) + len(self._abandoned) + len(self._given_up)

    @property
    def wants_steps(self) -> bool:
        """Whether a step would bring something on. Room comes with steps that others want."""
        return bool(self._waiting) and not self.is_paused and not self._is_blocked

    @property
    def next_end_of_patience(self) -> float:
        """When a wish that waits is given up; infinity if none waits."""
        return min((wish.give_up_at for wish in self._waiting), default=math.inf)

    # -- wishes --------------------------------------------------------------------------------

    def ask(self, wish: Wish) -> None:
        """See ``Loads``."""
        if self._closed_because:
            wish.handle.finish(Outcome(EditStatus.FAILED, reason=self._closed_because))
            return
        for load in self._loads.values():
            if _is_same(load.content, wish.content):
                load.wishes.append(wish)
                return
        self._waiting.append(wish)
        self._is_blocked = False

    def give_up_a_guess(self) -> bool:
        """See ``Loads``."""
        guess = next((w for w in reversed(self._waiting) if w.is_guess), None)
        if guess is None:
            return False
        self._waiting.remove(guess)
        guess.handle.finish(Outcome.refused("what was asked for has taken its place"))
        return True

    def drop(self, session: SessionKey, reason: str) -> None:
        """A session no longer wants what it has asked for; what comes all the same is nobody's."""
        for wish in [wish for wish in self._waiting if wish.session == session]:
            self._waiting.remove(wish)
            wish.handle.finish(Outcome.refused(reason))
        for load in self._loads.values():
            for wish in [wish for wish in load.wishes if wish.session == session]:
                load.wishes.remove(wish)
                wish.handle.finish(Outcome.refused(reason))

    def abort_all(self, reason: str) -> None:
        """Give up every load, those under way too. Their blocks are free once vLLM frees them."""
        waiting, self._waiting = self._waiting, []
        for wish in waiting:
            wish.handle.finish(Outcome.refused(reason))
        for load in list(self._loads.values()):
            self._withdraw(load)
            self._end(load, Outcome.refused(reason))
            self._unsettled.clear()

    def close(self, reason: str) -> list[Wish]:
        """Give up every load and let no other one begin. At any moment, and it never fails.

        Returns:
            The wishes, which have to be told; whoever they call back may fail.
        """
        self._closed_because = reason
        wishes = [*self._waiting, *self._unsettled]
        for load in self._loads.values():
            wishes += load.wishes
        self._given_up.update(self._loads)
        self._waiting, self._unsettled, self._loads = [], [], {}
        return wishes

    def end_given_up(self) -> None:
        """Take out what was given up. Between two calls of the scheduler only."""
        while self._given_up:
            request_id = self._given_up.pop()
            self._abandoned.add(request_id)
            try:
                self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            except Exception:
                logger.exception("vllm-agent-hint: ending a load failed")

    # -- around a step -------------------------------------------------------------------------

    def before_schedule(self, now: float) -> None:
        """Take out what has come, give up what is late, let in what there is room for."""
        if self._loads:
            self._take_in(now)
        if self._waiting:
            self.give_up_late_ones(now)
        if self._waiting and not self.is_paused:
            self._let_in(now)

    def after_schedule(self) -> None:
        """Withdraw what was let in and has not begun: nothing of ours stays in a queue."""
        for load in list(self._loads.values()):
            if load.request.status is _WAITS or load.request.request_id not in self._loads:
                continue
            self._withdraw(load)
            self._judge(load)
            self._unsettled.clear()

    def freed(self, request_id: str) -> None:
        """Vllm has freed a request's blocks."""
        self._abandoned.discard(request_id)
        self._given_up.discard(request_id)

    def ended(self, request: Any) -> None:
        """Vllm ends a request; if it is one of ours, it does so of its own accord."""
        load = self._loads.pop(request.request_id, None)
        if load is None:
            return
        self._abandoned.add(request.request_id)
        self._unsettled += load.wishes
        if request.status is RequestStatus.FINISHED_ABORTED:
            outcome = Outcome.refused("all requests were aborted")
        else:
            self._counters.failures += len(load.wishes)
            outcome = Outcome(EditStatus.FAILED, reason=_FAILED_LOAD)
        self._end(load, outcome)
        self._unsettled.clear()

    def _take_in(self, now: float) -> None:
        scheduler = self._scheduler
        for load in list(self._loads.values()):
            request = load.request
            if request.request_id not in scheduler.finished_recving_kv_req_ids:
                continue
            if request.request_id not in self._loads:
                continue  # Given up by somebody who was called back for the one before.
            has_failed = request.request_id in scheduler.failed_recving_kv_req_ids
            _promote(scheduler, request)
            tokens = request.num_computed_tokens
            self._withdraw(load)
            self._counters.transfer_seconds.append(("prefetch", now - load.began_at))
            brought = max(0, tokens - load.local_tokens)
            self._counters.loaded_tokens += brought
            if self.on_load is not None:
                self.on_load(brought, now - load.began_at)
            self._has_come(load, tokens, has_failed=has_failed)
            self._unsettled.clear()

    def _has_come(self, load: _Load, tokens: int, *, has_failed: bool = False) -> None:
        """So many tokens are cached now: each session that wants them records them."""
        if tokens:
            for wish in {wish.session: wish for wish in load.wishes}.values():
                self._adopt(wish, load.local_tokens)
        for wish in load.wishes:
            self._counters.queue_seconds.append(load.began_at - wish.wanted_at)
            wish.handle.finish(self._outcome(wish, tokens, has_failed=has_failed))

    def _outcome(self, wish: Wish, tokens: int, *, has_failed: bool) -> Outcome:
        blocks = tokens // wish.content.tokens_per_hash
        reason = "the connector could not bring the rest" if has_failed else _LOST_REST
        if not tokens:
            if has_failed:
                self._counters.failures += 1
                return Outcome(EditStatus.FAILED, reason=_FAILED_LOAD)
            return Outcome(EditStatus.MISSING, reason=STORE_LOST_IT)
        if tokens < wish.wanted_tokens:
            return Outcome(EditStatus.PARTIAL, tokens, blocks, reason)
        return Outcome(EditStatus.APPLIED, tokens, blocks)

    def give_up_late_ones(self, now: float) -> None:
        """Refuse what has waited for too long."""
        for wish in [wish for wish in self._waiting if wish.give_up_at <= now]:
            self._waiting.remove(wish)
            seconds = self._settings.prefetch_patience_seconds
            wish.handle.finish(
                Outcome.refused(f"for {seconds:.0f} s there was no room that requests did not need")
            )

    def _let_in(self, now: float) -> None:
        """At most one per step, so that none is let in on blocks that another one will take."""
        scheduler = self._scheduler
        wish = min(self._waiting, key=lambda w: w.is_guess)
        self._is_blocked = (
            self.num_loading >= self._settings.max_prefetches
            or self._someone_waits()
            or not self._has_room(wish, now)
        )
        if self._is_blocked:
            return
        load_id = f"{LOAD_ID_PREFIX}{next(self._ids)}"
        request = request_of(wish.content, load_id, priority=LOWEST_PRIORITY)
        same = [w for w in self._waiting if _is_same(w.content, wish.content)]
        self._waiting = [w for w in self._waiting if w not in same]
        self._loads[request.request_id] = _Load(request, wish.content, same, now)
        scheduler.add_request(request)

    def _someone_waits(self) -> bool:
        """Whether a request waits that is not ours, or vLLM has just preempted one."""
        scheduler = self._scheduler
        _, num_waiting = scheduler.get_request_counts()
        held = sum(1 for load in self._loads.values() if load.request.status is _WAITS)
        return bool(num_waiting > held)

    def _has_room(self, wish: Wish, now: float) -> bool:
        """Counting the blocks of a long context costs a millisecond: not in every step."""
        spare = self._blocks_to_spare()
        if spare <= 0:
            return False
        if now - wish.looked_at < _LOOK_AGAIN_SECONDS and wish.missing_blocks > spare:
            return False
        wish.looked_at = now
        wish.missing_blocks = self._blocks_missing(wish.content)
        return wish.missing_blocks <= spare

    def _blocks_missing(self, content: Content) -> int:
        """An upper bound: blocks of all groups that the content has and the cache has not."""
        pool = self._scheduler.kv_cache_manager.block_pool
        missing = 1
        for group, layout in enumerate(self._scheduler.kv_cache_manager.group_layouts()):
            step = layout.block_size // content.tokens_per_hash
            wanted = content.hashes[step - 1 :: step]
            if layout.is_checkpoint:
                missing += 1 if layout.stands_alone else min(len(wanted), 64)
                continue
            missing += sum(not pool.get_cached_block(h, [group]) for h in wanted)
        return missing

    def _blocks_to_spare(self) -> int:
        """Free blocks that no lease protects, less the share that is left to requests."""
        pool = self._scheduler.kv_cache_manager.block_pool
        reserved = int(self._settings.prefetch_reserve * pool.num_gpu_blocks)
        free = int(pool.get_num_free_blocks())
        return min(free, pool.num_gpu_blocks - 1 - pool.num_blocks_in[Zone.TTL]) - reserved

    # -- what the connector says of a request --------------------------------------------------

    def _matched_tokens(
        self, request: Any, num_computed_tokens: int, *args: Any, **more: Any
    ) -> Any:
        """As the connector; of a load, never an answer with which the model would run it."""
        if request.request_id in self._given_up:
            return None, False
        answer = self._ask_connector(request, num_computed_tokens, *args, **more)
        load = self._loads.get(request.request_id)
        if load is None:
            if answer[0] is None and self.num_loading:
                return self._bounded_wait(request, answer)
            if self._blocked_since:
                self._blocked_since.pop(request.request_id, None)
            return answer
        found, is_async = answer
        load.local_tokens = num_computed_tokens
        if found is None:
            load.verdict = "later"
        elif not found:
            load.verdict = "nothing"
        elif not is_async:
            load.verdict = "not this way"
        else:
            load.verdict = "loads"
            return answer
        return None, False

    def _bounded_wait(self, request: Any, answer: Any) -> Any:
        """A request waits, maybe for a load of ours; not for longer than the bound."""
        now = time.monotonic()
        since = self._blocked_since.setdefault(request.request_id, now)
        if len(self._blocked_since) > 10_000:
            self._blocked_since.clear()
        if now - since < self._settings.prefetch_wait_seconds:
            return answer
        return 0, False

    def _judge(self, load: _Load) -> None:
        """What a load that did not begin tells its wishes."""
        content = load.content
        if load.verdict == "nothing":
            tokens = load.local_tokens // content.tokens_per_hash * content.tokens_per_hash
            self._has_come(load, tokens)
        elif load.verdict == "not this way":
            reason = "this connector loads only for a request that the model runs"
            self._end(load, Outcome(EditStatus.UNSUPPORTED, reason=reason))
        else:
            # It did not come to be asked about, the connector needs time, or no block was left.
            self._waiting += load.wishes

    # -- ending --------------------------------------------------------------------------------

    def _withdraw(self, load: _Load) -> None:
        """Take a request out of the scheduler, as a client would that has gone away."""
        request_id = load.request.request_id
        self._loads.pop(request_id, None)
        self._abandoned.add(request_id)
        self._unsettled += load.wishes
        self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _end(self, load: _Load, outcome: Outcome) -> None:
        for wish in load.wishes:
            self._counters.queue_seconds.append(load.began_at - wish.wanted_at)
            wish.handle.finish(outcome)


_FAILED_LOAD: Final = "the connector could not load it"
_LOST_REST: Final = "the store has lost the rest"


def _is_same(one: Content, other: Content) -> bool:
    """The last hash stands for all of it."""
    return len(one.hashes) == len(other.hashes) and one.hashes[-1] == other.hashes[-1]


def _promote(scheduler: Any, request: Any) -> None:
    """Have the blocks of a load cached, as the scheduler does for any request it goes on with."""
    handle: Callable[[Any], Any] | None = getattr(
        scheduler, "_handle_blocked_waiting_request", None
    )
    if handle is None:
        handle = scheduler._try_promote_blocked_waiting_request
    handle(request)
