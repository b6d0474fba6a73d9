"""``bench replay``: real managers, bounds and an LRU of our own, on hand-made and random traces."""

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.engine.made_traces import BLOCK, Prompt, Traces, session
from vllm_agent_hint.cli import app
from vllm_agent_hint.cli.bench.replay import task as task_module
from vllm_agent_hint.cli.bench.replay.arms import IdentityArm, Knowledge, TurnArm, arm_named
from vllm_agent_hint.cli.bench.replay.bounds import replay_min, replay_session_min
from vllm_agent_hint.cli.bench.replay.caches import ChainHashes
from vllm_agent_hint.cli.bench.replay.closed_loop import ClosedLoop, TimeModel
from vllm_agent_hint.cli.bench.replay.driver import build_cache, replay_open_loop
from vllm_agent_hint.cli.bench.replay.lru import replay_lru
from vllm_agent_hint.cli.bench.replay.plots import overview
from vllm_agent_hint.cli.bench.replay.segments import segment
from vllm_agent_hint.cli.bench.replay.workload import Traffic, Workload, compose
from vllm_agent_hint.traces.model import TraceError
from vllm_agent_hint.traces.plain import write_plain

MANAGED = ("stock", "slru", "hints", "hints:lru@0", "hints:deadline@never", "auto", "identity")


def hits(policy: str, workload: Workload, blocks: int) -> list[int]:
    """Tokens of each request that a policy serves."""
    size = workload.block_size
    cut = segment(workload)
    if policy == "lru":
        return [size * n for n in replay_lru(cut, blocks)]
    if policy == "min":
        return [size * n for n in replay_min(cut, blocks)]
    if policy == "session-min":
        return [size * n for n in replay_session_min(workload, cut, blocks)]
    cache_of = build_cache(policy, workload, ChainHashes(workload.num_ids), blocks)
    assert cache_of is not None
    return replay_open_loop(workload, cache_of, lambda _: None).hit_tokens


