"""Who gives way first: resting sessions in the order of a policy."""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plain_engine import EVICT, HYBRID, PAGE, PlainEngine
from vllm_agent_hint.hints import EditType
from vllm_agent_hint.sessions.intent import Edit, Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.lineage import LOST
from vllm_agent_hint.sessions.policy import (
    DeadlinePolicy,
    RestingTurn,
    RetentionPolicy,
    ReusePolicy,
    policy_of,
)
from vllm_agent_hint.sessions.session import Session
from vllm_agent_hint.settings import GiveWay, Placement, Settings


class RisesThenFalls(RetentionPolicy):
    """What a session is worth rises until its class's peak and then falls."""

    def class_of(self, turn: RestingTurn) -> Hashable:
        return {"tool_call": 4.0, "final_message": 1.0, "cut": 15.0}.get(turn.ended, 8.0)

    def worth(self, turns: Hashable, resting: float) -> float:
        assert isinstance(turns, float)
        return -abs(resting - turns)


class Notes(RetentionPolicy):
    """Worth as a tool says; notes what it is taught."""

    def __init__(self, **placements: Placement) -> None:
        super().__init__(**placements)
        self.observed: list[tuple[str, float | None]] = []
        self.asked = 0

    def class_of(self, turn: RestingTurn) -> Hashable:
        return turn.tool

    def worth(self, turns: Hashable, resting: float) -> float:
        self.asked += 1
        return float(str(turns) or 0)

    def observe(self, turns: Hashable, gap: float | None) -> None:
        self.observed.append((str(turns), gap))


def key(name: str, tenant: str = "") -> SessionKey:
    return SessionKey(tenant, None, name)


def make_engine(
    policy: RetentionPolicy | None = None, *, num_blocks: int = 200, **options: Any
) -> PlainEngine:
    return PlainEngine(num_blocks=num_blocks, policy=policy, **options)


def pages(name: object, n: int = 3) -> list[object]:
    return [(name, k) for k in range(n)]


def rest(engine: PlainEngine, name: str, n: int = 3, ttl: float | None = None) -> None:
    """A turn of a session that shares nothing."""
    engine.turn(key(name), pages(name, n), ttl=ttl)


def ended(engine: PlainEngine, name: str, ending: str, *tools: str, **how: Any) -> bool:
    return engine.sam.turn_ended(key(name), "", ending, tools, engine.now, **how)


def first(engine: PlainEngine, *, leased: bool = False) -> str | None:
    session = next(engine.sam.standing.in_order(engine.now, leased=leased), None)
    return None if session is None else session.key.session_id


def order(engine: PlainEngine, *, leased: bool = False) -> list[str]:
    """Names of the sessions that stand, as they would leave one after another."""
    names: list[str] = []
    for session in engine.sam.standing.in_order(engine.now, leased=leased):
        assert session.key.session_id not in names, "it has left"
        names.append(session.key.session_id)
        engine.sam.standing.leave(session)
    return names


def brought(engine: PlainEngine, n: int, *, leased: bool) -> list[str]:
    """Whose blocks come to the front of a zone: a name for each, first to be reused first."""
    found = engine.sam.give_way(engine.now, n, leased=leased)
    owners = [engine.sam.ledger.index.owners(i) for i in engine.port.free[:found]]
    assert all(len(chains) == 1 for chains in owners)
    return [chains[0].lineage.session.key.session_id for chains in owners]


# -- the order -------------------------------------------------------------------------------------

NAMES = "abcdef"
EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("rests"), st.sampled_from(NAMES), st.sampled_from([None, None, 5.0, 20.0, 60.0])
        ),
        st.tuples(
            st.just("ended"),
            st.sampled_from(NAMES),
            st.sampled_from(["tool_call", "final_message", "cut", "unknown"]),
        ),
        st.tuples(st.just("waits"), st.just("-"), st.sampled_from([0.25, 1.0, 3.5, 7.0])),
        st.tuples(st.just("is freed"), st.sampled_from(NAMES), st.just(None)),
    ),
    min_size=3,
    max_size=25,
)


