"""Parents and children: the leader that waits for its workers, and trees that end together."""

from itertools import pairwise

import pytest

from tests.unit.plain_engine import EVICT, PlainEngine, Request
from tests.unit.session_invariants import check_invariants, check_nothing_left
from vllm_agent_hint.hints import EditStatus, EditType
from vllm_agent_hint.sessions.intent import Edit, Protection, SessionIntent, SessionKey
from vllm_agent_hint.settings import GiveWay, Settings

LEADER = SessionKey("", None, "leader")
WORKER = SessionKey("", None, "worker")
TREE = Edit(EditType.EVICT, include_children=True)


@pytest.fixture
def engine() -> PlainEngine:
    return PlainEngine(num_blocks=200, settings=Settings(leader_wait_seconds=1000.0))


def child_of(
    engine: PlainEngine, parent: str, key: SessionKey = WORKER, *, ttl: float | None = None
) -> Request:
    protections = () if ttl is None else (Protection(ttl),)
    intent = SessionIntent(key, parent_session_id=parent, protections=protections)
    request = engine.arrive(intent)
    assert request is not None
    return request


def is_kept(engine: PlainEngine, key: SessionKey) -> bool:
    return bool(engine.sam.sessions[key].num_records)


def test_a_leaders_lease_outlasts_its_end_while_a_worker_has_a_request_alive(
    engine: PlainEngine,
) -> None:
    engine.turn(LEADER, "plan", ttl=60.0)
    work = child_of(engine, "leader")
    engine.run(work, "work")
    engine.wait(600.0)
    assert is_kept(engine, LEADER)
    engine.end(work)
    engine.wait(2.0)
    assert not is_kept(engine, LEADER)


def test_a_leaders_lease_outlasts_its_end_while_a_worker_has_a_lease(engine: PlainEngine) -> None:
    engine.turn(LEADER, "plan", ttl=60.0)
    work = child_of(engine, "leader", ttl=300.0)
    engine.run(work, "work")
    engine.end(work)
    engine.wait(200.0)
    assert is_kept(engine, LEADER)
    engine.wait(101.0)
    assert not is_kept(engine, WORKER)
    assert not is_kept(engine, LEADER)


def test_a_leader_waits_no_longer_than_it_may(engine: PlainEngine) -> None:
    engine.turn(LEADER, "plan", ttl=60.0)
    child_of(engine, "leader")
    engine.wait(1058.0)
    assert is_kept(engine, LEADER)
    engine.wait(5.0)
    assert not is_kept(engine, LEADER)


def test_a_leader_that_may_not_wait_does_not() -> None:
    engine = PlainEngine(settings=Settings(leader_wait_seconds=0.0))
    engine.turn(LEADER, "plan", ttl=60.0)
    child_of(engine, "leader")
    engine.wait(62.0)
    assert not is_kept(engine, LEADER)


def test_a_leader_waits_for_the_workers_of_its_workers(engine: PlainEngine) -> None:
    engine.turn(LEADER, "plan", ttl=60.0)
    work = child_of(engine, "leader", ttl=60.0)
    engine.run(work, "work")
    engine.end(work)
    deep = child_of(engine, "worker", SessionKey("", None, "deep"))
    engine.wait(600.0)
    assert is_kept(engine, LEADER)
    assert is_kept(engine, WORKER)
    engine.run(deep, "deep")
    engine.end(deep)
    engine.wait(2.0)
    assert not is_kept(engine, LEADER)


def test_evicting_the_worker_ends_the_wait(engine: PlainEngine) -> None:
    engine.turn(LEADER, "plan", ttl=60.0)
    work = child_of(engine, "leader", ttl=900.0)
    engine.run(work, "work")
    engine.end(work)
    engine.wait(100.0)
    assert is_kept(engine, LEADER)
    engine.evict(WORKER)
    engine.wait(2.0)
    assert not is_kept(engine, LEADER)


def test_a_worker_that_gives_way_ends_the_wait() -> None:
    settings = Settings(protected_share=0.5, give_way=GiveWay.DEADLINE)
    engine = PlainEngine(num_blocks=41, settings=settings)
    engine.turn(LEADER, "leader's", ttl=5.0)
    work = child_of(engine, "leader", ttl=600.0)
    engine.run(work, "worker")
    engine.end(work)
    engine.wait(10.0)
    assert is_kept(engine, LEADER)
    engine.turn(SessionKey("", None, "other"), "somebody els", ttl=1000.0)
    assert not is_kept(engine, WORKER)
    engine.wait(2.0)
    assert not is_kept(engine, LEADER)


def test_an_overdue_leader_with_a_worker_is_looked_at_again_with_the_next_tick() -> None:
    """Its idle time was over long ago, but the engine slept. Then its worker had ended, too."""
    engine = PlainEngine(is_naive_beside=True)
    assert engine.naive is not None
    engine.turn(LEADER, "xy", ttl=5.0)
    engine.wait(10_000.0)
    worker = child_of(engine, "leader", ttl=5.0)
    engine.run(worker, "w")
    engine.end(worker)
    for seconds in (1.0, 300.0):
        engine.wait(seconds)
        assert len(engine.sam.sessions) == len(engine.naive.sessions)
    assert LEADER not in engine.sam.sessions


