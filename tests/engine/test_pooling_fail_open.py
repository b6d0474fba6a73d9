"""A fault of ours while a load is under way: no engine dies, and no block is lost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tests.engine.pooling_rig import PoolingEngine, pooling_engine
from tests.engine.rig import BLOCK, Clock, hinted, prompt
from vllm_agent_hint.engine.gpu_cache import GpuCache
from vllm_agent_hint.engine.loads import LOAD_ID_PREFIX, LoadQueue
from vllm_agent_hint.engine.own_prompt_queue import OwnPromptQueue
from vllm_agent_hint.engine.utility import agent_hint_rpc
from vllm_agent_hint.pooling.manager import SessionAwarePoolingManager
from vllm_agent_hint.pooling.pages import PagesInDirectory
from vllm_agent_hint.pooling.resumes import Resumes
from vllm_agent_hint.sessions.ledger import Ledger
from vllm_agent_hint.sessions.manager import SessionAwareManager

pytestmark = pytest.mark.usefixtures("clock")

CONTEXT = prompt(1, 8 * BLOCK)


def fails(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("planted")


def away(engine: PoolingEngine, session_id: str = "s", family: int = 1) -> None:
    """A session whose context lies in the store only."""
    engine.serve(prompt(family, 8 * BLOCK), hint=hinted(session_id, 300.0))
    (parked,) = engine.done(session_id, "offload")
    assert parked["status"] == "applied", parked
    engine.flood()


def loading(engine: PoolingEngine) -> None:
    """A load whose blocks the connector writes, and whose end it will not report yet."""
    away(engine)
    engine.faults.is_silent = True
    engine.ask("s", "prefetch")
    engine.steps(2)
    assert engine.remote.loads.num_loading == 1


def assert_that_it_goes_on_without_sessions(engine: PoolingEngine) -> None:
    """The loads are over once the connector says so, and every block is free then."""
    assert engine.scheduler.agent_hint.sam is None
    engine.steps(2)
    engine.faults.is_silent = False
    assert_that_it_rests(engine)
    assert engine.serve(prompt(3, 6 * BLOCK)) == 0
    assert_that_it_rests(engine)


def assert_that_it_rests(engine: PoolingEngine) -> None:
    for _ in range(20):
        engine.step()
    engine.run()
    assert not [r for r in engine.ran if r.startswith(LOAD_ID_PREFIX)], "the model ran a load"
    assert not engine.scheduler.requests
    assert engine.scheduler.get_request_counts() == (0, 0)
    assert not engine.scheduler._inflight_prefills
    remote = engine.scheduler.agent_hint.remote
    assert remote.loads.num_loading == remote.loads.num_waiting == 0
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1


def test_a_fault_in_the_midst_of_a_step_ends_loads_after_it() -> None:
    engine = pooling_engine()
    loading(engine)
    with patch.object(SessionAwareManager, "request_scheduled", fails):
        engine.add(prompt(5, 6 * BLOCK), hint=hinted("t", 300.0))
        engine.step()
    assert_that_it_goes_on_without_sessions(engine)


def test_a_policy_that_raises_while_something_loads_costs_the_hints_and_no_request() -> None:
    engine = pooling_engine()
    away(engine)
    for k in range(4):
        engine.serve(prompt(20 + k, 6 * BLOCK), hint=hinted(f"k{k}", 0.0))
    engine.faults.is_silent = True
    engine.ask("s", "prefetch")
    engine.steps(2)
    with patch.object(engine.sam._books.policy, "worth", fails):
        engine.add(prompt(5, 26 * BLOCK))
        engine.steps(4)
    assert_that_it_goes_on_without_sessions(engine)


def test_a_fault_while_all_requests_are_aborted_frees_no_load_twice() -> None:
    engine = pooling_engine()
    away(engine)
    engine.faults.is_silent = True
    engine.add(prompt(5, 6 * BLOCK), hint=hinted("t", 300.0), max_tokens=50)
    engine.step()
    engine.ask("s", "prefetch")
    engine.steps(2)
    held = engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks()
    with patch.object(SessionAwareManager, "request_finished", fails):
        engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    still_held = engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks()
    assert 8 <= still_held < held, "the connector writes into the blocks of the load"
    assert_that_it_goes_on_without_sessions(engine)


def test_a_load_that_has_come_when_something_fails_is_not_run_by_the_model() -> None:
    engine = pooling_engine()
    loading(engine)
    engine.faults.is_silent = False
    engine.step()
    assert engine.scheduler.finished_recving_kv_req_ids
    with patch.object(SessionAwareManager, "free_session", fails):
        rpc(engine, op="free", session_id="s")
    assert_that_it_goes_on_without_sessions(engine)


def test_a_fault_before_a_pause_leaves_no_load_for_it_to_wait_for() -> None:
    engine = pooling_engine()
    loading(engine)
    with patch.object(SessionAwareManager, "free_session", fails):
        rpc(engine, op="free", session_id="s")
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert not engine.scheduler.has_unfinished_requests()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert_that_it_goes_on_without_sessions(engine)


def test_what_has_come_and_can_not_be_recorded_ends_the_sessions() -> None:
    """Half recorded, its session would stay with a lease that never runs out."""
    engine = pooling_engine()
    away(engine)
    with patch.object(SessionAwareManager, "request_finished", fails):
        engine.ask("s", "prefetch")
        engine.steps(6)
    (result,) = rpc(engine, op="operation")["operation"]["results"]
    assert result["status"] == "rejected"
    assert engine.scheduler.agent_hint.remote.spm.num_open == 0
    assert_that_it_goes_on_without_sessions(engine)


def rpc(engine: PoolingEngine, **payload: Any) -> Any:
    """A management call, which may find no sessions any more."""
    core = SimpleNamespace(scheduler=engine.scheduler)
    return agent_hint_rpc(core, {"operation_id": "op", **payload})


# -- a store that can't be asked -----------------------------------------------------------------


@pytest.mark.parametrize("op", ["edit", "free"])
@pytest.mark.parametrize("fault", [OSError(116, "Stale file handle"), OverflowError("of a page")])
def test_a_manifest_that_raises_costs_its_answer_and_no_session(
    op: str, fault: Exception, tmp_path: Path
) -> None:
    engine = pooling_engine(extra={"directory": str(tmp_path)})
    engine.serve(CONTEXT, hint=hinted("s", 300.0))
    unreadable = patch.multiple(PagesInDirectory, holds=raises(fault), get=raises(fault))
    with unreadable:
        answer = rpc(engine, op=op, session_id="unknown", edits=[{"type": "prefetch"}])
    assert answer["active"]
    assert not answer["known"]
    assert engine.remote.reason == ""
    assert engine.remote.counters.failures
    assert engine.session("s").protections
    engine.done("s", "offload")
    assert engine.results()[0]["status"] == "applied"


def test_a_fault_in_asking_whether_a_session_is_known_costs_the_connector_only() -> None:
    engine = pooling_engine()
    engine.serve(CONTEXT, hint=hinted("s", 300.0))
    with patch.object(SessionAwarePoolingManager, "knows", fails):
        answer = rpc(engine, op="edit", session_id="unknown", edits=[{"type": "evict"}])
    assert answer["active"]
    assert engine.remote.reason
    assert engine.session("s").protections


def raises(fault: Exception) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        raise fault

    return method


# -- the same at every call of ours, in the order in which a life with loads makes them ------------

INSIDE: tuple[type, ...] = (
    SessionAwareManager,
    Ledger,
    SessionAwarePoolingManager,
    GpuCache,
    OwnPromptQueue,
    Resumes,
    LoadQueue,
)
THE_GUARD_ITSELF = {"freed", "close", "end_given_up"}


class OneFault:
    """Fails at one call of all that are made of the classes above, or from it on.

    Args:
        at: Which call; none for a negative number.
        is_done_first: Whether what was called has done its work by then.
        lasts: Whether every call after it fails, too.
        look: Says in which state the loads are.
    """

    def __init__(
        self,
        at: int,
        *,
        is_done_first: bool,
        lasts: bool,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        self.at = at
        self.is_done_first = is_done_first
        self.lasts = lasts
        self.look = look
        self.calls: list[tuple[str, object]] = []

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            number = len(self.calls)
            self.calls.append((name, self.look()))
            is_due = 0 <= self.at <= number if self.lasts else number == self.at
            if is_due and not self.is_done_first:
                raise ZeroDivisionError(f"planted in {name}")
            result = method(*args, **kwargs)
            if is_due:
                raise ZeroDivisionError(f"planted behind {name}")
            return result

        return wrapped

    @contextmanager
    def planted(self) -> Iterator[None]:
        patches = [
            patch.object(owner, name, self.wrap(f"{owner.__name__}.{name}", method))
            for owner in INSIDE
            for name, method in vars(owner).items()
            if callable(method) and not name.startswith("_") and name not in THE_GUARD_ITSELF
        ]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()


def life_with_loads(engine: PoolingEngine, clock: Clock) -> None:
    """Loads in each of their states beside hinted requests, one of them the first in line."""
    scheduler = engine.scheduler

    def ask(session_id: str, *edits: str) -> None:
        rpc(engine, op="edit", session_id=session_id, edits=[{"type": edit} for edit in edits])

    # It comes while a request runs, begins, is written, and has come.
    engine.add(prompt(5, 3 * BLOCK), hint=hinted("t", 0.5), max_tokens=40)
    engine.step()
    ask("s", "prefetch")
    engine.steps(2)
    engine.add(prompt(6, 5 * BLOCK), hint=hinted("u", 300.0, "offload"), max_tokens=2)
    engine.steps(3)
    ask("u", "prefetch")
    engine.faults.is_silent = False
    engine.steps(3)
    # One is freed while it loads, another one waits for room that requests take.
    engine.faults.is_silent = True
    ask("r", "prefetch")
    engine.steps(2)
    ask("q", "prefetch")
    rpc(engine, op="free", session_id="r")
    engine.add(prompt(7, 26 * BLOCK), hint=hinted("v", 300.0), max_tokens=30)
    engine.steps(3)
    clock.advance(1.0)
    engine.add(prompt(8, 14 * BLOCK), hint=hinted("w", 300.0), max_tokens=30)
    engine.steps(5)
    engine.faults.is_silent = False
    engine.steps(4)
    # All at once is over while one loads.
    engine.faults.is_silent = True
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.steps(2)
    engine.add(prompt(5, 3 * BLOCK), hint=hinted("t", 300.0), max_tokens=40)
    engine.step()
    ask("q", "evict", "prefetch")
    ask("s", "prefetch")
    engine.steps(2)
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.faults.is_silent = False
    engine.steps(3)
    # A pause and a reset.
    engine.faults.is_silent = True
    ask("r", "prefetch")
    engine.steps(2)
    scheduler.reset_prefix_cache()
    ask("r", "prefetch")
    engine.steps(2)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.faults.is_silent = False
    engine.steps(2)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.steps(2)


def parked_engine(clock: Clock) -> PoolingEngine:
    engine = pooling_engine()
    for family, session_id in ((1, "s"), (2, "r"), (3, "q")):
        away(engine, session_id, family)
    engine.faults.is_silent = True
    return engine


def calls_of_a_life(clock: Clock) -> list[tuple[str, object]]:
    """Of ours, one after the other, while nothing fails, each with the state of the loads."""
    engine = parked_engine(clock)

    def states() -> object:
        requests = engine.scheduler.requests.items()
        loads = sorted(r.status.name for name, r in requests if name.startswith(LOAD_ID_PREFIX))
        return tuple(loads), engine.remote.loads.num_waiting

    fault = OneFault(-1, is_done_first=False, lasts=False, look=states)
    with fault.planted():
        life_with_loads(engine, clock)
        assert_that_it_rests(engine)
    return fault.calls


@pytest.mark.parametrize(("is_done_first", "lasts"), [(False, True), (True, False)])
def test_a_fault_at_any_call_of_ours_beside_loads_kills_no_engine_and_loses_no_block(
    is_done_first: bool, lasts: bool, clock: Clock
) -> None:
    calls = calls_of_a_life(clock)
    assert {name.split(".")[0] for name, _ in calls} == {owner.__name__ for owner in INSIDE}
    # The same call in the same state of the loads is not tried twice.
    first_of = {call: number for number, call in reversed(list(enumerate(calls)))}
    deaths = []
    for (name, state), number in sorted(first_of.items(), key=lambda item: item[1]):
        engine = parked_engine(clock)
        fault = OneFault(number, is_done_first=is_done_first, lasts=lasts)
        try:
            with fault.planted():
                life_with_loads(engine, clock)
                assert_that_it_rests(engine)
                assert not Scheduler.has_requests(engine.scheduler)
        except Exception as death:
            deaths.append((number, name, state, repr(death)[:160]))
    assert not deaths, f"{len(deaths)} of {len(first_of)}: {deaths[:8]}"