def naive_order(engine: PlainEngine, policy: RetentionPolicy, *, leased: bool) -> list[str]:
    """All that rest, looked at one by one."""
    found = []
    for session in engine.sam.sessions.values():
        if session.rested_at is None or not session.num_records:
            continue
        if any(True for _ in session.leases) is leased:
            worth = policy.worth(policy.class_of(session.turn), engine.now - session.rested_at)
            found.append((worth, session.rested_at, session.key.session_id))
    return [name for _, _, name in sorted(found)]


@pytest.mark.parametrize("policy", [RetentionPolicy, DeadlinePolicy, RisesThenFalls])
@settings(max_examples=150, deadline=None)
@given(events=EVENTS)
def test_the_order_is_that_of_a_look_at_each_session(
    policy: Callable[[], RetentionPolicy], events: list[tuple[str, str, Any]]
) -> None:
    """Where what a class is worth falls with time, or rises and then falls."""
    engine = make_engine(policy())
    for what, name, how in events:
        if what == "rests":
            rest(engine, name, ttl=how)
        elif what == "ended":
            ended(engine, name, how)
        elif what == "waits":
            engine.wait(how)
        else:
            engine.free_session(key(name))
        # No two begin to rest at once.
        engine.now += 1 / 64
    for leased in (False, True):
        assert order(engine, leased=leased) == naive_order(engine, policy(), leased=leased)


def test_with_lru_who_has_rested_longest_goes_first() -> None:
    engine = make_engine(RetentionPolicy())
    for name in "abc":
        rest(engine, name)
        engine.now += 1.0
    rest(engine, "a")
    assert order(engine) == ["b", "c", "a"]


def test_with_deadline_the_lease_that_is_due_soonest_goes_first() -> None:
    engine = make_engine(DeadlinePolicy())
    for name, ttl in (("hour", 3600), ("minute", 60), ("five", 300)):
        rest(engine, name, ttl=ttl)
        engine.now += 1.0
    assert order(engine, leased=True) == ["minute", "five", "hour"]


def test_a_final_message_goes_before_a_tool_call_that_rested_earlier() -> None:
    engine = make_engine(ReusePolicy())
    for name, ending in (("calls", "tool_call"), ("done", "final_message")):
        rest(engine, name)
        ended(engine, name, ending)
        engine.now += 1.0
    assert order(engine) == ["done", "calls"]


def test_what_becomes_known_late_keeps_the_time_since_when_a_session_rests() -> None:
    """Facts of the first come after the others have begun to rest."""
    engine = make_engine(RetentionPolicy())
    for name in "abc":
        rest(engine, name)
        engine.now += 1.0
    ended(engine, "a", "tool_call")
    assert order(engine) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("give_way", "kind"),
    [
        (GiveWay.REUSE, ReusePolicy),
        (GiveWay.DEADLINE, DeadlinePolicy),
        (GiveWay.LRU, RetentionPolicy),
    ],
)
def test_each_order_that_a_setting_names_is_a_policy(give_way: GiveWay, kind: type) -> None:
    assert type(policy_of(Settings(give_way=give_way))) is kind


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize(
    "setting",
    [name for name, field in Settings.model_fields.items() if field.annotation is Placement],
)
def test_where_released_blocks_go_is_what_the_setting_says(
    setting: str, placement: Placement
) -> None:
    policy = policy_of(Settings(**{setting: placement}))
    assert getattr(policy, setting.removesuffix("_enters")) is placement


# -- leaders and workers ---------------------------------------------------------------------------


def work(engine: PlainEngine, name: str, parent: str, ttl: float | None = None) -> None:
    asked = () if ttl is None else (Protection(ttl),)
    request = engine.arrive(SessionIntent(key(name), parent, asked))
    assert request is not None
    engine.run(request, pages(name))
    engine.end(request)


def test_a_leader_goes_after_its_workers() -> None:
    engine = make_engine(RetentionPolicy())
    rest(engine, "leader")
    for name, parent in (("worker", "leader"), ("below", "worker"), ("other", "stranger")):
        engine.now += 1.0
        work(engine, name, parent)
    assert order(engine) == ["below", "worker", "leader", "other"]
    assert first(engine) is None


