"""Shadow mode: every account is kept, and every block id is the one that stock would hand out."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.engine.conftest import Log
from tests.engine.invariants import check_protections, check_queue, check_records
from tests.engine.rig import KINDS, Clock, Engine, hinted, make_scheduler, prompt
from tests.engine.test_fail_open import fails
from tests.engine.test_scheduler_identity import Operation, observed, operations
from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.kvcache.queue import AgentFreeKVCacheBlockQueue, ShadowFreeKVCacheBlockQueue
from vllm_agent_hint.sessions.manager import SessionAwareManager
from vllm_agent_hint.settings import Placement, Settings

SESSIONS = st.sampled_from([None, "a", "a", "b", "c"])
TTLS = st.sampled_from([None, 0.0, 3.0, 3.0, 60.0])


@st.composite
def hinted_arrivals(draw: st.DrawFn) -> Operation:
    session = draw(SESSIONS)
    hint = hinted(
        session, draw(TTLS), *draw(st.sampled_from([(), (), ("evict",)] if session else [()]))
    )
    family, length = draw(st.integers(0, 3)), draw(st.sampled_from([15, 17, 33, 64, 97, 130, 200]))
    tokens = prompt(9, draw(st.sampled_from([0, 40]))) + prompt(family, length)
    max_tokens = draw(st.sampled_from([1, 2, 20, 40]))
    return lambda engine: engine.add(tokens, hint=hint, max_tokens=max_tokens)


def edits(session_id: str) -> Operation:
    def run(engine: Engine) -> None:
        if hasattr(engine.scheduler, "agent_hint"):
            engine.edit(session_id)

    return run


hinted_operations = st.one_of(
    hinted_arrivals(),
    hinted_arrivals(),
    operations,
    operations,
    st.sampled_from("abc").map(edits),
    st.sampled_from([0.5, 2.0, 61.0]),
)
"""A number is seconds that pass."""


def shadowed(**options: Any) -> tuple[Engine, Engine]:
    """A stock engine, and one in shadow mode."""
    settings = Settings(shadow=True, **options.pop("settings", {}))
    depth = 2 if options.get("asynchronous") else 1
    stock, shadow = (
        Engine(make_scheduler(plugged=plugged, settings=settings, **options), depth=depth)
        for plugged in (False, True)
    )
    return stock, shadow


def check_accounts(engine: Engine) -> None:
    """All that holds of a queue in zones but where its blocks lie."""
    assert engine.scheduler.agent_hint.reason == ""
    check_queue(engine.pool)
    check_records(engine.scheduler)
    check_protections(engine.scheduler)
    counts = Counter(block.zone for block in engine.pool.blocks)
    for zone in (Zone.SESSION, Zone.TTL):
        assert engine.pool.num_blocks_in[zone] == counts[zone]
    assert engine.pool.free_block_queue.taken == []


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
@examples(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    stream=st.lists(hinted_operations, min_size=4, max_size=30),
    num_blocks=st.sampled_from([20, 28, 40, 64]),
    max_num_batched_tokens=st.sampled_from([16, 48, 128]),
    release_slice=st.sampled_from([1, 256]),
    expired_enters=st.sampled_from(Placement),
)
def test_hinted_requests_edits_and_expiry_leave_every_block_where_stock_has_it(
    kind: str,
    asynchronous: bool,
    stream: list[Operation | float],
    num_blocks: int,
    max_num_batched_tokens: int,
    release_slice: int,
    expired_enters: Placement,
) -> None:
    with Clock() as clock:
        stock, shadow = shadowed(
            kind=kind,
            asynchronous=asynchronous,
            num_blocks=num_blocks,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=4,
            settings={"release_slice": release_slice, "expired_enters": expired_enters},
        )
        for operation in stream:
            if isinstance(operation, float):
                clock.advance(operation)
                continue
            assert operation(stock) == operation(shadow)
            assert observed(stock) == observed(shadow)
            check_accounts(shadow)


def conversation(engine: Engine, clock: Clock) -> None:
    """Turns, a private prompt, an edit and an expiry, in a pool that is never short."""
    engine.scheduler.log_stats = False  # Nobody takes the statistics in between.
    engine.serve(prompt(1, 130), hint=hinted("a", 60.0))
    engine.serve(prompt(1, 200), hint=hinted("a", 60.0))
    engine.serve(prompt(2, 64), hint=hinted("b", 3.0))
    engine.serve(prompt(3, 64), hint=hinted("c", 0.0))
    engine.serve(prompt(4, 64), hint=hinted(None, 60.0))
    engine.serve(prompt(5, 64))
    clock.advance(5.0)
    engine.serve(prompt(6, 20))
    engine.serve(prompt(3, 64), hint=hinted("c", None, "evict"))


def accounts(engine: Engine) -> Any:
    statistics = engine.scheduler.agent_hint.statistics()
    del statistics["slices"]
    scalars = [(b._session_ref_cnt, b._ttl_expire_at) for b in engine.pool.blocks]
    return statistics, sorted(scalars), sorted(map(str, engine.sam.sessions))


@pytest.mark.parametrize("kind", KINDS)
def test_the_accounts_are_those_of_an_engine_that_acts(kind: str, clock: Clock) -> None:
    acting = Engine(make_scheduler(plugged=True, kind=kind, num_blocks=200))
    _, shadow = shadowed(kind=kind, num_blocks=200)
    conversation(acting, clock)
    clock.now = 1000.0
    conversation(shadow, clock)
    found = accounts(shadow)
    assert found == accounts(acting)
    assert found[0]["active"]
    assert found[0]["blocks"]["ttl"] > 0
    assert found[0]["expired"] == 1
    assert found[0]["edits"] == [["evict", "applied", 1]]


def test_blocks_that_stocks_order_gives_away_are_the_broken_reservations(clock: Clock) -> None:
    _, shadow = shadowed(num_blocks=20)
    shadow.serve(prompt(1, 64), hint=hinted("a", 60.0))
    shadow.serve(prompt(2, 64), hint=hinted("b", 0.0))
    assert shadow.pool.num_blocks_in == {Zone.SESSION: 4, Zone.TTL: 4}
    # 19 blocks, the oldest of them lie in front: four of the unmarked, then a's.
    shadow.serve(prompt(3, 19 * 16 - 1), max_tokens=1)
    assert shadow.pool.pressure_overrides == {Zone.SESSION: 4, Zone.TTL: 4}
    assert shadow.pool.num_retained_blocks == 0
    check_accounts(shadow)


def test_a_lease_that_is_due_is_no_broken_reservation(clock: Clock) -> None:
    _, shadow = shadowed(num_blocks=20)
    shadow.serve(prompt(1, 64), hint=hinted("a", 60.0))
    clock.advance(60.5)
    blocks = shadow.pool.get_new_blocks(19)
    shadow.pool.free_blocks(blocks)
    assert not shadow.pool.pressure_overrides
    assert shadow.pool.num_retained_blocks == 0
    assert shadow.sam.counters.expired == 1


def test_an_acting_engine_protects_what_its_shadow_gives_away(clock: Clock) -> None:
    """Else shadow mode would say nothing about what it stands for."""
    acting = Engine(make_scheduler(plugged=True, num_blocks=24))
    _, shadow = shadowed(num_blocks=24)
    for engine in (acting, shadow):
        engine.serve(prompt(1, 64), hint=hinted("a", 60.0))
        engine.serve(prompt(2, 15 * 16), max_tokens=1)
        engine.serve(prompt(3, 15 * 16), max_tokens=1)
    assert acting.serve(prompt(1, 64)) > 0
    assert shadow.serve(prompt(1, 64)) == 0
    assert shadow.pool.pressure_overrides[Zone.TTL] == 4
    assert not acting.pool.pressure_overrides


def test_a_fault_in_shadow_mode_drops_the_sessions_as_in_any_other(
    monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    stock, shadow = shadowed(num_blocks=40)
    for engine in (stock, shadow):
        engine.serve(prompt(1, 64), hint=hinted("a", 60.0))
        with monkeypatch.context() as planted:
            planted.setattr(SessionAwareManager, "request_added", fails)
            engine.serve(prompt(2, 64), hint=hinted("a", 60.0))
        engine.serve(prompt(3, 400))
    assert shadow.scheduler.agent_hint.sam is None
    assert observed(stock) == observed(shadow)
    assert shadow.pool.num_retained_blocks == 0


def test_only_shadow_mode_has_the_shadow_queue() -> None:
    acting = Engine(make_scheduler(plugged=True))
    _, shadow = shadowed()
    assert type(acting.pool.free_block_queue) is AgentFreeKVCacheBlockQueue
    assert type(shadow.pool.free_block_queue) is ShadowFreeKVCacheBlockQueue
