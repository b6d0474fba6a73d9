"""Conversations of requests without a hint, on vLLM's real scheduler."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.engine.invariants import check_invariants
from tests.engine.rig import BLOCK, KINDS, Clock, Engine, hinted, make_scheduler, prompt
from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.settings import Settings

FIRST = 1_040
"""Tokens of a first prompt: a conversation can be known by 1,024 of them."""


def make_engine(num_blocks: int = 400, *, with_agent: bool = True, **options: Any) -> Engine:
    engine = Engine(
        make_scheduler(plugged=True, num_blocks=num_blocks, max_num_batched_tokens=8192, **options)
    )
    if with_agent:
        engine.serve(prompt(900, 48), hint=hinted("agent", 3600.0))
    return engine


def chat(engine: Engine, clock: Clock, *lengths: int, family: int = 1) -> list[int]:
    """Prompts that go on with one another. Returns what each found cached."""
    found = []
    for length in lengths:
        found.append(engine.serve(prompt(family, length)))
        clock.advance(5.0)
    return found


def flood(engine: Engine, num_blocks: int) -> None:
    """One-shot prompts that need so many blocks, and some more."""
    for k in range(num_blocks // 20 + 4):
        engine.serve(prompt(100 + k, 20 * BLOCK - 2))


def conversations(engine: Engine) -> list[Any]:
    return [s for s in engine.sam.sessions.values() if s.is_conversation]


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_outlives_one_shot_prompts_in_every_kind_of_model(
    clock: Clock, kind: str
) -> None:
    num_blocks = 400 if kind == "full" else 900
    engine = make_engine(num_blocks, kind=kind)
    chat(engine, clock, FIRST, FIRST + 64)
    flood(engine, num_blocks)
    check_invariants(engine.scheduler)
    assert chat(engine, clock, FIRST + 128)[0] >= FIRST


@pytest.mark.parametrize(
    "why_not", ["one turn only", "nobody is hinted", "it is off", "it repeats itself"]
)
def test_what_is_no_conversation_is_reused_in_the_order_of_vllm(clock: Clock, why_not: str) -> None:
    settings = Settings(conversations=why_not != "it is off")
    engine = make_engine(with_agent=why_not != "nobody is hinted", settings=settings)
    turns = {"one turn only": [FIRST], "it repeats itself": [FIRST, FIRST]}
    chat(engine, clock, *turns.get(why_not, [FIRST, FIRST + 64]))
    assert not conversations(engine)
    assert not engine.zone_ids(Zone.SESSION)
    flood(engine, 400)
    assert chat(engine, clock, FIRST + 128) == [0]


def test_it_gives_way_before_a_lease(clock: Clock) -> None:
    engine = make_engine(200)
    chat(engine, clock, FIRST, FIRST + 64)
    engine.serve(prompt(5, 200 * BLOCK - 3 * 48), hint=hinted("large", 60.0))
    check_invariants(engine.scheduler)
    assert engine.serve(prompt(900, 48), hint=hinted("agent")) == 32


def test_hinted_tokens_are_those_of_hinted_requests(clock: Clock) -> None:
    engine = make_engine()
    engine.scheduler.kv_cache_manager.take_hinted_tokens()
    chat(engine, clock, FIRST, FIRST + 64)
    taken = engine.scheduler.kv_cache_manager.take_hinted_tokens()
    assert (taken.queried, taken.cached) == (0, 0)


def test_statistics_count_conversations_apart(clock: Clock) -> None:
    engine = make_engine()
    chat(engine, clock, FIRST, FIRST + 64)
    taken = engine.scheduler.agent_hint.statistics()
    assert (taken["sessions"], taken["conversations"]) == (1, 1)
    assert engine.call("list", limit=10, after=None)["sessions"][0]["session_id"] == "agent"
    assert len(engine.call("list", limit=10, after=None)["sessions"]) == 1


def test_one_that_is_preempted_or_aborted_leaves_no_trace_of_itself(clock: Clock) -> None:
    engine = make_engine()
    chat(engine, clock, FIRST)
    waiting = engine.add(prompt(1, FIRST + 64))
    engine.abort(waiting)
    check_invariants(engine.scheduler)
    running = engine.add(prompt(1, FIRST + 128), max_tokens=50)
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    check_invariants(engine.scheduler)
    engine.step()
    engine.abort(running)
    engine.run()
    assert not engine.scheduler.agent_hint.tracked
    check_invariants(engine.scheduler)


@pytest.mark.parametrize("length", [FIRST + 64, FIRST])
def test_siblings_share_what_they_find(clock: Clock, length: int) -> None:
    engine = make_engine()
    chat(engine, clock, FIRST)
    for _ in range(3):
        engine.add(prompt(1, length))
    engine.run()
    check_invariants(engine.scheduler)
    assert len(conversations(engine)) == (length > FIRST)


def test_a_fault_while_one_is_looked_for_ends_hints_and_no_request(clock: Clock, log: Any) -> None:
    engine = make_engine()

    def fail(hashes: Sequence[bytes], now: float, *, tenant: str) -> None:
        raise RuntimeError("planted")

    engine.sam.unhinted_added = fail
    assert engine.serve(prompt(1, FIRST)) == 0
    assert engine.scheduler.agent_hint.sam is None
    assert "unhinted_added" in log.text
    assert engine.serve(prompt(1, FIRST)) == FIRST // BLOCK * BLOCK - (FIRST % BLOCK == 0) * BLOCK
