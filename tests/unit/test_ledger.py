"""The accounts of shared contexts: what they cost, and that shortcuts don't change the answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plain_engine import DENSE, HYBRID, PAGE, PlainEngine
from tests.unit.session_invariants import check_records, owners_by_chains
from vllm_agent_hint.sessions import deadlines
from vllm_agent_hint.sessions.deadlines import DeadlineSteps
from vllm_agent_hint.sessions.intent import Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.lineage import (
    Chain,
    GroupLayout,
    Lease,
    Lineage,
    eviction_order,
)
from vllm_agent_hint.sessions.session import Session
from vllm_agent_hint.sessions.tail import tail_first
from vllm_agent_hint.settings import Placement

KEYS = [SessionKey("", None, f"session-{n}") for n in range(40)]
PAGES = "abcdefghijklmnop"


@pytest.fixture
def shared() -> PlainEngine:
    """Forty sessions that share sixteen blocks."""
    engine = PlainEngine(num_blocks=64)
    for n, key in enumerate(KEYS):
        engine.turn(key, PAGES, ttl=100.0 + n)
    return engine


@contextmanager
def counted_owner_walks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often deadlines of owners are worked out, each with the number of owners."""
    walks: list[int] = []

    def counting(chains: Any, block_size: int) -> DeadlineSteps:
        chains = tuple(chains)
        walks.append(len(chains))
        return DeadlineSteps(chains, block_size)

    with monkeypatch.context() as patch:
        patch.setattr(deadlines, "DeadlineSteps", counting)
        yield walks


# -- what sharing costs ----------------------------------------------------------------------------


@pytest.mark.parametrize("placement", Placement)
def test_a_slice_of_a_shared_prefix_asks_its_owners_once(
    shared: PlainEngine, monkeypatch: pytest.MonkeyPatch, placement: Placement
) -> None:
    longest = shared.sam.sessions[KEYS[-1]].lineage
    with counted_owner_walks(monkeypatch) as walks:
        shared.sam.ledger.release_tail(longest, 8, placement=placement)
    assert walks == [len(KEYS) - 1]
    blocks = shared.blocks_of(KEYS[0])
    assert shared.counts_of(blocks) == [40] * 8 + [39] * 8
    assert shared.deadlines_of(KEYS[0]) == [139.0] * 8 + [138.0] * 8
    check_records(shared.sam, shared.port, owners_by_chains(shared.sam))


