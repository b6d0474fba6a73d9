"""Sessions in a KV connector, on vLLM's real scheduler: what happens, and what survives faults."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from tests.engine.pooling_rig import PoolingEngine, pooling_engine
from tests.engine.rig import BLOCK, Clock, hinted, prompt
from vllm_agent_hint.hints import EditStatus
from vllm_agent_hint.hookspecs import hookimpl, plugins
from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.pooling import keep_alive
from vllm_agent_hint.pooling.capability import (
    Content,
    Operation,
    OperationHandle,
    Outcome,
    Residency,
    Span,
    SupportsSessionAwareKVManagement,
)
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.settings import Settings

pytestmark = pytest.mark.usefixtures("clock")

WHOLE = 20 * BLOCK
CONTEXT = prompt(1, WHOLE + 3)
OTHER = prompt(2, WHOLE + 3)


def away(engine: PoolingEngine, session_id: str = "a", context: list[int] = CONTEXT) -> None:
    """A session whose context lies in the store only."""
    engine.serve(context, hint=hinted(session_id, 600.0))
    (parked,) = engine.done(session_id, "offload")
    assert parked["status"] == "applied", parked
    engine.flood()
    assert engine.cached_ids(context) == [None] * 20


def slow(engine: PoolingEngine) -> None:
    """From now on the store works and says nothing."""
    engine.faults.is_silent = True


def status(results: list[dict[str, Any]]) -> list[str]:
    return [result["status"] for result in results]


# -- the way there and back ------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_offloaded_flooded_and_prefetched_is_read_as_it_was_written(
    asynchronous: bool,
) -> None:
    engine = pooling_engine(asynchronous=asynchronous)
    engine.serve(CONTEXT, hint=hinted("a", 60.0), max_tokens=BLOCK)

    (parked,) = engine.done("a", "offload")
    engine.flood()
    (fetched,) = engine.done("a", "prefetch")
    found = engine.serve([*CONTEXT, *[7] * BLOCK, 9], hint=hinted("a", 60.0))

    assert (parked["status"], parked["tokens"]) == ("applied", WHOLE + BLOCK)
    assert (fetched["status"], fetched["tokens"]) == ("applied", WHOLE + BLOCK)
    assert found == WHOLE + BLOCK
    assert not any(request_id.startswith("agent-hint") for request_id in engine.ran)
    engine.assert_nothing_is_left()


def test_local_retention_ends_once_the_store_has_confirmed_and_not_before() -> None:
    engine = pooling_engine()
    engine.serve(CONTEXT, hint=hinted("a", 60.0), max_tokens=BLOCK)
    slow(engine)

    assert status(engine.ask("a", "offload")) == ["pending"]
    engine.steps(5)
    assert engine.pool.num_blocks_in[Zone.TTL] == 21
    engine.faults.is_silent = False
    engine.run()

    assert status(engine.results()) == ["applied"]
    assert engine.pool.num_blocks_in[Zone.TTL] == engine.pool.num_blocks_in[Zone.SESSION] == 0
    engine.assert_nothing_is_left()


def test_a_turn_that_comes_while_its_session_is_saved_keeps_what_is_local() -> None:
    engine = pooling_engine()
    engine.serve(CONTEXT, hint=hinted("a", 60.0), max_tokens=BLOCK)
    slow(engine)
    engine.ask("a", "offload")
    engine.steps(2)
    engine.add([*CONTEXT, *[7] * BLOCK, *prompt(3, 2 * BLOCK)], hint=hinted("a", 60.0))
    engine.steps(6)
    engine.faults.is_silent = False
    engine.run()

    (result,) = engine.results()
    assert result["status"] == "applied"
    assert "has gone on since" in result["reason"]
    assert engine.pool.num_blocks_in[Zone.TTL] >= 23
    engine.assert_nothing_is_left()


def test_prefetched_blocks_are_protected_again_for_what_is_left_of_the_ttl(
    clock: Clock,
) -> None:
    engine = pooling_engine()
    away(engine)

    engine.done("a", "prefetch")

    assert engine.pool.num_blocks_in[Zone.TTL] == 20
    engine.flood(requests=1)
    assert sum(engine.pool.pressure_overrides.values()) > 0, "only for want of others"
    engine.assert_nothing_is_left()


def test_a_range_offload_keeps_the_claim_behind_it() -> None:
    engine = pooling_engine(settings=Settings(ranges=True, protected_share=1.0))
    engine.serve(CONTEXT, hint=hinted("a", 60.0))

    (result,) = engine.done("a", {"type": "offload", "block_start": 4, "block_end": 8})

    assert (result["status"], result["blocks"]) == ("applied", 4)
    held = [i for i, b in enumerate(engine.cached_ids(CONTEXT)) if engine.pool.blocks[b].zone]
    assert held == [*range(4), *range(8, 20)]
    engine.assert_nothing_is_left()


def test_a_range_prefetch_brings_all_up_to_its_end() -> None:
    engine = pooling_engine(settings=Settings(ranges=True, prefetch_reserve=0.0))
    away(engine)

    (result,) = engine.done("a", {"type": "prefetch", "block_start": 4, "block_end": 8})

    assert (result["status"], result["tokens"]) == ("applied", 8 * BLOCK)
    assert engine.cached_ids(CONTEXT)[8:] == [None] * 12
    engine.assert_nothing_is_left()


def test_what_the_store_has_lost_makes_a_prefetch_partial() -> None:
    engine = pooling_engine()
    away(engine)
    content = engine.remote.spm.tracker.get(next(iter(engine.remote.spm.tracker))).latest
    engine.remote.spm.store.delete(content.hashes[12:])

    (result,) = engine.done("a", "prefetch")

    assert (result["status"], result["tokens"]) == ("partial", 12 * BLOCK)
    engine.remote.spm.store.delete(content.hashes)
    assert engine.scheduler.reset_prefix_cache()
    assert status(engine.done("a", "prefetch")) == ["missing"]
    engine.assert_nothing_is_left()


def test_edits_of_one_session_keep_their_order_but_an_evict_overtakes_prefetches() -> None:
    engine = pooling_engine()
    engine.serve(CONTEXT, hint=hinted("a", 60.0))

    results = engine.done("a", "offload", "prefetch", "evict", "prefetch")

    assert status(results) == ["applied", "rejected", "applied", "missing"]
    engine.assert_nothing_is_left()


def test_an_evict_deletes_what_the_session_alone_has_in_the_store() -> None:
    engine = pooling_engine()
    engine.serve(CONTEXT, hint=hinted("a", 60.0))
    engine.serve([*CONTEXT[: 8 * BLOCK], *prompt(4, 40)], hint=hinted("b", 60.0))

    (result,) = engine.done("a", "evict")

    assert "12 blocks were deleted from the store" in result["reason"]
    content = engine.remote.spm.tracker.get(next(iter(engine.remote.spm.tracker))).latest
    assert engine.remote.spm.store.loadable_tokens(content) == 10 * BLOCK
    engine.assert_nothing_is_left()


def test_an_unknown_session_has_nothing_to_transfer() -> None:
    engine = pooling_engine()
    assert status(engine.ask("nobody", "offload", "prefetch")) == ["missing", "missing"]
    engine.assert_nothing_is_left()


# -- a guest ---------------------------------------------------------------------------------------


def test_a_prefetch_gives_way_to_any_waiting_request() -> None:
    engine = pooling_engine(max_num_seqs=1)
    away(engine)
    engine.add(OTHER, max_tokens=8)
    waiting = engine.add(prompt(5, 40), max_tokens=4)
    engine.step()

    engine.ask("a", "prefetch")
    while waiting in engine.scheduler.requests:
        engine.step()
        if engine.scheduler.waiting:
            assert engine.remote.loads.num_loading == 0
    engine.run()

    assert status(engine.results()) == ["applied"]
    engine.assert_nothing_is_left()


def test_a_prefetch_leaves_the_reserve_free_and_is_rejected_when_its_patience_ends(
    clock: Clock,
) -> None:
    engine = pooling_engine(settings=Settings(prefetch_reserve=0.5, protected_share=1.0))
    away(engine)
    free = engine.free_ids()

    engine.ask("a", "prefetch")
    engine.steps(3)
    assert engine.free_ids() == free
    assert status(engine.results()) == ["pending"]
    clock.advance(31)
    engine.step()

    (result,) = engine.results()
    assert result["status"] == "rejected"
    assert "no room" in result["reason"]
    engine.assert_nothing_is_left()


def test_a_prefetch_takes_no_block_that_a_ttl_protects() -> None:
    engine = pooling_engine(num_blocks=41)
    away(engine)
    engine.serve(OTHER, hint=hinted("b", 600.0))
    protected = engine.zone_ids(Zone.TTL)

    engine.ask("a", "prefetch")
    engine.steps(3)

    assert engine.zone_ids(Zone.TTL) == protected
    engine.sam.free_session(next(key for key in engine.sam.sessions if key.session_id == "b"))
    engine.run()
    assert status(engine.results()) == ["applied"]
    engine.assert_nothing_is_left()


def test_wishes_for_the_same_content_are_one_load() -> None:
    engine = pooling_engine()
    away(engine)
    engine.serve(CONTEXT, hint=hinted("b", 600.0))
    engine.done("b", "offload")
    engine.flood()
    before = engine.remote.counters.loaded_tokens

    engine.ask("a", "prefetch", operation_id="one")
    engine.ask("b", "prefetch", operation_id="two")
    engine.run()

    assert status([*engine.results("one"), *engine.results("two")]) == ["applied", "applied"]
    assert engine.remote.counters.loaded_tokens - before == WHOLE
    assert engine.session("a").num_records == engine.session("b").num_records == 20
    engine.assert_nothing_is_left()


def test_an_expected_resume_gives_way_to_what_is_asked_for() -> None:
    engine = pooling_engine(settings=Settings(max_prefetches_queued=1, prefetch_reserve=0.9))
    away(engine)
    away(engine, "b", OTHER)
    key = next(key for key in engine.remote.spm.tracker if key.session_id == "a")
    guess = engine.remote.spm.prefetch(key, Span(), is_guess=True)

    engine.ask("b", "prefetch")

    assert guess.outcome.status == "rejected"
    assert status(engine.ask("b", "prefetch", operation_id="more")) == ["rejected"]


def test_a_request_for_what_is_being_loaded_waits_for_it_and_no_longer_than_the_bound(
    clock: Clock,
) -> None:
    engine = pooling_engine(num_blocks=60)
    away(engine)
    slow(engine)
    engine.ask("a", "prefetch")
    engine.steps(2)
    assert engine.remote.loads.num_loading == 1

    waiting = engine.add(CONTEXT, hint=hinted("a", 600.0))
    engine.steps(3)
    assert waiting not in engine.ran
    clock.advance(5.1)
    engine.steps(2)
    assert waiting in engine.ran
    engine.faults.is_silent = False
    engine.run()

    assert engine.cached[waiting] == 0
    engine.assert_nothing_is_left()


# -- faults ----------------------------------------------------------------------------------------


def test_a_store_that_dies_during_a_save_fails_the_offload_and_what_is_local_stays(
    clock: Clock,
) -> None:
    engine = pooling_engine()
    engine.serve(CONTEXT, hint=hinted("a", 600.0), max_tokens=BLOCK)
    slow(engine)
    engine.ask("a", "offload")
    engine.steps(3)
    clock.advance(61)
    engine.step()

    (result,) = engine.results()
    assert result["status"] == "failed"
    assert engine.pool.num_blocks_in[Zone.TTL] == 21
    engine.faults.is_silent = False
    engine.run()
    assert engine.serve([*CONTEXT, *[7] * BLOCK, 9], hint=hinted("a", 60.0)) == WHOLE + BLOCK
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_blocks_that_the_worker_reports_as_failed_are_never_served(policy: str) -> None:
    engine = pooling_engine(policy=policy, num_blocks=60)
    away(engine)
    engine.faults.loads_to_lose = 1

    (result,) = engine.done("a", "prefetch")
    engine.cache.zero_()

    assert result["status"] == "failed"
    assert engine.cached_ids(CONTEXT) == [None] * 20
    if policy == "recompute":
        engine.faults.loads_to_lose = 1
        engine.serve(CONTEXT, hint=hinted("a", 60.0))
    engine.assert_nothing_is_left()


def test_a_store_that_dies_during_keep_alive_is_asked_again_and_said_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    engine = pooling_engine()
    away(engine)
    store = engine.remote.spm.store

    def dead(*_: Any) -> Any:
        raise ConnectionError("gone")

    with monkeypatch.context() as planted:
        planted.setattr(store, "refresh", dead)
        for _ in range(3):
            clock.advance(61)
            engine.scheduler.has_requests()
    assert engine.remote.counters.keep_alives == 0
    assert engine.remote.counters.failures == 3
    assert log.text.count("said once") == 1
    clock.advance(61)
    engine.scheduler.has_requests()
    assert engine.remote.counters.keep_alives == 20
    assert engine.remote.reason == ""
    engine.assert_nothing_is_left()


def test_a_full_tier_takes_nothing_and_what_is_local_stays() -> None:
    engine = pooling_engine(chunks=5)
    engine.serve(CONTEXT, hint=hinted("a", 600.0))

    (result,) = engine.done("a", "offload")

    assert result["status"] == "failed"
    assert "has taken nothing" in result["reason"]
    assert engine.pool.num_blocks_in[Zone.TTL] == 20
    assert engine.remote.counters.back_pressure == 1
    engine.assert_nothing_is_left()


def test_an_abort_while_the_session_is_prefetched_harms_neither() -> None:
    engine = pooling_engine()
    away(engine)
    slow(engine)
    engine.ask("a", "prefetch")
    engine.steps(2)
    running = engine.add(CONTEXT, hint=hinted("a", 600.0))
    engine.steps(2)
    engine.abort(running)
    engine.faults.is_silent = False
    engine.run()

    assert status(engine.results()) == ["applied"]
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("when", ["waiting", "loading"])
def test_a_session_that_is_freed_while_it_is_prefetched_stays_freed(when: str) -> None:
    reserve = 0.9 if when == "waiting" else 0.0
    engine = pooling_engine(settings=Settings(prefetch_reserve=reserve, protected_share=1.0))
    away(engine)
    slow(engine)
    engine.ask("a", "prefetch")
    engine.steps(2)
    engine.call("free", session_id="a", operation_id="free")
    engine.faults.is_silent = False
    engine.run()

    assert status(engine.results()) == ["rejected"]
    assert not engine.sam.sessions
    engine.assert_nothing_is_left()


def test_an_evict_overtakes_a_prefetch_that_is_under_way() -> None:
    engine = pooling_engine()
    away(engine)
    slow(engine)
    engine.ask("a", "prefetch", operation_id="one")
    engine.steps(2)
    engine.ask("a", "evict", operation_id="two")
    engine.faults.is_silent = False
    engine.run()

    assert status(engine.results("one")) == ["rejected"]
    assert status(engine.results("two")) == ["applied"]
    assert engine.session("a").num_records == 0
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_pause_gives_up_loads_and_comes_to_rest(state: PauseState) -> None:
    engine = pooling_engine(settings=Settings(max_prefetches=1, prefetch_reserve=0.0))
    away(engine)
    away(engine, "b", OTHER)
    slow(engine)
    engine.ask("a", "prefetch", operation_id="loading")
    engine.ask("b", "prefetch", operation_id="waiting")
    engine.steps(2)

    engine.scheduler.set_pause_state(state)
    assert status([*engine.results("loading"), *engine.results("waiting")]) == ["rejected"] * 2
    engine.faults.is_silent = False
    engine.run()
    assert not engine.scheduler.has_requests()
    assert engine.scheduler.reset_prefix_cache()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    assert status(engine.done("a", "prefetch")) == ["applied"]
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("reset_running", [False, True])
def test_a_reset_during_a_load_fails_as_beside_any_request_and_succeeds_after_it(
    reset_running: bool,
) -> None:
    engine = pooling_engine()
    away(engine)
    slow(engine)
    engine.ask("a", "prefetch")
    engine.steps(2)

    assert not engine.scheduler.reset_prefix_cache(reset_running_requests=reset_running)
    assert status(engine.results()) == ["rejected"]
    engine.faults.is_silent = False
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=reset_running)
    assert status(engine.done("a", "prefetch")) == ["applied"]
    engine.assert_nothing_is_left()


def test_a_reset_of_the_connector_loses_what_is_there_and_says_so() -> None:
    engine = pooling_engine()
    away(engine)

    assert engine.scheduler.reset_prefix_cache(reset_connector=True)

    assert status(engine.done("a", "prefetch")) == ["missing"]
    engine.assert_nothing_is_left()


def test_requests_that_are_preempted_while_loads_hold_blocks_end_as_they_would() -> None:
    engine = pooling_engine(num_blocks=30)
    away(engine, context=prompt(1, WHOLE + 3))
    slow(engine)
    engine.ask("a", "prefetch")
    engine.steps(2)
    assert engine.remote.loads.num_loading == 1
    ids = [engine.add(prompt(6 + k, 3 * BLOCK), max_tokens=3 * BLOCK) for k in range(3)]
    engine.steps(40)
    engine.faults.is_silent = False
    engine.run(limit=2_000)

    assert all(request_id in engine.ran for request_id in ids)
    engine.assert_nothing_is_left()


def test_edits_of_a_session_that_is_running_count_for_what_is_recorded() -> None:
    engine = pooling_engine()
    engine.serve(CONTEXT, hint=hinted("a", 600.0))
    running = engine.add([*CONTEXT, *prompt(3, 40)], hint=hinted("a", 600.0), max_tokens=30)
    engine.steps(3)

    assert status(engine.ask("a", "offload", "prefetch")) == ["pending", "pending"]
    engine.steps(5)

    saved, fetched = engine.results()
    assert running in engine.scheduler.requests
    assert (saved["status"], fetched["status"]) == ("applied", "applied")
    assert "is alive" in saved["reason"]
    engine.run()
    engine.assert_nothing_is_left()


def test_a_thousand_edits_at_once_all_end_and_nothing_is_left() -> None:
    engine = pooling_engine()
    away(engine)
    away(engine, "b", OTHER)
    edits = ("offload", "prefetch", "evict", "prefetch")
    for k in range(1_000):
        engine.ask("ab"[k % 2], edits[k % 4 if k > 900 else k % 2], operation_id=f"op{k}")
    engine.run(limit=5_000)
    engine.serve(prompt(7, 100))

    for k in range(1_000):
        (only,) = engine.results(f"op{k}")
        assert only["status"] in ("applied", "partial", "missing", "rejected", "failed"), only
    engine.assert_nothing_is_left()


def test_a_fault_of_ours_costs_the_connector_and_neither_sessions_nor_requests(
    monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    engine = pooling_engine()
    away(engine)
    slow(engine)
    engine.ask("a", "prefetch")
    engine.steps(2)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(engine.remote.loads, "before_schedule", broken)
        engine.step()
    engine.faults.is_silent = False
    engine.run()

    assert "without the KV connector" in log.text
    assert engine.scheduler.agent_hint.sam is not None
    assert status(engine.results()) == ["rejected"]
    assert status(engine.ask("a", "offload")) == ["failed"]
    engine.serve(CONTEXT, hint=hinted("a", 60.0))
    assert not engine.scheduler.requests


def test_requests_aborted_all_at_once_take_loads_along() -> None:
    engine = pooling_engine()
    away(engine)
    slow(engine)
    engine.ask("a", "prefetch")
    engine.steps(2)
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert status(engine.results()) == ["rejected"]
    engine.faults.is_silent = False
    engine.run()
    engine.assert_nothing_is_left()


# -- a connector that manages sessions itself ------------------------------------------------------


class SelfMade:
    """A third party's capability, as its own package would offer it through the hook."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.handle = OperationHandle()

    def why_not(self, operation: Operation) -> str:
        return ""

    def register_cache(
        self, session: SessionKey, request_id: str, content: Content, ttl: float
    ) -> None:
        self.calls.append(("register", session.session_id, content.num_tokens, ttl))

    def offload(self, session: SessionKey, span: Span) -> OperationHandle:
        self.calls.append(("offload", session.session_id))
        return self.handle

    def prefetch(self, session: SessionKey, span: Span) -> OperationHandle:
        raise ConnectionError("planted")

    def evict(self, session: SessionKey, span: Span) -> OperationHandle:
        self.calls.append(("evict", session.session_id))
        return OperationHandle.ended(Outcome(EditStatus.APPLIED, 320, 20))

    def release(self, session: SessionKey) -> None:
        self.calls.append(("release", session.session_id))

    def query_residency(self, session: SessionKey) -> Residency:
        return Residency(320, 320, 160)


