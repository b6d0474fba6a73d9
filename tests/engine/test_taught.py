"""What orders that are taught beforehand have learnt, and from whom."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.made_traces import Traces, session
from vllm_agent_hint.cli.bench.replay import taught
from vllm_agent_hint.cli.bench.replay.arms import Arm, arm_named
from vllm_agent_hint.cli.bench.replay.caches import ChainHashes, HintedCache
from vllm_agent_hint.cli.bench.replay.driver import replay_open_loop
from vllm_agent_hint.cli.bench.replay.taught import HindsightPolicy, gaps_of, taught_policy
from vllm_agent_hint.cli.bench.replay.workload import Workload, compose
from vllm_agent_hint.sessions.policy import RestingTurn, RetentionPolicy, ReusePolicy
from vllm_agent_hint.settings import Settings, load_settings
from vllm_agent_hint.traces.model import Trace, TracedSession

BLOCK = 512
"""So that a conversation is recognised by a block or two."""


class Observer(ReusePolicy):
    """Remembers what it is taught."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: list[tuple[Hashable, float | None]] = []

    def observe(self, turns: Hashable, gap: float | None) -> None:
        # A turn may last longer than it takes its session to come back.
        self.observed.append((turns, None if gap is None else max(0.0, gap)))


def arm_of(policy: str) -> Arm:
    arm = arm_named(policy)
    assert arm is not None
    return arm


def turns(traces: Traces, name: str, tool: str, *times: float) -> TracedSession:
    prompts = [traces.request(at, [0], stop="tool_use", tool=tool) for at in times]
    return session(name, times[0], *prompts)


def worth(policy: RetentionPolicy, tool: str, resting: float) -> float:
    turn = RestingTurn(ended="tool_call", tool=tool, output_tokens=1)
    return policy.worth(policy.class_of(turn), resting)


def test_hindsight_knows_the_gaps_of_a_class_that_is_going_to_come_back() -> None:
    traces = Traces()
    trace = traces.trace(
        turns(traces, "soon", "read", 0, 2), turns(traces, "late", "build", 0, 200)
    )
    order = HindsightPolicy(compose([trace], users=1, seed=1), arm_of("hints:hindsight"))
    assert worth(order, "read", 0.0) > worth(order, "build", 0.0) > 0.0
    # Who was to be back long ago and is not will not come; of the other that is still believed.
    assert worth(order, "read", 100.0) == 0.0 < worth(order, "build", 100.0)
    assert worth(order, "nobody has called this", 0.0) == 0.0


def test_hindsight_knows_nothing_of_what_does_not_arrive() -> None:
    traces = Traces()
    chat = session("chat", 0.0, traces.request(0, [9]), traces.request(50, [9]), is_named=False)
    agent = replace(turns(traces, "agent", "read", 0, 2, 100), starts_at=None)
    workload = compose([traces.trace(agent), traces.trace(chat)], users=1, seed=1)
    found = [gap for turn, gap in gaps_of(workload.arrivals, BLOCK, arm_of("hints")) if turn.tool]
    assert found == [2.0, None]


# -- who teaches ----------------------------------------------------------------------------------


def mix(traces: Traces, agents: int, chats: int) -> list[Trace]:
    """Agents without a clock, of whom one at a time plays, beside chats that end after 90 s."""
    return [
        traces.trace(
            *(
                session(
                    f"agent-{k}",
                    None,
                    *(traces.request(at, [k], stop="tool_use") for at in (0.0, 50.0)),
                )
                for k in range(agents)
            )
        ),
        traces.trace(
            *(
                session(f"chat-{k}", 1.0 * k, traces.request(0, [k + 99]), is_named=False)
                for k in range(chats - 1)
            ),
            session("last", 90.0, traces.request(0, [98]), is_named=False),
        ),
    ]


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.1, 1.0), st.integers(0, 99))
def test_who_is_left_out_and_who_arrives_are_all_sessions_and_nobody_is_both(
    agents: int, chats: int, share: float, seed: int
) -> None:
    traces = mix(Traces(), agents, chats)
    workload = compose(traces, users=1, seed=seed, share=share)
    here = {arrival.session.name.removeprefix("1/") for arrival in workload.arrivals}
    left_out = {arrival.session.name.removeprefix("1/") for arrival in workload.unplayed}
    assert not here & left_out
    assert here | left_out == {session.name for trace in traces for session in trace.sessions}
    assert [a.at for a in workload.unplayed] == sorted(a.at for a in workload.unplayed)