def test_a_leader_without_a_lease_does_not_wait_for_a_worker_with_one() -> None:
    engine = make_engine(RetentionPolicy())
    rest(engine, "leader")
    work(engine, "worker", "leader", ttl=60.0)
    assert first(engine) == "leader"
    assert first(engine, leased=True) == "worker"


def test_blocks_of_a_worker_come_before_those_of_its_leader() -> None:
    engine = make_engine(RetentionPolicy())
    rest(engine, "leader")
    engine.now += 1.0
    work(engine, "worker", "leader")
    assert brought(engine, 5, leased=False) == ["worker"] * 3 + ["leader"] * 2


# -- what comes to the front -----------------------------------------------------------------------


def test_blocks_come_tail_first_and_no_more_than_are_wanted() -> None:
    engine = make_engine(RetentionPolicy())
    for name in "ab":
        rest(engine, name)
        engine.now += 1.0
    a, b = (engine.blocks_of(key(name)) for name in "ab")
    assert engine.sam.give_way(engine.now, 4, leased=False) == 4
    assert engine.port.free[:4] == [*a[::-1], b[2]]


def test_who_is_asked_again_goes_on_where_it_stopped() -> None:
    engine = make_engine(RetentionPolicy())
    rest(engine, "a", 5)
    blocks = engine.blocks_of(key("a"))
    engine.sam.give_way(engine.now, 2, leased=False)
    engine.sam.give_way(engine.now, 2, leased=False)
    assert engine.port.free[:4] == [*blocks[1:3][::-1], *blocks[3:][::-1]]


def test_blocks_with_a_lease_are_never_brought_for_those_without() -> None:
    engine = make_engine(RetentionPolicy())
    rest(engine, "leased", ttl=60.0)
    rest(engine, "unleased")
    assert brought(engine, 10, leased=False) == ["unleased"] * 3
    assert brought(engine, 10, leased=True) == ["leased"] * 3


def test_what_a_lease_does_not_reach_goes_as_blocks_without_one() -> None:
    engine = make_engine(RetentionPolicy())
    engine.turn(key("a"), pages("a", 5), Protection(60.0, 2 * PAGE))
    blocks = engine.blocks_of(key("a"))
    assert engine.sam.give_way(engine.now, 10, leased=False) == 3
    assert engine.port.free[:3] == blocks[:1:-1]
    assert engine.sam.give_way(engine.now, 10, leased=True) == 2
    assert engine.port.free[:2] == blocks[1::-1]


def test_under_two_leases_a_session_goes_on_standing_when_the_shorter_ends() -> None:
    engine = make_engine(RetentionPolicy())
    engine.turn(key("a"), pages("a", 5), Protection(300.0, 2 * PAGE), Protection(60.0))
    engine.wait(100.0)
    assert first(engine, leased=True) == "a"
    assert brought(engine, 10, leased=True) == ["a"] * 2
    assert first(engine) is None


def test_a_block_that_two_sessions_hold_stays_where_it_is() -> None:
    engine = make_engine(RetentionPolicy())
    engine.turn(key("a"), pages("both"))
    engine.turn(key("b"), [*pages("both"), "own"])
    own = engine.blocks_of(key("b"))[3]
    assert engine.sam.give_way(engine.now, 10, leased=False) == 1
    assert engine.port.free[0] == own


def test_a_block_that_a_request_uses_is_never_brought() -> None:
    engine = make_engine(RetentionPolicy())
    rest(engine, "a")
    block = engine.blocks_of(key("a"))[1]
    engine.port.use(block)
    assert brought(engine, 10, leased=False) == ["a"] * 2
    assert block not in engine.port.free


def test_a_block_whose_content_is_gone_is_not_brought() -> None:
    engine = make_engine(RetentionPolicy())
    rest(engine, "a")
    engine.port.lose(engine.blocks_of(key("a"))[1])
    assert brought(engine, 10, leased=False) == ["a"] * 2
    assert LOST in engine.blocks_of(key("a"))


