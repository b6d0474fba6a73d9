"""Letting go in slices: what may come between two of them, and what must not be left behind."""

import pytest

from tests.unit.plain_engine import EVICT, PAGE, PlainEngine
from tests.unit.session_invariants import check_invariants, check_nothing_left
from vllm_agent_hint.hints import EditResult, EditStatus, EditType
from vllm_agent_hint.sessions.intent import Edit, Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.lineage import LOST
from vllm_agent_hint.settings import Settings

BIG = SessionKey("", None, "big")
A = SessionKey("", None, "a")


def slow_engine(**bounds: object) -> PlainEngine:
    """One that releases two blocks a step, and takes no step by itself."""
    settings = Settings(release_slice=2, **bounds)
    return PlainEngine(num_blocks=100, settings=settings, has_steps_after_each_call=False)


def start(engine: PlainEngine, key: SessionKey, *edits: Edit) -> list[EditResult]:
    results: list[EditResult] = []
    engine.sam.start_edits(key, edits or [EVICT], engine.now, results.extend)
    return results


def test_an_evict_answers_when_its_last_slice_is_released() -> None:
    engine = slow_engine()
    engine.turn(A, "abcdef", ttl=60.0)
    results = start(engine, A)
    assert results == []
    assert engine.sam.num_open_edits == 1
    engine.tick_to_the_end()
    assert [(r.status, r.blocks) for r in results] == [(EditStatus.APPLIED, 6)]
    assert engine.sam.num_open_edits == 0
    assert engine.port.num_retained_blocks == 0


def test_edits_answer_in_their_order_whichever_is_done_first() -> None:
    engine = slow_engine()
    engine.turn(A, "abcdef", ttl=60.0)
    results = start(engine, A, EVICT, Edit(EditType.OFFLOAD), EVICT)
    engine.tick_to_the_end()
    statuses = [EditStatus.APPLIED, EditStatus.UNSUPPORTED, EditStatus.MISSING]
    assert [r.status for r in results] == statuses


def test_a_turn_between_two_slices_of_an_evict_keeps_its_context() -> None:
    engine = slow_engine()
    engine.turn(A, "abcdef", ttl=60.0)
    start(engine, A)
    engine.turn(A, "abcdef", ttl=60.0)
    engine.tick_to_the_end()
    assert engine.counts_of(engine.blocks_of(A)) == [1] * 6
    check_invariants(engine.sam, engine.port, engine.settings)


def test_a_turn_between_two_slices_of_a_range_evict_is_recorded_whole() -> None:
    engine = slow_engine()
    engine.turn(A, "abcdef", ttl=60.0)
    results = start(engine, A, Edit(EditType.EVICT, PAGE, 6 * PAGE))
    engine.turn(A, "abcdef", ttl=60.0)
    engine.tick_to_the_end()
    assert engine.deadlines_of(A) == [60.0] * 6
    assert [r.blocks for r in results] == [5]
    check_invariants(engine.sam, engine.port, engine.settings)


def test_an_evict_in_the_midst_of_an_expiry_takes_it_over() -> None:
    engine = slow_engine()
    engine.turn(A, "abcdef", ttl=2.0)
    engine.now += 4.0
    engine.step()
    results = start(engine, A)
    engine.tick_to_the_end()
    assert [(r.status, r.blocks) for r in results] == [(EditStatus.APPLIED, 4)]
    assert engine.port.num_retained_blocks == 0
    assert not engine.sam.sessions[A].history, "an evict forgets"


@pytest.mark.parametrize("latest", ["abcdef", "uvwxyz"])
@pytest.mark.parametrize("resumed", ["abcdef", "uvwxyz"])
def test_a_turn_of_several_prompts_between_two_slices_of_an_evict_of_all_is_recorded(
    latest: str, resumed: str
) -> None:
    """What an edit has emptied to its end is no prompt of the session any more."""
    engine = slow_engine()
    other = {"abcdef": "uvwxyz", "uvwxyz": "abcdef"}[latest]
    engine.turn(A, other, ttl=60.0)
    engine.turn(A, latest, ttl=60.0)
    assert len(engine.sam.sessions[A].lineages) == 2
    request = engine.arrive(SessionIntent(A, protections=(Protection(60.0),)))
    assert request is not None
    engine.run(request, resumed)
    start(engine, A, Edit(EditType.EVICT, 0, PAGE))
    engine.end(request)
    engine.tick_to_the_end()
    assert engine.counts_of(engine.blocks_of(A)) == [1] * 6
    check_invariants(engine.sam, engine.port, engine.settings)


def test_an_evict_right_behind_a_range_evict_answers_both() -> None:
    engine = slow_engine()
    engine.turn(A, "abcdef", ttl=60.0)
    first = start(engine, A, Edit(EditType.EVICT, 2 * PAGE, 6 * PAGE))
    second = start(engine, A)
    engine.tick_to_the_end()
    assert [r.blocks for r in first + second] == [4, 2]