class Plugin:
    """What such a package registers."""

    def __init__(self, capability: SelfMade) -> None:
        self.capability = capability

    @hookimpl
    def agent_hint_kv_management(self, connector: Any, settings: Settings) -> SelfMade:
        return self.capability


def engine_managed_by(third_party: SelfMade) -> PoolingEngine:
    plugin = Plugin(third_party)
    plugins().register(plugin)
    try:
        return pooling_engine()
    finally:
        plugins().unregister(plugin)


def test_a_third_party_that_manages_sessions_itself_is_found_and_asked_directly() -> None:
    ours = SelfMade()
    assert isinstance(ours, SupportsSessionAwareKVManagement)
    engine = engine_managed_by(ours)
    engine.serve(CONTEXT, hint=hinted("a", 60.0))

    assert status(engine.ask("a", "offload")) == ["pending"]
    ours.handle.finish(Outcome(EditStatus.APPLIED, 320, 20))
    assert engine.results()[0]["tokens"] == 320
    shown = engine.call("show", session_id="a")["session"]
    assert shown["residency"] == {"tokens": 320, "local": 320, "remote": 160}
    assert "20 blocks were deleted" in engine.done("a", "evict")[0]["reason"]
    engine.call("free", session_id="a", operation_id="free")
    assert [call[0] for call in ours.calls] == ["register", "offload", "evict", "release"]
    assert ours.calls[0] == ("register", "a", 320, 60.0)