def test_an_unknown_parent_is_made_in_the_childs_tenant_and_salt(engine: PlainEngine) -> None:
    child_of(engine, "boss", SessionKey("t", "salt", "worker"))
    assert SessionKey("t", "salt", "boss") in engine.sam.sessions
    check_invariants(engine.sam, engine.port, engine.settings)


def test_a_parent_that_was_only_named_ends_some_time_after_its_children(
    engine: PlainEngine,
) -> None:
    boss = SessionKey("", None, "boss")
    work = child_of(engine, "boss")
    engine.wait(1900.0)
    assert boss in engine.sam.sessions
    engine.end(work, succeeds=False)
    engine.wait(1801.0)
    engine.wait(1801.0)
    assert boss not in engine.sam.sessions


@pytest.mark.timeout(20)  # Who walks up a ring never arrives.
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_link_that_would_close_a_cycle_is_rejected_and_the_request_runs(
    engine: PlainEngine, length: int
) -> None:
    names = [f"s{i}" for i in range(length + 1)]
    for parent, child in pairwise(names):
        engine.end(child_of(engine, parent, SessionKey("", None, child)), succeeds=False)
    request = child_of(engine, names[-1], SessionKey("", None, names[0]))
    assert engine.sam.counters.links_rejected == 1
    engine.run(request, "xyz")
    _, prefixes = engine._recorded(request)
    result = engine.sam.request_finished(request.live, prefixes, engine.now, succeeded=True)
    assert "cycle" in result.reason
    assert result.status is EditStatus.APPLIED


def test_a_link_that_would_go_too_deep_is_rejected() -> None:
    engine = PlainEngine(settings=Settings(max_depth=3))
    for depth in range(4):
        child_of(engine, f"s{depth}", SessionKey("", None, f"s{depth + 1}"))
    assert engine.sam.counters.links_rejected == 1
    assert engine.sam.sessions[SessionKey("", None, "s3")].parent is None


def test_a_child_that_names_another_parent_moves(engine: PlainEngine) -> None:
    child_of(engine, "first")
    child_of(engine, "second")
    parent = engine.sam.sessions[WORKER].parent
    assert parent is not None
    assert parent.key == SessionKey("", None, "second")
    assert not engine.sam.sessions[SessionKey("", None, "first")].children


def test_a_tree_is_freed_children_first_and_leaves_nothing(engine: PlainEngine) -> None:
    engine.turn(LEADER, "plan", ttl=60.0)
    for name in ("one", "two"):
        work = child_of(engine, "leader", SessionKey("", None, name), ttl=60.0)
        engine.run(work, name)
        engine.end(work)
    deep = child_of(engine, "one", SessionKey("", None, "deep"))
    engine.run(deep, "deep")
    of_workers = {
        i for name in ("one", "two") for i in engine.blocks_of(SessionKey("", None, name))
    }
    engine.port.fronted.clear()
    (result,) = engine.apply_edits(LEADER, [TREE])
    assert result.status is EditStatus.APPLIED
    assert set(engine.port.fronted[: len(of_workers)]) == of_workers
    assert len(engine.port.fronted) > len(of_workers), "the leader's come last"
    assert "4 sessions" in result.reason
    assert engine.sam.sessions == {}
    check_nothing_left(engine.sam, engine.port)
    engine.end(deep)
    check_nothing_left(engine.sam, engine.port)


def test_freeing_a_tree_leaves_its_siblings_and_a_strangers_prefix_alone(
    engine: PlainEngine,
) -> None:
    engine.turn(LEADER, "plan", ttl=60.0)
    engine.turn(SessionKey("", None, "sibling"), "plan", ttl=60.0)
    engine.serve_outsider(engine.blocks_of(LEADER)[:1])
    engine.apply_edits(LEADER, [TREE])
    assert engine.counts_of(engine.blocks_of(SessionKey("", None, "sibling"))) == [1] * 4


def test_an_evict_without_children_leaves_them(engine: PlainEngine) -> None:
    engine.turn(LEADER, "plan", ttl=60.0)
    work = child_of(engine, "leader", ttl=60.0)
    engine.run(work, "work")
    engine.end(work)
    engine.apply_edits(LEADER, [EVICT])
    assert is_kept(engine, WORKER)
    assert engine.sam.sessions[WORKER].parent is engine.sam.sessions[LEADER]


def test_the_children_of_a_freed_session_have_no_parent(engine: PlainEngine) -> None:
    engine.turn(LEADER, "plan", ttl=60.0)
    child_of(engine, "leader")
    engine.free_session(LEADER)
    assert engine.sam.sessions[WORKER].parent is None