def test_all_prompts_of_a_session_go_the_oldest_first() -> None:
    engine = make_engine(RetentionPolicy())
    one, two = (engine.arrive(SessionIntent(key("a"))) for _ in range(2))
    assert one is not None
    assert two is not None
    for request, name in ((one, "x"), (two, "y")):
        engine.run(request, pages(name))
    for request in (one, two):
        engine.end(request)
    old, new = (lineage.chains[0].block_ids for lineage in engine.sam.sessions[key("a")].lineages)
    assert engine.sam.give_way(engine.now, 4, leased=False) == 4
    assert engine.port.free[:4] == [*old[::-1], new[2]]


def test_a_hybrid_context_goes_in_the_order_of_reuse() -> None:
    """A checkpoint goes after the attention blocks that it makes usable, and nothing is missed."""
    engine = make_engine(RetentionPolicy(), layouts=HYBRID)
    rest(engine, "a", 4)
    lineage = engine.sam.sessions[key("a")].lineage
    held = {i for chain in lineage.chains for i in chain.block_ids}
    assert engine.sam.give_way(engine.now, 3, leased=False) == 3
    # What is there no more has ended since: the share was full.
    engine.sam.ledger.release_tail(lineage, 5)
    left = {i for chain in lineage.chains for i in chain.block_ids}
    assert engine.sam.give_way(engine.now, 50, leased=False) == len(left)
    assert set(engine.port.free[: len(left)]) == left < held


def test_a_choice_costs_a_look_at_each_class_and_one_for_each_session_that_is_used_up() -> None:
    policy = Notes()
    engine = make_engine(policy, num_blocks=400)
    for number in range(60):
        rest(engine, f"s{number}", 2)
        ended(engine, f"s{number}", "tool_call", str(number % 5))
        engine.now += 1.0
    policy.asked = 0
    assert engine.sam.give_way(engine.now, 20, leased=False) == 20
    assert policy.asked <= 2 * 5 + 2 * 10


# -- who stands ------------------------------------------------------------------------------------


def stands(engine: PlainEngine, name: str) -> bool:
    session = engine.sam.sessions.get(key(name))
    return session is not None and session in engine.sam.standing


@pytest.mark.parametrize("ttl", [None, 60.0])
def test_a_session_stands_while_it_rests(ttl: float | None) -> None:
    engine = make_engine()
    rest(engine, "a", ttl=ttl)
    assert stands(engine, "a")
    request = engine.arrive(SessionIntent(key("a")))
    assert not stands(engine, "a")
    engine.run(request, pages("a"))
    engine.preempt(request)
    assert not stands(engine, "a")
    engine.run(request, pages("a"))
    engine.end(request)
    assert stands(engine, "a")


LEAVES: dict[str, Callable[[PlainEngine], object]] = {
    "it is freed": lambda engine: engine.free_session(key("a")),
    "it is evicted": lambda engine: engine.evict(key("a")),
    "its tree is freed": lambda engine: engine.apply_edits(
        key("a"), [Edit(EditType.EVICT, include_children=True)]
    ),
    "all of it is evicted as a range": lambda engine: engine.apply_edits(
        key("a"), [Edit(EditType.EVICT, 0, 100 * PAGE)]
    ),
    "its lease has run out": lambda engine: engine.wait(100.0),
    "the cache is reset": lambda engine: engine.reset(),
}


@pytest.mark.parametrize("how", LEAVES)
def test_a_session_leaves_no_place_behind_when(how: str) -> None:
    engine = make_engine()
    rest(engine, "a", ttl=60.0)
    LEAVES[how](engine)
    assert len(engine.sam.standing) == 0
    assert first(engine) is first(engine, leased=True) is None
    ended(engine, "a", "tool_call")
    assert len(engine.sam.standing) == 0, "facts of one that holds nothing make it stand"


def test_one_that_makes_room_for_another_session_leaves_no_place_behind() -> None:
    engine = make_engine(settings=Settings(max_sessions=2))
    for name in "abc":
        rest(engine, name)
    assert len(engine.sam.standing) == 2
    assert set(order(engine)) == {"b", "c"}