def test_a_third_party_that_raises_costs_the_connector_and_nothing_else(log: Any) -> None:
    engine = engine_managed_by(SelfMade())
    engine.serve(CONTEXT, hint=hinted("a", 60.0))

    assert status(engine.ask("a", "prefetch")) == ["failed"]
    assert "without the KV connector" in log.text
    assert engine.serve(CONTEXT, hint=hinted("a", 60.0)) > 0
    assert engine.pool.num_blocks_in[Zone.TTL] == 20


# -- what planted faults have asked for ------------------------------------------------------------


def test_a_connector_that_loads_only_for_the_model_is_unsupported_and_the_model_never_runs() -> (
    None
):
    engine = pooling_engine()
    away(engine)
    ran = len(engine.ran)
    engine.remote.loads._ask_connector = lambda request, computed: (WHOLE, False)

    (result,) = engine.done("a", "prefetch")

    assert result["status"] == "unsupported"
    assert len(engine.ran) == ran
    engine.assert_nothing_is_left()


def test_a_save_that_is_not_whole_leaves_local_retention_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = pooling_engine()
    engine.serve(CONTEXT, hint=hinted("a", 600.0))
    monkeypatch.setattr(engine.remote.spm.store, "loadable_tokens", lambda content: 10 * BLOCK)

    (result,) = engine.done("a", "offload")

    assert (result["status"], result["tokens"]) == ("partial", 10 * BLOCK)
    assert engine.pool.num_blocks_in[Zone.TTL] == 20
    engine.assert_nothing_is_left()