def test_others_teach_what_a_policy_begins_with() -> None:
    traces = Traces()
    agents = [
        *(turns(traces, f"soon-{k}", "read", 0, 2) for k in range(40)),
        *(turns(traces, f"late-{k}", "build", 0, 200) for k in range(40)),
    ]
    # The clock of the one that is played ends the mix before any other user's session.
    chat = session("chat", 0.0, traces.request(0, [9]), is_named=False)
    workload = compose([traces.trace(chat), traces.trace(*agents)], users=1, seed=1, share=1 / 80)
    assert len({arrival.session.name for arrival in workload.unplayed}) == 79

    def learnt(policy: str) -> bool:
        order = taught_policy(workload, arm_of(policy), load_settings())
        return worth(order, "read", 0.0) > 2 * worth(order, "build", 0.0)

    assert learnt("hints:taught")
    assert not learnt("hints")


def chat_that_comes_back(*after: float) -> TracedSession:
    traces = Traces(BLOCK)
    at, prompt, requests = 0.0, [7, 7], []
    for gap in (0.0, *after):
        at += gap
        requests.append(traces.request(at, prompt))
        prompt = [*prompt, 7]
    return session("chat", 0.0, *requests, is_named=False)


def test_a_conversation_that_comes_back_too_late_teaches_that_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observer = Observer()
    monkeypatch.setattr(taught, "retention_policy", lambda _: observer)
    waits = Settings().associated_seconds
    comes_back = chat_that_comes_back(5.0, waits - 1, waits, 5.0)
    other = session("other", 0.0, Traces(BLOCK).request(0, [1]), is_named=False)
    traces = [Trace("a", BLOCK, (other,)), Trace("b", BLOCK, (other, comes_back))]
    for seed in range(20):
        workload = compose(traces, users=1, seed=seed, share=0.5)
        if workload.unplayed[0].session.name == "chat":
            break
    taught_policy(workload, arm_of("auto:taught"), Settings())
    assert [gap for _, gap in observer.observed] == [waits - 1, None, 5.0, None]


# -- the lesson is what a server would have observed ----------------------------------------------


@st.composite
def comings_and_goings(draw: st.DrawFn) -> Workload:
    """Named sessions and chats that grow, and come back before anybody forgets them."""
    traces = Traces(BLOCK)
    sessions = [session("first", 0.0, traces.request(0, [0], stop="tool_use"))]
    for number in range(draw(st.integers(1, 4))):
        named = draw(st.booleans())
        prompt = [number + 1, number + 1]
        at, requests = 0.0, []
        for _ in range(draw(st.integers(1, 5))):
            requests.append(
                traces.request(
                    at,
                    prompt,
                    stop=draw(st.sampled_from([None, "", "tool_use", "end_turn"])),
                    tool=draw(st.sampled_from([None, "read"])),
                    out=draw(st.sampled_from([1, 200])),
                    service_seconds=draw(st.sampled_from([None, 3.0])),
                )
            )
            at += draw(st.integers(1, 200))
            prompt = [*prompt, *draw(st.lists(st.just(number + 1), min_size=1, max_size=3))]
        start = draw(st.integers(1, 50))
        sessions.append(session(f"s{number}", float(start), *requests, is_named=named))
    return compose([traces.trace(*sessions)], users=1, seed=1)


@given(comings_and_goings(), st.sampled_from(["hints@never", "auto", "identity"]))
def test_the_gaps_of_traffic_are_those_that_a_server_would_observe(
    workload: Workload, policy: str
) -> None:
    arm = arm_of(policy)
    observer = Observer()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(taught, "retention_policy", lambda _: observer)
        replay_open_loop(
            workload,
            HintedCache(workload, ChainHashes(workload.num_ids), 10_000, arm),
            lambda _: None,
        )
    expected = gaps_of(workload.arrivals, workload.block_size, arm)
    assert Counter(x for x in observer.observed if x[1] is not None) == Counter(
        (observer.class_of(turn), gap) for turn, gap in expected if gap is not None
    )