@pytest.mark.parametrize("num_requests", [1, 2])
def test_a_lease_without_records_that_expires_late_ends_nothing_of_a_later_context(
    num_requests: int,
) -> None:
    """The queue is long, and meanwhile its session is evicted and used again."""
    engine = slow_engine(idle_seconds=30.0)
    engine.turn(BIG, [f"b{i}" for i in range(20)], ttl=2.0)
    engine.turn(A, "", ttl=2.0)
    engine.now += 4.0
    engine.step()
    start(engine, A)
    intent = SessionIntent(A, protections=(Protection(300.0),))
    requests = [engine.arrive(intent) for _ in range(num_requests)]
    for number, request in enumerate(requests):
        assert request is not None
        engine.run(request, f"{number}yz")
    engine.tick_to_the_end()
    engine.now += 60.0
    engine.tick_to_the_end()
    assert not engine.sam.sessions[A].is_freed
    for request in requests:
        engine.end(request)
    engine.tick_to_the_end()
    check_invariants(engine.sam, engine.port, engine.settings)
    assert engine.sam.num_records == 3 * num_requests


def engine_that_lets_a_title_writer_expire() -> PlainEngine:
    """A session of two prompts; the lease of the second has run out, and a slice is released."""
    engine = slow_engine()
    main = engine.arrive(SessionIntent(A, protections=(Protection(300.0),)))
    title = engine.arrive(SessionIntent(A, protections=(Protection(2.0),)))
    assert main is not None
    assert title is not None
    engine.run(main, "main")
    engine.run(title, "title writer")
    engine.end(main)
    engine.end(title)
    engine.now += 4.0
    engine.step()
    return engine


def test_an_expiry_that_another_prompt_of_the_session_has_interrupted_goes_on() -> None:
    engine = engine_that_lets_a_title_writer_expire()
    engine.turn(A, "main goes on", ttl=300.0)
    engine.tick_to_the_end()
    assert engine.sam.num_records == len("main goes on")
    check_invariants(engine.sam, engine.port, engine.settings)


def test_an_expiry_that_goes_on_beside_a_request_stops_for_the_next_one() -> None:
    """The next one may go on with the very prompt of which the first wants nothing."""
    engine = engine_that_lets_a_title_writer_expire()
    beside = engine.arrive(SessionIntent(A))
    assert beside is not None
    engine.run(beside, "main goes on")
    engine.step()
    left = engine.sam.num_records
    assert len("main") < left < len("main" + "title writer"), "it is half done"
    waits = engine.arrive(SessionIntent(A))
    assert waits is not None
    check_invariants(engine.sam, engine.port, engine.settings)
    engine.tick_to_the_end()
    assert engine.sam.num_records == left
    engine.run(waits, "title writer")
    assert waits.live.nearest is not None


def test_an_expiry_that_a_request_has_interrupted_and_then_failed_goes_on() -> None:
    engine = slow_engine()
    engine.turn(A, "abcdef", ttl=2.0)
    engine.now += 4.0
    engine.step()
    request = engine.arrive(SessionIntent(A))
    engine.end(request, succeeds=False)
    engine.tick_to_the_end()
    assert engine.port.num_retained_blocks == 0


def session_with_an_empty_prompt_before_another() -> PlainEngine:
    """An evict of a range of it waits behind another session's.

    The bound on records left no room for the title, and the agent has gone on since.
    """
    engine = slow_engine(max_records=20 + len("main"), protected_share=1.0)
    engine.turn(BIG, [f"b{i}" for i in range(20)], ttl=60.0)
    for pages in ("main", "title", "main"):
        engine.turn(A, pages, ttl=60.0)
    assert [len(lineage) for lineage in engine.sam.sessions[A].lineages] == [0, 4]
    start(engine, BIG)
    start(engine, A, Edit(EditType.EVICT, PAGE, 2 * PAGE))
    return engine


def test_a_session_freed_before_a_slice_of_a_range_evict_leaves_nothing() -> None:
    engine = session_with_an_empty_prompt_before_another()
    engine.free_session(A)
    engine.tick_to_the_end()
    engine.free_session(BIG)
    engine.tick_to_the_end()
    check_nothing_left(engine.sam, engine.port)


def test_an_offload_before_a_slice_of_a_range_evict_lets_go_of_what_it_has_saved() -> None:
    engine = session_with_an_empty_prompt_before_another()
    saved = Edit(EditType.OFFLOAD, 0, PAGE)
    assert engine.sam.release_offloaded(A, saved, engine.now, lambda: None) == ""
    engine.tick_to_the_end()
    assert engine.blocks_of(A) == [LOST]
    check_invariants(engine.sam, engine.port, engine.settings)


@pytest.mark.parametrize("edit", [EVICT, Edit(EditType.EVICT, PAGE, 9 * PAGE)])
def test_a_reset_answers_the_edits_that_are_not_done(edit: Edit) -> None:
    engine = slow_engine()
    engine.turn(A, "abcdef", ttl=60.0)
    results = start(engine, A, edit)
    engine.reset()
    assert len(results) == 1
    assert engine.sam.num_open_edits == 0


def test_a_freed_tree_lets_go_in_slices_and_leaves_nothing() -> None:
    engine = slow_engine()
    engine.turn(A, "abcdef", ttl=60.0)
    results = start(engine, A, Edit(EditType.EVICT, include_children=True))
    assert engine.sam.sessions == {}
    assert engine.port.num_retained_blocks == 4
    engine.tick_to_the_end()
    assert len(results) == 1
    check_nothing_left(engine.sam, engine.port)