def test_an_anonymous_protection_stands_until_its_lease_ends() -> None:
    engine = make_engine()
    engine.turn(None, pages("x"), ttl=60.0)
    assert len(engine.sam.standing) == 1
    engine.wait(100.0)
    assert len(engine.sam.standing) == 0


def test_heirs_stand_nowhere_and_give_way_last() -> None:
    engine = make_engine(settings=Settings(protected_share=0.1), num_blocks=61)
    rest(engine, "a", ttl=60.0)
    engine.serve_outsider(engine.blocks_of(key("a")))
    engine.evict(key("a"))
    assert engine.sam.num_heirs == 1
    assert len(engine.sam.standing) == 0
    rest(engine, "b")
    rest(engine, "c")
    assert engine.sam.num_heirs == 1, "b has given way"
    assert not engine.sam.sessions[key("b")].num_records


def test_what_has_been_offered_gives_way_first_when_the_share_is_full() -> None:
    """Its blocks are the next to be reused, and it is worth least."""
    engine = make_engine(RetentionPolicy(), settings=Settings(protected_share=0.1), num_blocks=61)
    for name in "ab":
        rest(engine, name)
        engine.now += 1.0
    engine.sam.give_way(engine.now, 4, leased=False)
    assert order(engine) == ["a", "b"]
    engine.sam.standing.stand_again(engine.sam.sessions[key("b")])
    engine.sam.standing.stand_again(engine.sam.sessions[key("a")])
    engine.sam.give_way(engine.now, 4, leased=False)
    rest(engine, "c")
    assert not engine.sam.sessions[key("a")].num_records
    assert engine.sam.sessions[key("b")].num_records == 3


def test_the_share_is_kept_by_the_session_that_is_worth_least_from_its_tail() -> None:
    engine = make_engine(Notes(), settings=Settings(protected_share=0.15), num_blocks=61)
    for name, worth in (("a", "3"), ("b", "1"), ("c", "2")):
        rest(engine, name)
        ended(engine, name, "tool_call", worth)
    rest(engine, "d", 4)
    held = {name: engine.sam.sessions[key(name)].num_records for name in "abcd"}
    assert held == {"a": 3, "b": 0, "c": 2, "d": 4}


def test_a_tenant_within_its_share_makes_only_its_own_sessions_give_way() -> None:
    engine = make_engine(
        RetentionPolicy(), settings=Settings(protected_share=0.2, tenant_share=0.5), num_blocks=61
    )
    engine.turn(key("other", "t2"), pages("other"))
    engine.now += 1.0
    for name in ("a", "b", "c"):
        engine.turn(key(name, "t1"), pages(name))
        engine.now += 1.0
    held = {k.session_id: s.num_records for k, s in engine.sam.sessions.items()}
    assert held == {"other": 3, "a": 0, "b": 3, "c": 3}


# -- facts -----------------------------------------------------------------------------------------


def turn_of(engine: PlainEngine, name: str) -> RestingTurn:
    session: Session = engine.sam.sessions[key(name)]
    return session.turn


def test_facts_of_a_session_at_rest_are_of_use() -> None:
    engine = make_engine()
    rest(engine, "a")
    assert ended(engine, "a", "tool_call", "read", "bash")
    assert (turn_of(engine, "a").ended, turn_of(engine, "a").tool) == ("tool_call", "bash")
    assert ended(engine, "a", "tool_call", "read", "bash"), "twice"


def test_facts_of_a_session_that_runs_or_that_nobody_knows_are_of_none() -> None:
    engine = make_engine()
    assert not ended(engine, "a", "tool_call")
    rest(engine, "a")
    request = engine.arrive(SessionIntent(key("a")))
    assert not ended(engine, "a", "final_message")
    engine.run(request, pages("a"))
    engine.end(request)
    assert turn_of(engine, "a").ended == "unknown"


def test_facts_of_another_turn_are_of_no_use() -> None:
    engine = make_engine()
    rest(engine, "a")
    engine.sam.sessions[key("a")].last_operation = "second"
    tell = engine.sam.turn_ended
    assert not tell(key("a"), "first", "final_message", (), engine.now)
    assert turn_of(engine, "a").ended == "unknown"
    assert tell(key("a"), "second", "tool_call", (), engine.now)