def test_a_block_whose_last_token_was_sampled_and_not_computed_is_not_registered() -> None:
    engine = pooling_engine()
    engine.serve(CONTEXT, hint=hinted("a", 60.0), max_tokens=BLOCK - 3)

    engine.done("a", "offload")

    shown = engine.call("show", session_id="a")["session"]["residency"]
    assert shown == {"tokens": WHOLE, "local": WHOLE, "remote": WHOLE}
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("kind", ["state", "states"])
def test_an_offload_saves_the_checkpoints_of_every_group_of_states(kind: str) -> None:
    engine = pooling_engine(num_blocks=80, kind=kind)
    engine.serve(prompt(1, 8 * BLOCK), hint=hinted("a", 600.0), max_tokens=2 * BLOCK + 2)
    (parked,) = engine.done("a", "offload")
    content = engine.remote.spm.tracker.get(engine.session("a").key).latest
    assert (parked["status"], parked["tokens"]) == ("applied", 10 * BLOCK)
    assert engine.remote.spm.store.loadable_tokens(content) == 10 * BLOCK
    engine.assert_nothing_is_left()


def test_a_state_is_handed_over_only_while_its_block_still_holds_it() -> None:
    engine = pooling_engine()
    engine.serve(CONTEXT, hint=hinted("a", 60.0))
    store = engine.remote.spm.store
    content = engine.remote.spm.tracker.get(next(iter(engine.remote.spm.tracker))).latest
    ids = engine.cached_ids(CONTEXT)
    store._states = {
        "save": [
            (0, ids[3], 4 * BLOCK, content.hashes[3]),
            (0, ids[4], 5 * BLOCK, content.hashes[7]),
        ]
    }
    handed: dict[str, Any] = {}
    store._build_meta = lambda output: None
    state = SimpleNamespace(boundary_state_offloads=handed)

    store._hand_over_states(SimpleNamespace(kv_connector_block_state=state))

    assert handed == {"save": [(0, ids[3], 4 * BLOCK)]}