@st.composite
def workloads(draw: st.DrawFn, max_requests: int = 14, max_depth: int = 5) -> Workload:
    """Sessions that share, extend, rewind and rewrite prompts; some end with a whole block."""
    traces = Traces()
    sessions = []
    for number in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, max(1, max_requests // 4)))
        at = sorted(draw(st.lists(st.integers(0, 400), min_size=count, max_size=count)))
        requests = []
        for when in at:
            prompt = draw(st.lists(st.integers(0, 1), min_size=0, max_size=max_depth))
            beyond = draw(st.sampled_from([0, 1])) if prompt else 1
            stop = draw(st.sampled_from([None, "", "tool_use", "end_turn"]))
            out = draw(st.sampled_from([0, 1, BLOCK, 3 * BLOCK]))
            requests.append(traces.request(when - at[0], prompt, beyond=beyond, out=out, stop=stop))
        named = draw(st.booleans())
        sessions.append(session(f"s{number}", float(at[0]), *requests, is_named=named))
    return compose([traces.trace(*sessions)], users=1, seed=1)


# -- the instruments agree ----------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(workloads(), st.integers(1, 14))
def test_stock_vllm_serves_what_an_independent_lru_serves(workload: Workload, blocks: int) -> None:
    assert hits("stock", workload, blocks) == hits("lru", workload, blocks)


@settings(max_examples=100, deadline=None)
@given(workloads(), st.integers(1, 14))
def test_no_policy_beats_beladys_optimum(workload: Workload, blocks: int) -> None:
    best = sum(hits("min", workload, blocks))
    for policy in (*MANAGED, "session-min"):
        assert sum(hits(policy, workload, blocks)) <= best, policy


@settings(max_examples=150, deadline=None)
@given(workloads(max_requests=8, max_depth=3), st.integers(2, 5))
def test_beladys_optimum_is_the_best_of_all_ways_to_evict(workload: Workload, blocks: int) -> None:
    assert sum(hits("min", workload, blocks)) == BLOCK * best_of_all(workload, blocks)


def best_of_all(workload: Workload, capacity: int) -> int:
    """Blocks served if whatever turns out best is evicted, by trying everything."""
    cut = segment(workload).requests
    prompts = [a.request.blocks.tolist() for a in workload.arrivals]
    tokens = [a.request.prompt_tokens for a in workload.arrivals]

    @cache
    def served_from(number: int, kept: frozenset[int]) -> int:
        if number == len(prompts):
            return 0
        slots, ids = cut[number].slots, prompts[number]
        if slots > capacity:
            return served_from(number + 1, kept)
        hit = 0
        for chain_id in ids[: (tokens[number] - 1) // BLOCK]:
            if chain_id not in kept:
                break
            hit += 1
        others = kept - set(ids)
        room = capacity - slots
        choices = itertools.combinations(sorted(others), min(room, len(others)))
        # What it has generated is nobody's: after its end there is room for others again, but
        # they are gone by then.
        return hit + max(
            served_from(number + 1, frozenset(choice) | frozenset(ids)) for choice in choices
        )

    return served_from(0, frozenset())


@settings(max_examples=100, deadline=None)
@given(workloads(), st.integers(20, 30))
def test_where_everything_fits_all_policies_are_one(workload: Workload, blocks: int) -> None:
    needed = sum(request.slots for request in segment(workload).requests)
    # An ended or superseded context is given out before blocks that nobody has used yet.
    policies = ("stock", "slru", "session-min", "min")
    found = {policy: hits(policy, workload, needed + blocks) for policy in policies}
    assert {policy for policy in found if found[policy] != found["stock"]} == set()


# -- bounds and rivals, by hand -----------------------------------------------------------------


def two_who_return_and_one_who_doesnt(*, first_is_named: bool = True) -> Workload:
    traces = Traces()
    a, b, c = [1, 1], [2, 2], [3, 3]
    return compose(
        [
            traces.trace(
                session(
                    "a", 0.0, traces.request(0, a), traces.request(40, a), is_named=first_is_named
                ),
                session("b", 10.0, traces.request(0, b), traces.request(990, b)),
                session("c", 20.0, traces.request(0, c)),
            )
        ],
        users=1,
        seed=1,
    )


def test_session_min_keeps_whom_it_expects_first_and_lru_does_not() -> None:
    workload = two_who_return_and_one_who_doesnt()
    assert hits("lru", workload, 5) == [0, 0, 0, 0, 0]
    assert hits("session-min", workload, 5) == [0, 0, 0, 2 * BLOCK, 0]


def test_session_min_knows_nothing_of_who_carries_no_identity() -> None:
    workload = two_who_return_and_one_who_doesnt(first_is_named=False)
    assert hits("session-min", workload, 5) == [0, 0, 0, 0, 2 * BLOCK]


def test_session_min_doesnt_know_that_a_session_begins() -> None:
    traces = Traces()
    shared = [1, 1]
    workload = compose(
        [
            traces.trace(
                session("a", 0.0, traces.request(0, shared)),
                session("b", 10.0, traces.request(0, [2, 2]), traces.request(90, [2, 2])),
                session("c", 20.0, traces.request(0, [3, 3])),
                session("d", 30.0, traces.request(0, shared)),
            )
        ],
        users=1,
        seed=1,
    )
    assert hits("min", workload, 5) == [0, 0, 0, 2 * BLOCK, 0]
    assert hits("session-min", workload, 5) == [0, 0, 0, 0, 2 * BLOCK]


def test_the_optimum_has_no_use_for_a_last_block_that_is_computed_again_anyway() -> None:
    traces = Traces()
    sent = [([1], 0), ([2], 1), ([3], 1), ([1], 0), ([2], 1)]
    sessions = [
        session(f"s{k}", 1.0 * k, traces.request(0, prompt, beyond=beyond))
        for k, (prompt, beyond) in enumerate(sent)
    ]
    workload = compose([traces.trace(*sessions)], users=1, seed=1)
    assert hits("min", workload, 3) == [0, 0, 0, 0, BLOCK]


def test_segmented_lru_keeps_what_was_hit_before_what_came_once() -> None:
    traces = Traces()
    flood = [traces.request(0, [10 + k, 0]) for k in range(6)]
    workload = compose(
        [
            traces.trace(
                session("a", 0.0, *(traces.request(at, [1, 1]) for at in (0, 1, 50))),
                *(session(f"f{k}", 10.0 + k, request) for k, request in enumerate(flood)),
            )
        ],
        users=1,
        seed=1,
    )
    assert hits("stock", workload, 8)[-1] == 0
    assert hits("slru", workload, 8)[-1] == 2 * BLOCK


# -- arms ---------------------------------------------------------------------------------------


def agents_beside_a_flood(stop: str = "tool_use", back_at: float = 40.0) -> Workload:
    """A session that returns after one-shot traffic which fills the cache more than once."""
    traces = Traces()
    turns = (traces.request(0, [1, 1], stop=stop), traces.request(back_at, [1, 1, 1], stop=stop))
    flood = [
        session(f"f{k}", 5.0 + k, traces.request(0, [10 + k, 0, 0]), is_named=False)
        for k in range(8)
    ]
    return compose([traces.trace(session("a", 0.0, *turns), *flood)], users=1, seed=1)


def test_hints_keep_a_session_through_a_flood_that_flushes_stock() -> None:
    workload = agents_beside_a_flood()
    assert hits("stock", workload, 12)[-1] == 0
    assert hits("hints", workload, 12)[-1] == 2 * BLOCK
    assert hits("auto", workload, 12)[-1] == 2 * BLOCK


def test_the_end_of_a_session_is_told_as_late_as_the_arm_says() -> None:
    traces = Traces()
    ended = session("a", 0.0, traces.request(0, [1, 1], stop="tool_use"))
    flood = [session(f"f{k}", 100.0 + k, traces.request(0, [10 + k, 0])) for k in range(3)]
    late = session("late", 200.0, traces.request(0, [1, 1]), is_named=False)
    flood = [replace(each, is_named=False) for each in flood]
    workload = compose([traces.trace(ended, *flood, late)], users=1, seed=1)
    served = {
        policy: hits(policy, workload, 7)[-1]
        for policy in ("hints@0", "hints@60", "hints@150", "hints@never")
    }
    assert served == {
        "hints@0": 0,
        "hints@60": 0,
        "hints@150": 2 * BLOCK,
        "hints@never": 2 * BLOCK,
    }


def test_an_arm_tells_nothing_of_one_shot_traffic() -> None:
    workload = agents_beside_a_flood()
    for arm in (IdentityArm(), TurnArm()):
        told = [a.session.traffic for a in workload.arrivals if arm.intent(a) is not None]
        assert told == [Traffic.AGENTS] * 2


def test_the_identity_arms_dont_say_how_a_turn_ended_or_that_it_was_the_last() -> None:
    for policy in ("auto", "identity"):
        arm = arm_named(policy)
        assert arm is not None
        intents = [
            arm.intent(agents_beside_a_flood(stop).arrivals[which])
            for stop in ("tool_use", "end_turn")
            for which in (0, -1)
        ]
        assert all(intent == intents[0] for intent in intents)
        assert (arm.knows, arm.end_delay) == ((Knowledge.IDENTITY,), None)


def test_auto_sees_by_itself_how_a_turn_ended_and_identity_alone_does_not() -> None:
    arrival = agents_beside_a_flood("tool_use").arrivals[0]
    auto, identity = arm_named("auto"), arm_named("identity")
    assert auto is not None
    assert identity is not None
    assert auto.facts(arrival) is not None
    assert identity.facts(arrival) is None


def test_hints_are_turn_and_lifecycle_sixty_seconds_late() -> None:
    arm = arm_named("hints")
    assert arm == TurnArm(60.0)
    assert arm is not None
    assert arm.knows == (Knowledge.IDENTITY, Knowledge.TURN, Knowledge.LIFECYCLE)
    never = arm_named("hints@never")
    assert never is not None
    assert Knowledge.LIFECYCLE not in never.knows
    assert arm_named("auto@5") is None
    assert arm_named("best") is None


def test_what_sam_has_counted_is_reported() -> None:
    workload = agents_beside_a_flood("end_turn", back_at=1000.0)
    cache_of = build_cache("hints:leased", workload, ChainHashes(workload.num_ids), 12)
    assert cache_of is not None
    replayed = replay_open_loop(workload, cache_of, lambda _: None)
    assert replayed.figures["expired"] == 1
    assert 0.0 < replayed.figures["protected_share"] < 0.8
    assert replayed.figures["overrides"] == 0
    assert len(replayed.boundary_ns) == len(workload.arrivals)


# -- workloads ----------------------------------------------------------------------------------


def test_users_play_whole_sessions_one_after_another_with_their_pauses() -> None:
    traces = Traces()
    trace = traces.trace(
        *(
            session(
                f"s{k}", None, traces.request(0, [k]), traces.request(30, [k], service_seconds=5.0)
            )
            for k in range(6)
        )
    )
    workload = compose([trace], users=2, seed=3, stagger=10.0)
    for user in (0, 1):
        times = [a.at for a in workload.arrivals if a.session.user == user]
        start = times[0]
        assert 0.0 <= start < 10.0
        expected = [0, 30, 35, 65, 70, 100][: len(times)]
        assert [at - start for at in times] == pytest.approx(expected)
    assert len(workload.arrivals) == 12
    orders = {
        tuple(s.name for s in compose([trace], users=2, seed=seed).sessions) for seed in range(5)
    }
    assert len(orders) > 1


def test_a_sub_agent_starts_as_long_after_its_parent_as_it_did() -> None:
    traces = Traces()
    trace = traces.trace(
        session("kid", None, traces.request(0, [1]), parent="boss", after_parent=7.0),
        session("boss", None, traces.request(0, [1]), traces.request(20, [1])),
    )
    workload = compose([trace], users=1, seed=1, stagger=0.0)
    assert [(a.at, a.session.name) for a in workload.arrivals] == [
        (0.0, "boss"),
        (7.0, "kid"),
        (20.0, "boss"),
    ]
    assert workload.arrivals[1].session.parent == "boss"


def test_a_second_trace_is_a_class_of_its_own_that_keeps_its_time_and_ends_the_mix() -> None:
    traces, chats = Traces(), Traces()
    agents = traces.trace(
        session("a", None, *(traces.request(at, [1]) for at in range(0, 100, 10)))
    )
    other = chats.trace(
        *(session(f"c{k}", 4.0 * k, chats.request(0, [k]), is_named=False) for k in range(8))
    )
    workload = compose([agents, other], users=1, seed=1)
    by_class = {
        traffic: [a.at for a in workload.arrivals if a.session.traffic is traffic]
        for traffic in Traffic
    }
    assert by_class[Traffic.ONE_SHOT] == [4.0 * k for k in range(8)]
    assert by_class[Traffic.AGENTS] == [0.0, 10.0, 20.0]
    assert not any(a.is_last for a in workload.arrivals if a.session.traffic is Traffic.AGENTS)
    ids = {
        traffic: {
            i
            for a in workload.arrivals
            for i in a.request.blocks.tolist()
            if a.session.traffic is traffic
        }
        for traffic in Traffic
    }
    assert not ids[Traffic.AGENTS] & ids[Traffic.ONE_SHOT]
    half = compose([agents, other], users=1, seed=1, share=0.5)
    assert sum(s.traffic is Traffic.ONE_SHOT for s in half.sessions) == 4


def test_block_sizes_are_brought_to_one() -> None:
    fine, coarse = Traces(16), Traces(64)
    first = fine.trace(session("f", 2.0, fine.request(0, [1, 2, 3, 4, 5], beyond=3)))
    second = coarse.trace(
        session("c", 0.0, coarse.request(0, [1, 2], beyond=40), coarse.request(1, [1, 3])),
        session("d", 2.0, coarse.request(0, [1, 2], beyond=40)),
    )
    at_64 = compose([first, second], users=1, seed=1, block_size=64)
    # One coarse block is where the fourth fine one ends.
    assert sorted(len(a.request.blocks) for a in at_64.arrivals) == [1, 2, 2, 2]
    at_16 = compose([first, second], users=1, seed=1)
    blocks = [a.request.blocks.tolist() for a in at_16.arrivals if a.session.number]
    assert [len(each) for each in blocks] == [10, 8, 10]
    assert blocks[0][:4] == blocks[1][:4]
    assert blocks[0][4] != blocks[1][4]
    # What lies beyond the last complete coarse block is nobody else's.
    assert blocks[0][:8] == blocks[2][:8]
    assert not set(blocks[0][8:]) & set(blocks[2][8:])
    assert len(set(blocks[0])) == 10
    with pytest.raises(TraceError, match="give a --block-size"):
        compose([first, second], users=1, seed=1, block_size=24)


def test_what_fits_into_no_cache_counts_as_missed_and_harms_nobody(
    trace_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r.json"
    # Of each session the fourth turn needs five blocks.
    policies = "stock,slru,hints,session-min,min"
    done = replay(
        *("--trace", str(trace_file), "--cache-tokens", "64", "--json", str(out)),
        *("--policy", policies),
    )
    assert done.exit_code == 0, done.output
    for run in json.loads(out.read_text())["runs"]:
        assert (run["too_large"], run["requests"]) == (6, 24)


def test_ids_far_apart_take_no_room() -> None:
    traces = Traces()
    far = replace(traces.request(0, [1, 2]), blocks=np.array([5, 10**12]))
    workload = compose([traces.trace(session("a", 0.0, far))], users=1, seed=1)
    assert workload.num_ids == 2


# -- the closed loop ------------------------------------------------------------------------------


def closed(workload: Workload, blocks: int, model: TimeModel, policy: str = "stock") -> ClosedLoop:
    cache_of = build_cache(policy, workload, ChainHashes(workload.num_ids), blocks)
    assert cache_of is not None
    return ClosedLoop(workload, cache_of, model)


@settings(max_examples=100, deadline=None)
@given(
    workloads(),
    st.integers(1, 14),
    st.sampled_from(["stock", "slru", "hints", "auto"]),
    st.sampled_from([0.0001, 0.01, 10.0]),
    st.sampled_from([None, 100.0]),
)
def test_a_closed_loop_loses_no_request(
    workload: Workload, blocks: int, policy: str, hours: float, transfer_rate: float | None
) -> None:
    loop = closed(workload, blocks, TimeModel(20.0, 10.0, hours, transfer_rate), policy)
    figures = loop.run()
    assert loop.arrived == loop.ended + loop.in_flight + loop.num_waiting + loop.refused
    if hours == 10.0:
        assert loop.ended + loop.refused == len(workload.arrivals)
        assert figures["sessions_done"] == len(workload.sessions)
    total = figures["hit_tokens"] + figures["recomputed_tokens"] + figures["reloaded_tokens"]
    assert total == figures["prompt_tokens"]


def two_turns(gap: float = 20.0, service: float = 4.0) -> Workload:
    traces = Traces()
    turns = (
        traces.request(0, [1, 2], out=10, service_seconds=service),
        traces.request(gap, [1, 2, 3], out=10),
    )
    return compose([traces.trace(session("a", None, *turns))], users=1, seed=1, stagger=0.0)


def test_a_miss_takes_time_and_delays_the_turn_after_it() -> None:
    model = TimeModel(prefill_rate=11.0, decode_rate=5.0, hours=1.0)
    figures = closed(two_turns(), 20, model).run()
    # 33 tokens computed in 3 s, 10 decoded in 2 s, 16 s of thought as in the trace; then 17 new.
    assert figures["ttft_max"] == pytest.approx(3.0)
    assert figures["ttft_mean"] == pytest.approx((3.0 + 17 / 11) / 2)
    assert figures["session_mean"] == pytest.approx(3.0 + 2.0 + 16.0 + 17 / 11 + 2.0)
    assert (figures["sessions_done"], figures["turns_per_hour"]) == (1, 2.0)


def test_what_was_computed_before_comes_back_from_the_host_tier() -> None:
    # No room for the first prompt beside anything else: a flood of one takes it.
    traces = Traces()
    flood = traces.trace(session("f", 6.0, traces.request(0, [7, 7, 7]), is_named=False))
    agent = Traces()
    turns = (agent.request(0, [1, 2]), agent.request(10, [1, 2]))
    workload = compose(
        [agent.trace(session("a", 0.0, *turns)), replace(flood, name="f")], users=1, seed=1
    )
    # The mix ends with the flood; the closed loop plays sessions to their end.
    slow = closed(workload, 4, TimeModel(1000.0, 1000.0, 1.0)).run()
    fast = closed(workload, 4, TimeModel(1000.0, 1000.0, 1.0, 16_000.0)).run()
    assert (slow["reloaded_tokens"], slow["recomputed_tokens"]) == (0, 33 + 49 + 33)
    assert (fast["reloaded_tokens"], fast["recomputed_tokens"]) == (32, 33 + 49 + 1)
    assert fast["classes"]["agents"]["ttft_mean"] == pytest.approx((33 + 1 + 2) / 2000)


@pytest.mark.parametrize(
    ("again", "beyond", "reloaded"),
    [([1, 2], 1, 2), ([1, 2, 3], 1, 2), ([1, 2], 0, 1), ([1, 9], 1, 1), ([9, 2], 1, 0)],
)
def test_the_host_tier_gives_the_known_prefix_and_never_the_last_token(
    again: Prompt, beyond: int, reloaded: int
) -> None:
    traces = Traces()
    sessions = [
        session("a", 0.0, traces.request(0, [1, 2])),
        session("flood", 5.0, traces.request(0, [7, 7, 7, 7])),
        session("b", 10.0, traces.request(0, again, beyond=beyond)),
    ]
    workload = compose([traces.trace(*sessions)], users=1, seed=1)
    figures = closed(workload, 5, TimeModel(1000.0, 1000.0, 1.0, 5000.0)).run()
    assert figures["reloaded_tokens"] == reloaded * BLOCK


def test_a_users_next_session_begins_when_the_whole_family_before_is_over() -> None:
    traces = Traces()
    trace = traces.trace(
        session("boss", None, traces.request(0, [1])),
        session("kid", None, traces.request(0, [2], out=500), parent="boss", after_parent=3.0),
        session("next", None, traces.request(0, [3])),
    )
    # Either family may be the first; 17 tokens take 1 s, and those that are generated 0.1 s each.
    model = TimeModel(prefill_rate=17.0, decode_rate=10.0, hours=1.0)
    workload = compose([trace], users=1, seed=1, stagger=0.0)
    loop = closed(workload, 50, model)
    assert loop.run()["sessions_done"] == 3
    began = {workload.sessions[number].name: at for number, at in loop.began.items()}
    assert began["kid"] == pytest.approx(began["boss"] + 1.0 + 0.1 + 3.0)
    if began["boss"] == 0.0:
        assert began["next"] == pytest.approx(began["kid"] + 1.0 + 50.0)
    else:
        assert began["boss"] == pytest.approx(1.0 + 0.1)


def test_who_finds_no_room_waits_for_those_who_came_first() -> None:
    traces = Traces()
    sessions = [
        session(name, at, traces.request(0, prompt, out=out), is_named=False)
        for name, at, prompt, out in (
            ("a", 0.0, [1, 1, 1], 16),
            ("b", 0.1, [2, 2, 2], 16),
            ("c", 0.2, [3], 1),
        )
    ]
    workload = compose([traces.trace(*sessions)], users=1, seed=1)
    figures = closed(workload, 7, TimeModel(1000.0, 1.0, 1.0)).run()
    # c would fit beside a, but b came before it: both wait for a's 16 tokens.
    assert figures["ttft_max"] > 15.0
    assert figures["ttft_p50"] > 15.0


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    traces = Traces()
    sessions = [
        session(
            f"s{k}",
            2.0 * k,
            *(traces.request(10.0 * turn, [k, *range(turn)], stop="tool_use") for turn in range(4)),
            is_named=k % 2 == 0,
        )
        for k in range(6)
    ]
    file = tmp_path / "trace.jsonl"
    with file.open("w") as text:
        write_plain(traces.trace(*sessions), text)
    return file


def replay(*options: str) -> Any:
    return CliRunner().invoke(app, ["bench", "replay", "--jobs", "1", *options])


def test_the_command_writes_one_run_per_seed_size_and_policy(
    trace_file: Path, tmp_path: Path
) -> None:
    out, plot = tmp_path / "out" / "r.json", tmp_path / "r.svg"
    policies = "stock,slru,hints,auto,session-min,min"
    done = replay(
        *("--trace", str(trace_file), "--cache-tokens", "160,320", "--seed", "1,2"),
        *("--policy", policies, "--json", str(out), "--plot", str(plot)),
    )
    assert done.exit_code == 0, done.output
    runs = json.loads(out.read_text())["runs"]
    assert [(r["seed"], r["cache_tokens"], r["policy"]) for r in runs] == list(
        itertools.product((1, 2), (160, 320), policies.split(","))
    )
    for run in runs:
        assert run["traces"] == ["trace.jsonl"]
        assert run["too_large"] == 0
        assert run["hit_tokens"] + run["recomputed_tokens"] == run["prompt_tokens"]
        assert run["hit_share"] == run["hit_tokens"] / run["prompt_tokens"]
        assert set(run["classes"]) == {"agents", "one_shot"}
        assert sum(c["hit_tokens"] for c in run["classes"].values()) == run["hit_tokens"]
        assert run.get("lru_equal", True)
        if run["policy"] not in ("min", "session-min"):
            assert run["boundary_us"]["median"] <= run["boundary_us"]["p99"]
        if run["policy"] in ("hints", "auto"):
            assert run.keys() >= {"protected_share", "overrides", "expired", "superseded"}
            assert run.keys() >= {"superseded_regret", "knows"}
    assert [r["policy"] for r in runs if "lru_equal" in r] == ["stock"] * 4
    assert "hints" in done.output
    assert plot.read_text().startswith("<?xml")


def test_the_closed_loop_adds_its_figures(trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    done = replay(
        *("--trace", str(trace_file), "--cache-tokens", "320", "--policy", "stock,hints"),
        *("--closed-loop", "--prefill-rate", "100", "--hours", "1", "--json", str(out)),
    )
    assert done.exit_code == 0, done.output
    for run in json.loads(out.read_text())["runs"]:
        names = ("mean", "p50", "p95", "p99", "max")
        assert all(run[f"ttft_{name}"] >= 0 for name in names)
        # Of the three without a name, the first turn is too short to be told for the same one.
        assert run["sessions_done"] == 3 + 2 * 3
        assert run["turns_per_hour"] == 24
        assert run["session_p99"] >= run["session_mean"] * 0.9


def test_several_processes_find_what_one_finds(trace_file: Path, tmp_path: Path) -> None:
    found = []
    for jobs in ("1", "2"):
        out = tmp_path / f"{jobs}.json"
        done = CliRunner().invoke(
            app,
            [
                *("bench", "replay", "--trace", str(trace_file), "--cache-tokens", "160"),
                *("--policy", "stock,hints", "--json", str(out), "--jobs", jobs),
            ],
        )
        assert done.exit_code == 0, done.output
        runs = json.loads(out.read_text())["runs"]
        found.append([(run["policy"], run["hit_tokens"]) for run in runs])
    assert found[0] == found[1]


def test_a_run_whose_stock_differs_from_the_lru_is_no_success(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_module, "replay_lru", lambda cut, capacity: [1] * len(cut.requests))
    done = replay("--trace", str(trace_file), "--cache-tokens", "160", "--policy", "stock")
    assert done.exit_code == 1
    assert "differ" in done.output


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--policy", "best"], "there is no 'best'"),
        (["--policy", ","], "names none"),
        (["--policy", "min", "--closed-loop"], "leave it out, or --closed-loop"),
        (["--cache-tokens", "much"], "--cache-tokens: must be whole numbers"),
        (["--seed", "0"], "--seed: must be 1 or more"),
        (["--block-size", "24"], "give a --block-size"),
    ],
)
def test_what_cant_be_run_is_said_with_its_cure(
    trace_file: Path, options: list[str], complaint: str
) -> None:
    done = replay("--trace", str(trace_file), *options)
    assert done.exit_code == 1
    assert complaint in done.output


def test_a_faulty_trace_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"format":"vllm-agent-hint-trace","version":1,"block_size":16}\n{"t":1}\n')
    done = replay("--trace", str(file))
    assert done.exit_code == 1
    assert "t.jsonl, line 2, field" in done.output


def test_a_plot_of_a_run_without_one_class_leaves_it_out() -> None:
    run = {"policy": "stock", "cache_tokens": 10, "hit_share": 0.5, "classes": {"agents": {}}}
    assert len(overview([run]).axes) == 1
