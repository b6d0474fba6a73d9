"""What an evict leaves behind for those who hold no claim: heirs, and no more than it takes."""

import pytest

from tests.unit.naive_sam import check_marks
from tests.unit.plain_engine import EVICT, PAGE, PlainEngine
from tests.unit.session_invariants import check_invariants
from vllm_agent_hint.hints import EditType
from vllm_agent_hint.sessions.intent import Edit, Protection, SessionKey
from vllm_agent_hint.settings import Settings

A = SessionKey("", None, "a")
B = SessionKey("", None, "b")
C = SessionKey("", None, "c")


@pytest.fixture
def engine() -> PlainEngine:
    return PlainEngine(settings=Settings(idle_seconds=600.0), is_naive_beside=True)


@pytest.fixture
def slow_engine() -> PlainEngine:
    """One that releases two blocks a step, and takes no step by itself."""
    settings = Settings(idle_seconds=600.0, release_slice=2)
    return PlainEngine(settings=settings, has_steps_after_each_call=False)


def seconds_left(engine: PlainEngine, block_id: int) -> float:
    return engine.port.blocks[block_id].deadline - engine.now


def test_evict_asks_for_no_more_heirs_than_it_needs(engine: PlainEngine) -> None:
    """The other session gives the block as long a time as the evicted one did."""
    engine.turn(A, "xyz", Protection(300.0, end_token=PAGE), Protection(60.0))
    engine.turn(B, "xyz", Protection(300.0, end_token=PAGE), Protection(60.0))
    engine.serve_outsider([3])
    engine.evict(A)
    assert engine.sam.num_heirs == 0


def test_an_heir_takes_no_sessions_place() -> None:
    engine = PlainEngine(settings=Settings(max_sessions=2))
    engine.turn(B, "w", ttl=60.0)
    engine.turn(A, "xyz", ttl=60.0)
    engine.serve_outsider([2, 3, 4])
    engine.evict(A)
    assert engine.sam.num_heirs == 1
    assert engine.counts_of(engine.blocks_of(B)) == [1]
    engine.turn(C, "v", ttl=60.0)
    assert engine.sam.num_heirs == 1
    assert B not in engine.sam.sessions