def test_keep_alive_refreshes_a_slice_at_a_time_however_long_a_context_is(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_alive, "SLICE_HASHES", 6)
    engine = pooling_engine(num_blocks=80)
    away(engine)
    engine.serve(OTHER, hint=hinted("a", 600.0))
    refreshed: list[bytes] = []
    per_look: list[int] = []
    refresh = engine.remote.spm.store.refresh

    def noting(hashes: Any) -> Any:
        refreshed.extend(hashes)
        return refresh(hashes)

    monkeypatch.setattr(engine.remote.spm.store, "refresh", noting)
    clock.advance(61.0)
    for _ in range(12):
        before = len(refreshed)
        engine.scheduler.has_requests()
        per_look.append(len(refreshed) - before)
        clock.advance(0.06)
    assert max(per_look) == 6
    found = engine.remote.spm.tracker.get(next(iter(engine.remote.spm.tracker)))
    assert sorted(refreshed) == sorted(h for c in found.contents for h in c.hashes)
    engine.assert_nothing_is_left()


def test_keep_alive_lets_go_of_a_context_that_ends_between_two_slices(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_alive, "SLICE_HASHES", 6)
    engine = pooling_engine()
    away(engine)
    clock.advance(61.0)
    engine.scheduler.has_requests()
    assert engine.remote.counters.keep_alives == 6
    engine.done("a", "evict")
    for _ in range(9):
        clock.advance(0.06)
        engine.scheduler.has_requests()
    assert engine.remote.counters.keep_alives == 6
    assert engine.remote.counters.keep_alive_losses == 0
    engine.assert_nothing_is_left()