def test_leaving_a_shared_prefix_asks_nobody_where_another_protects_it_longer(
    shared: PlainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_owner_walks(monkeypatch) as walks:
        shared.sam.ledger.release_tail(shared.sam.sessions[KEYS[3]].lineage, 8)
    assert walks == []
    assert shared.deadlines_of(KEYS[0]) == [139.0] * 16


def test_a_turn_with_a_shorter_ttl_on_a_shared_prefix_asks_its_owners_once(
    shared: PlainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_owner_walks(monkeypatch) as walks:
        shared.turn(KEYS[-1], PAGES, ttl=7.0)
    assert walks == [len(KEYS) - 1]
    assert shared.deadlines_of(KEYS[0]) == [138.0] * 16


def test_a_turn_with_a_longer_ttl_on_a_shared_prefix_asks_nobody(
    shared: PlainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_owner_walks(monkeypatch) as walks:
        shared.turn(KEYS[5], PAGES, ttl=1000.0)
    assert walks == []
    assert shared.deadlines_of(KEYS[0]) == [1000.0] * 16


def test_a_turn_with_a_shorter_ttl_asks_nobody_where_another_protects_the_prefix_longer(
    shared: PlainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_owner_walks(monkeypatch) as walks:
        shared.turn(KEYS[5], PAGES, ttl=7.0)
    assert walks == []
    assert shared.deadlines_of(KEYS[0]) == [139.0] * 16


def test_owners_that_alternate_from_block_to_block_are_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = PlainEngine((GroupLayout(PAGE), GroupLayout(PAGE, True, True)), num_blocks=64)
    for key, every in zip(KEYS[:3], (1, 1, 2), strict=True):
        request = engine.arrive(SessionIntent(key, protections=(Protection(60.0),)))
        assert request is not None
        engine.run(request, PAGES, checkpoints=[(), range(0, len(PAGES), every)])
        engine.end(request)
    with counted_owner_walks(monkeypatch) as walks:
        engine.sam.ledger.release_tail(engine.sam.sessions[KEYS[0]].lineage, 32)
    assert sorted(walks) == [1, 2, 2], "the states of two sessions and of three, attention blocks"


def test_a_hit_on_a_shared_prefix_looks_at_its_owners_once(
    shared: PlainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, looks = shared.sam.ledger.index, []
    chains_of = index.chains_of
    monkeypatch.setattr(index, "chains_of", lambda held: looks.append(held) or chains_of(held))
    blocks = shared.blocks_of(KEYS[0])
    hashes = [shared.port.blocks[i].hash for i in blocks]
    session = shared.sam.sessions[KEYS[0]]
    shared.sam.ledger.usage.note_hits(session, 0, blocks, hashes)
    assert len(looks) == 1
    chain = session.lineage.chains[0]
    assert not any(shared.sam.ledger.is_exclusive(chain, i) for i in range(len(chain)))


def test_what_two_sessions_have_computed_is_not_offered_for_reuse_when_one_leaves() -> None:
    engine = PlainEngine()
    engine.turn(KEYS[0], "xyz", ttl=60.0)
    request = engine.arrive(SessionIntent(KEYS[1], protections=(Protection(300.0),)))
    assert request is not None
    engine.run(request, "xyz", forgone_hits=3)
    engine.end(request)
    assert engine.blocks_of(KEYS[0]) == engine.blocks_of(KEYS[1])
    lineage = engine.sam.sessions[KEYS[0]].lineage
    engine.sam.ledger.release_tail(lineage, 3, placement=Placement.FRONT)
    assert engine.port.fronted == []
    assert engine.deadlines_of(KEYS[1]) == [300.0] * 3


# -- what a tenant holds ---------------------------------------------------------------------------


def test_a_block_counts_once_for_a_tenant_however_many_of_its_sessions_hold_it() -> None:
    engine = PlainEngine()
    index = engine.sam.ledger.index
    engine.turn(SessionKey("acme", None, "a"), "xyz", ttl=60.0)
    engine.turn(SessionKey("acme", None, "b"), "xyzw", ttl=60.0)
    engine.turn(SessionKey("umbrella", None, "a"), "xy", ttl=60.0)
    engine.turn(None, "xy", ttl=60.0)
    counts = [index.num_blocks_of(tenant) for tenant in ("acme", "umbrella", "", "nobody")]
    assert counts == [4, 2, 2, 0]
    engine.free_session(SessionKey("acme", None, "b"))
    assert index.num_blocks_of("acme") == 3
    engine.port.lose(engine.blocks_of(SessionKey("umbrella", None, "a"))[0])
    counts = [index.num_blocks_of(tenant) for tenant in ("acme", "umbrella", "")]
    assert counts == [2, 1, 1]


# -- deadlines of several owners -------------------------------------------------------------------

LEASES = st.lists(
    st.tuples(st.sampled_from([None, 0, 5, 16, 17, 40, 48]), st.integers(1, 9)), max_size=3
)


@given(st.lists(LEASES, max_size=4), st.sampled_from([16, 32]))
def test_a_staircase_gives_each_block_the_latest_deadline_that_covers_it(
    owners: list[list[tuple[int | None, int]]], block_size: int
) -> None:
    chains: list[Chain] = []
    for leases in owners:
        lineage = Session(0, 1).lineage
        lineage.leases = [Lease(lineage, 1.0, end, float(d)) for end, d in leases]
        chains += lineage.chains
    steps = DeadlineSteps(chains, block_size)
    for logical in range(5):
        first_token = logical * block_size
        covering = [d for each in owners for end, d in each if end is None or end > first_token]
        assert steps.at(logical) == max(covering, default=0.0)
    if steps.flat is not None:
        assert {steps.at(logical) for logical in range(5)} == {steps.flat}


# -- the tail of a hybrid context ------------------------------------------------------------------


@st.composite
def recorded_lineages(draw: st.DrawFn) -> tuple[tuple[GroupLayout, ...], Lineage]:
    """A lineage over a few KV cache groups, the first an attention group."""
    sizes, flags = st.sampled_from([PAGE, 2 * PAGE, 3 * PAGE]), st.booleans()
    rest = draw(st.lists(st.builds(GroupLayout, sizes, flags, flags), max_size=3))
    layouts = (GroupLayout(PAGE), *rest)
    lineage = Lineage(Session(0, len(layouts)), len(layouts))
    for chain, layout in zip(lineage.chains, layouts, strict=True):
        logical = list(range(draw(st.integers(0, 8))))
        if layout.is_checkpoint:
            logical = sorted(draw(st.sets(st.integers(0, 9))))
            chain.logical = logical
        chain.block_ids = list(range(len(logical)))
        chain.hashes = [b""] * len(logical)
        chain.computed = bytearray(len(logical))
    return layouts, lineage


@given(recorded_lineages(), st.one_of(st.none(), st.integers(0, 40)), st.integers(0, 9 * PAGE))
def test_a_tail_is_the_beginning_of_the_order_of_reuse(
    case: tuple[tuple[GroupLayout, ...], Lineage], limit: int | None, floor_token: int
) -> None:
    layouts, lineage = case
    logical = [[c.logical_index(i) for i in range(len(c))] for c in lineage.chains]
    expected = [
        (group, position)
        for group, position in eviction_order(layouts, logical)
        if logical[group][position] * layouts[group].block_size >= floor_token
    ]
    found = tail_first(layouts, lineage.chains, limit=limit, floor_token=floor_token)
    assert found == expected[:limit]


def test_a_slice_of_a_hybrid_context_does_not_look_at_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lineage = Lineage(Session(0, 2), 2)
    lineage.chains[0].block_ids = list(range(1000))
    lineage.chains[1].block_ids = list(range(500))
    lineage.chains[1].logical = list(range(0, 1000, 2))
    looks: list[int] = []
    logical_index = Chain.logical_index
    monkeypatch.setattr(
        Chain,
        "logical_index",
        lambda chain, i: looks.append(i) or logical_index(chain, i),
    )
    layouts = (GroupLayout(PAGE), GroupLayout(PAGE, True, True))
    assert len(tail_first(layouts, lineage.chains, limit=20)) == 20
    assert len(looks) < 60


@pytest.mark.parametrize("layouts", [DENSE, HYBRID], ids=["dense", "hybrid"])
@pytest.mark.parametrize("placement", Placement)
def test_a_context_that_is_let_go_in_slices_goes_in_one_order(
    layouts: tuple[GroupLayout, ...], placement: Placement
) -> None:
    orders = []
    for size in (1, 3, 100):
        engine = PlainEngine(layouts)
        engine.turn(KEYS[0], "abcdef", ttl=60.0)
        lineage = engine.sam.sessions[KEYS[0]].lineage
        hashes: list[bytes] = []
        while len(lineage):
            engine.sam.ledger.release_tail(lineage, size, placement=placement, history=hashes)
            check_records(engine.sam, engine.port, owners_by_chains(engine.sam))
        orders.append(hashes)
    assert orders[0] == orders[1] == orders[2]
    assert len(orders[0]) > 0