def test_an_heir_of_the_same_context_is_prolonged_and_not_doubled(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    engine.serve_outsider([1, 2, 3])
    engine.evict(A)
    for _ in range(3):
        engine.wait(10.0)
        engine.turn(A, "xyz", ttl=60.0)
        engine.evict(A)
    assert engine.sam.num_heirs == 1
    assert [engine.port.blocks[i].deadline - engine.now for i in (1, 2, 3)] == [60.0] * 3


@pytest.mark.parametrize(
    ("first", "second"), [(300.0, 60.0), (60.0, 300.0)], ids=["shorter", "longer"]
)
def test_an_heir_keeps_the_longer_lease_whole_whichever_comes_first(
    engine: PlainEngine, first: float, second: float
) -> None:
    """Its time to live is that of the lease whose deadline it has."""
    for ttl in (first, second):
        engine.turn(A, "xyz", ttl=ttl)
        engine.serve_outsider([1, 2, 3])
        engine.evict(A)
    (heir,) = (session for session in engine.sam.sessions.values() if session.is_heir)
    (lease,) = heir.leases
    assert (lease.ttl, lease.deadline) == (300.0, engine.now + 300.0)
    check_marks(engine.port, engine.naive)


def test_a_block_needs_no_heir_for_what_another_prompt_of_its_session_was_kept_for(
    engine: PlainEngine,
) -> None:
    """Nobody protected it: the one prompt's lease ended before it, the other has no such block."""
    engine.turn(A, "w", ttl=300.0)
    engine.turn(A, "xyz", Protection(60.0, end_token=PAGE))
    engine.turn(B, "xyz", ttl=0.0)
    of_y = engine.blocks_of(B)[1]
    engine.serve_outsider([of_y])
    engine.evict(A)
    assert engine.sam.num_heirs == 0
    assert engine.counts_of([of_y]) == [1]
    check_marks(engine.port, engine.naive)


@pytest.mark.parametrize(
    "earlier",
    [Protection(300.0), Protection(60.0), Protection(20.0)],
    ids=["longer", "as long", "shorter"],
)
@pytest.mark.parametrize(
    "later",
    [Protection(60.0), Protection(60.0, end_token=PAGE), Protection(0.0)],
    ids=["whole", "not to there", "nothing"],
)
def test_what_several_prompts_of_a_session_share_has_one_heir(
    engine: PlainEngine, earlier: Protection, later: Protection
) -> None:
    """The one with the lease that protects it longest; the others would only hold it as well."""
    engine.turn(A, "xyuu", earlier)
    engine.turn(A, "xyvv", later)
    assert len(engine.sam.sessions[A].lineages) == 2
    of_y = engine.blocks_of(A)[1]
    kept_for = seconds_left(engine, of_y)
    assert engine.counts_of([of_y]) == [2]
    engine.serve_outsider([of_y])
    engine.evict(A)
    assert engine.counts_of([of_y]) == [1]
    assert seconds_left(engine, of_y) == kept_for
    check_marks(engine.port, engine.naive)


def test_what_another_session_holds_too_has_one_heir_of_three_prompts(engine: PlainEngine) -> None:
    """Of the one that gave the block its deadline, whichever of them is given up first."""
    engine.turn(A, "xyuu", ttl=30.0)
    engine.turn(A, "xyvv", Protection(60.0, end_token=PAGE))
    engine.turn(A, "xyww", Protection(60.0, end_token=PAGE))
    assert len(engine.sam.sessions[A].lineages) == 3
    engine.turn(B, "xy", ttl=0.0)
    of_y = engine.blocks_of(B)[1]
    engine.serve_outsider([of_y])
    engine.evict(A)
    assert engine.counts_of([of_y]) == [2], "B and the heir"
    assert seconds_left(engine, of_y) == 30.0
    check_marks(engine.port, engine.naive)


def evict_slowly(engine: PlainEngine, key: SessionKey, of_interest: int) -> list[float]:
    """The seconds for which a block is kept, after each slice of an evict."""
    engine.sam.start_edits(key, [EVICT], engine.now, lambda _: None)
    kept_for = [seconds_left(engine, of_interest)]
    while engine.step():
        check_invariants(engine.sam, engine.port, engine.settings)
        kept_for.append(seconds_left(engine, of_interest))
        if not len(engine.sam.releases):
            break
    return kept_for


def test_what_a_stranger_uses_is_kept_between_the_slices_of_two_prompts(
    slow_engine: PlainEngine,
) -> None:
    """The prompt that is let go of first takes nothing off what the next one's heir will keep."""
    slow_engine.turn(A, "xyzuuu", ttl=60.0)
    slow_engine.turn(A, "xyzvvv", Protection(300.0, end_token=PAGE))
    of_y = slow_engine.blocks_of(A)[1]
    slow_engine.serve_outsider([of_y])
    kept_for = evict_slowly(slow_engine, A, of_y)
    assert len(kept_for) > 4
    assert set(kept_for) == {60.0}


def test_what_a_stranger_uses_is_kept_when_another_lets_go_of_it_between_two_slices(
    slow_engine: PlainEngine,
) -> None:
    """Between an evict and its last slice its claims are owed to their heirs, whoever asks."""
    slow_engine.turn(A, "xyzabc", ttl=60.0)
    slow_engine.turn(B, "xy", ttl=300.0)
    of_y = slow_engine.blocks_of(B)[1]
    slow_engine.serve_outsider([of_y])
    slow_engine.sam.start_edits(A, [EVICT], slow_engine.now, lambda _: None)
    slow_engine.turn(B, "xy", ttl=0.0)
    assert seconds_left(slow_engine, of_y) == 60.0
    slow_engine.tick_to_the_end()
    assert seconds_left(slow_engine, of_y) == 60.0
    check_invariants(slow_engine.sam, slow_engine.port, slow_engine.settings)


def test_an_heir_that_outlasts_an_evicted_context_is_not_asked_to_go_on(
    slow_engine: PlainEngine,
) -> None:
    """Also while a third session, which gave the block most, is between two slices of an evict."""
    slow_engine.turn(A, "xy", ttl=200.0)
    of_y = slow_engine.blocks_of(A)[1]
    slow_engine.serve_outsider([of_y])
    slow_engine.sam.start_edits(A, [EVICT], slow_engine.now, lambda _: None)
    slow_engine.tick_to_the_end()
    (heir,) = (session for session in slow_engine.sam.sessions.values() if session.is_heir)
    slow_engine.turn(B, "xy", ttl=60.0)
    slow_engine.turn(C, "xyzabcdefghi", ttl=300.0)
    whole = Edit(EditType.EVICT, 0, 2 * PAGE)
    for key, edit in ((C, EVICT), (B, whole), (B, EVICT)):
        # The second edit on B brings the first to its end, before it is its turn.
        slow_engine.sam.start_edits(key, [edit], slow_engine.now, lambda _: None)
    assert len(slow_engine.sam.releases)
    (lease,) = heir.leases
    assert lease.deadline <= slow_engine.now + lease.ttl
    slow_engine.tick_to_the_end()
    assert seconds_left(slow_engine, of_y) == 300.0