def test_what_a_client_says_of_a_turn_stands_whatever_the_server_has_seen_of_it() -> None:
    engine = make_engine()
    rest(engine, "a")
    assert ended(engine, "a", "unknown")
    assert ended(engine, "a", "tool_call", "bash", told=True)
    assert not ended(engine, "a", "final_message")
    assert turn_of(engine, "a").ended == "tool_call"
    assert ended(engine, "a", "final_message", told=True), "it may correct itself"
    rest(engine, "a")
    assert ended(engine, "a", "cut"), "of the next turn it has said nothing"


# -- what a policy is taught -----------------------------------------------------------------------


def test_a_policy_learns_of_a_gap_with_the_class_that_the_session_rested_in() -> None:
    policy = Notes()
    engine = make_engine(policy)
    rest(engine, "a")
    engine.now += 3.0
    ended(engine, "a", "tool_call", "7")
    engine.now += 2.0
    rest(engine, "a")
    assert policy.observed == [("7", 5.0)]


def test_a_second_request_beside_the_first_is_no_return() -> None:
    policy = Notes()
    engine = make_engine(policy)
    rest(engine, "a")
    engine.arrive(SessionIntent(key("a")))
    engine.now += 1.0
    engine.arrive(SessionIntent(key("a")))
    assert policy.observed == [("", 0.0)]


@pytest.mark.parametrize("how", ["it is freed", "its tree is freed"])
def test_a_session_that_ends_without_having_come_back_is_learnt_from(how: str) -> None:
    policy = Notes()
    engine = make_engine(policy)
    rest(engine, "a")
    LEAVES[how](engine)
    assert policy.observed == [("", None)]


def test_a_session_that_stays_away_until_its_idle_time_is_over_is_learnt_from_once() -> None:
    policy = Notes()
    engine = make_engine(policy, settings=Settings(idle_seconds=10.0))
    rest(engine, "a")
    for _ in range(4):
        engine.wait(15.0)
    assert key("a") not in engine.sam.sessions
    assert policy.observed == [("", None)]


def test_an_evicted_session_that_comes_back_has_come_back() -> None:
    policy = Notes()
    engine = make_engine(policy)
    rest(engine, "a")
    engine.apply_edits(key("a"), [EVICT])
    engine.now += 4.0
    rest(engine, "a")
    assert policy.observed == [("", 4.0)]


class KeepsToolCalls(RetentionPolicy):
    def ttl_for(self, turn: RestingTurn) -> float | None:
        return 60.0 if turn.output_tokens == 0 else None


def test_a_policy_may_give_a_lease_to_who_has_asked_for_none() -> None:
    engine = make_engine(KeepsToolCalls())
    rest(engine, "a")
    assert engine.deadlines_of(key("a")) == [60.0] * 3
    rest(engine, "b", ttl=5.0)
    assert engine.deadlines_of(key("b")) == [5.0] * 3
    assert first(engine) is None


# -- what several prompts hold ---------------------------------------------------------------------


@pytest.mark.parametrize("ttl", [None, 60.0])
def test_what_only_prompts_of_one_session_share_gives_way_with_the_last_of_them(
    ttl: float | None,
) -> None:
    engine = make_engine(Notes())
    common = pages("common", 4)
    for name in "xyz":
        engine.turn(key("a"), [*common, *pages(name, 2)], ttl=ttl)
    last = engine.sam.sessions[key("a")].lineage.chains[0]
    assert engine.sam.give_way(engine.now, 100, leased=ttl is not None) == 4 + 3 * 2
    assert engine.port.free[6:10] == last.block_ids[3::-1], "after all tails, tail first"


def test_what_another_session_holds_as_well_keeps_its_place() -> None:
    engine = make_engine(Notes())
    common = pages("common", 4)
    for name in "xy":
        engine.turn(key("a"), [*common, *pages(name, 2)])
    engine.turn(key("b"), [*common, *pages("z", 2)])
    assert engine.sam.give_way(engine.now, 100, leased=False) == 3 * 2
