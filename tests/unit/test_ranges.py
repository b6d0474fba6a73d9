"""Ranges: logical blocks of a session's context, never physical ones."""

import pytest

from tests.unit.plain_engine import DENSE, HYBRID, PAGE, PlainEngine
from tests.unit.session_invariants import check_invariants
from vllm_agent_hint.hints import EditResult, EditStatus, EditType, parse_agent_hint
from vllm_agent_hint.sessions.intent import Edit, Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.lineage import GroupLayout
from vllm_agent_hint.settings import Settings

A = SessionKey("", None, "a")
B = SessionKey("", None, "b")


@pytest.fixture
def engine() -> PlainEngine:
    return PlainEngine(num_blocks=100)


def evict(engine: PlainEngine, start: int, end: int, key: SessionKey = A) -> EditResult:
    edit = Edit(EditType.EVICT, start * PAGE, end * PAGE)
    (result,) = engine.apply_edits(key, [edit])
    check_invariants(engine.sam, engine.port, engine.settings)
    return result


def test_the_wire_counts_in_logical_blocks() -> None:
    hint = parse_agent_hint(
        {
            "session_id": "a",
            "cache_control": {"block_offset": 2},
            "context_management": {
                "edits": [{"type": "evict", "block_start": 1, "block_end": 3}, {"type": "evict"}]
            },
        },
        settings=Settings(ranges=True),
    )
    intent = SessionIntent.from_agent_hint(hint, block_size=PAGE)
    assert intent.protections == (Protection(300.0, 2 * PAGE),)
    assert intent.edits == (Edit(EditType.EVICT, PAGE, 3 * PAGE), Edit(EditType.EVICT))


def test_a_block_offset_protects_what_lies_before_it(engine: PlainEngine) -> None:
    engine.turn(A, "vwxyz", Protection(60.0, 2 * PAGE))
    assert engine.deadlines_of(A) == [60.0, 60.0, 0.0, 0.0, 0.0]
    assert engine.counts_of(engine.blocks_of(A)) == [1] * 5


def test_a_block_offset_of_zero_protects_nothing_and_keeps_the_association(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "xyz", Protection(60.0, 0))
    assert engine.deadlines_of(A) == [0.0] * 3
    assert engine.counts_of(engine.blocks_of(A)) == [1] * 3


def test_evict_of_a_range_ends_the_claim_behind_it_too(engine: PlainEngine) -> None:
    engine.turn(A, "uvwxyz", ttl=60.0)
    blocks = engine.blocks_of(A)
    result = evict(engine, 2, 4)
    assert (result.status, result.blocks, result.beyond_range) == (EditStatus.APPLIED, 2, 2)
    assert engine.counts_of(blocks) == [1, 1, 0, 0, 0, 0]
    assert engine.deadlines_of(A) == [60.0, 60.0]
    assert engine.port.fronted == blocks[:1:-1], "tail first"


def test_evict_of_a_range_at_the_start_ends_the_whole_context(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    evict(engine, 0, 1)
    assert engine.port.num_retained_blocks == 0
    assert A in engine.sam.sessions


def test_a_prompt_of_which_an_evicted_range_leaves_nothing_takes_its_lease_along() -> None:
    """The bound on records left no room for the second prompt: it has a lease, and no block."""
    engine = PlainEngine(settings=Settings(max_records=len("main")))
    engine.turn(A, "main", ttl=60.0)
    engine.turn(A, "title", ttl=60.0)
    assert [len(lineage) for lineage in engine.sam.sessions[A].lineages] == [4, 0]
    evict(engine, 1, 2)
    assert engine.sam.num_leases == 1
    engine.wait(61.0)
    assert engine.sam.num_leases == 0
    assert engine.sam.num_records == 0


def test_a_session_whose_only_lease_an_evicted_range_takes_along_ends_one_day() -> None:
    """The lease was that of a prompt without a block; what is left has none."""
    settings = Settings(max_records=len("main"), associated_seconds=100.0, idle_seconds=600.0)
    engine = PlainEngine(settings=settings)
    engine.turn(A, "main", ttl=0.0)
    engine.turn(A, "title", ttl=60.0)
    evict(engine, 1, 2)
    assert engine.sam.num_leases == 0
    without_a_lease = engine.sam.standing.in_order(engine.now, leased=False)
    assert next(without_a_lease, None) is engine.sam.sessions[A]
    engine.wait(98.0)
    assert engine.sam.num_records == 1
    engine.wait(4.0)
    assert engine.sam.num_records == 0
    engine.wait(600.0)
    assert A not in engine.sam.sessions


def test_a_range_that_reaches_too_far_is_partial(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    result = evict(engine, 1, 9)
    assert (result.status, result.blocks, result.tokens) == (EditStatus.PARTIAL, 2, 2 * PAGE)


def test_a_range_behind_the_context_is_missing(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    assert evict(engine, 5, 9).status is EditStatus.MISSING
    assert engine.deadlines_of(A) == [60.0] * 3


def test_evict_of_a_range_leaves_another_sessions_claim_alone(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    engine.turn(B, "xyz", ttl=30.0)
    evict(engine, 1, 2)
    assert engine.deadlines_of(B) == [60.0, 30.0, 30.0]


def test_evict_of_a_range_leaves_a_strangers_prefix_as_protected_as_it_was(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    blocks = engine.blocks_of(A)
    engine.serve_outsider(blocks[:2])
    result = evict(engine, 1, 3)
    assert engine.counts_of(blocks) == [1, 1, 0]
    assert engine.port.blocks[blocks[1]].deadline == engine.now + 60.0
    assert result.blocks == 2
    assert result.reason == "", "nothing is said of others, who may be another tenant's"


def test_a_turn_after_an_evicted_range_records_it_again(engine: PlainEngine) -> None:
    engine.turn(A, "vwxyz", ttl=60.0)
    evict(engine, 2, 3)
    engine.turn(A, "vwxyz", ttl=60.0)
    assert engine.deadlines_of(A) == [60.0] * 5
    assert len(engine.sam.sessions[A].lineages) == 1


@pytest.mark.parametrize("layouts", [DENSE, HYBRID], ids=["dense", "hybrid"])
@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("length", [1, 3])
def test_any_range_leaves_exactly_what_lies_before_it(
    layouts: tuple[GroupLayout, ...], start: int, length: int
) -> None:
    engine = PlainEngine(layouts, 200)
    engine.turn(A, "uvwxyz", Protection(60.0), Protection(600.0, end_token=3 * PAGE))
    evict(engine, start, start + length)
    session = engine.sam.sessions[A]
    for group, layout in enumerate(layouts):
        kept = [
            chain.logical_index(i)
            for lineage in session.lineages
            for chain in [lineage.chains[group]]
            for i in range(len(chain))
        ]
        assert kept == [
            i for i in range(6 * PAGE // layout.block_size) if i * layout.block_size < start * PAGE
        ]
