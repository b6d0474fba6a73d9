"""Several prompts in one session, on vLLM's own hashes: what a turn replaces, and what it keeps."""

from typing import Any

import pytest

from tests.engine.invariants import check_invariants
from tests.engine.rig import BLOCK, KINDS, Clock, Engine, hinted, make_scheduler, prompt
from vllm_agent_hint.settings import Settings
from vllm_agent_hint.stamp import STAMP_KEY, Stamp

TRUNK = prompt(1, 12 * BLOCK)
MAIN = hinted("agent", 300.0)


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, clock: Clock) -> Engine:
    settings = Settings(protected_share=1.0)
    return Engine(
        make_scheduler(plugged=True, num_blocks=400, kind=request.param, settings=settings)
    )


def is_recorded(engine: Engine, tokens: list[int]) -> bool:
    """Whether every attention block of a context is cached and claimed."""
    ids = engine.cached_ids(tokens)
    return all(i is not None and engine.pool.blocks[i]._session_ref_cnt for i in ids)


def counters(engine: Engine) -> Any:
    check_invariants(engine.scheduler)
    return engine.sam.counters


def test_stripped_reasoning_is_superseded_and_the_trunk_stays(engine: Engine) -> None:
    engine.serve(TRUNK, hint=MAIN)
    engine.serve(TRUNK + prompt(2, 4 * BLOCK), hint=MAIN)
    assert counters(engine).superseded_blocks == 0
    engine.serve(TRUNK + prompt(3, 4 * BLOCK), hint=MAIN)
    assert counters(engine).superseded_blocks >= 4
    assert is_recorded(engine, TRUNK + prompt(3, 4 * BLOCK))
    assert len(engine.session("agent").lineages) == 1


def test_each_turn_of_an_agent_goes_on_with_its_one_context(engine: Engine) -> None:
    tokens = TRUNK
    for turn in range(6):
        tokens = tokens + prompt(10 + turn, 2 * BLOCK + 3)
        engine.serve(tokens, hint=MAIN, max_tokens=5)
    assert len(engine.session("agent").lineages) == 1
    assert is_recorded(engine, tokens)


def test_a_title_writer_beside_the_agent_leaves_its_context_alone(engine: Engine) -> None:
    engine.add(TRUNK, hint=MAIN, max_tokens=8)
    engine.add(prompt(7, 3 * BLOCK), hint=hinted("agent"), max_tokens=2)
    engine.run()
    engine.serve(TRUNK + prompt(2, BLOCK), hint=MAIN)
    assert is_recorded(engine, TRUNK + prompt(2, BLOCK))
    assert is_recorded(engine, prompt(7, 3 * BLOCK))
    assert counters(engine).superseded_blocks == 0


def test_parallel_tool_calls_keep_each_other(engine: Engine) -> None:
    engine.serve(TRUNK, hint=MAIN)
    calls = [TRUNK + prompt(family, 2 * BLOCK) for family in (2, 3, 4)]
    for k, tokens in enumerate(calls):
        engine.add(tokens, hint=MAIN, max_tokens=2 + 3 * k)
    engine.run()
    assert all(is_recorded(engine, tokens) for tokens in calls)
    assert counters(engine).superseded_blocks == 0


def test_the_answers_of_one_request_release_nothing(engine: Engine) -> None:
    engine.serve(TRUNK, hint=MAIN)
    stamp = Stamp(MAIN, "", "op", 2)
    branches = [TRUNK + prompt(family, 2 * BLOCK) for family in (2, 3)]
    for tokens in branches:
        # As the one prompt with two answers of which each has become a prompt of its own.
        engine.serve(tokens, extra_args={STAMP_KEY: stamp.sealed()})
    assert all(is_recorded(engine, tokens) for tokens in branches)
    assert counters(engine).superseded_blocks == 0


def test_an_evict_after_parallel_answers_leaves_nobody_behind(engine: Engine) -> None:
    """What one of them found in the cache was computed by another, which had not ended yet."""
    hint = hinted("agent", 300.0, "evict")
    stamp = Stamp(hint, "", "op", 2)
    for tokens in (3, 8):
        engine.add(TRUNK, extra_args={STAMP_KEY: stamp.sealed()}, max_tokens=tokens)
        engine.step()
    engine.run()
    check_invariants(engine.scheduler)
    # Window blocks are freed while their request runs: whose they were can't be told then.
    left = [c for s in engine.sam.sessions.values() for c in s.lineage.chains if s.is_heir]
    assert not any(len(chain) for chain in left[:1]), "attention blocks"
    assert len(engine.session("agent").lineage) == 0


def test_an_abort_in_mid_prefill_releases_nothing(engine: Engine) -> None:
    engine.serve(TRUNK + prompt(2, 4 * BLOCK), hint=MAIN)
    request_id = engine.add(TRUNK + prompt(3, 20 * BLOCK), hint=MAIN)
    engine.step()
    engine.abort(request_id)
    engine.run()
    assert is_recorded(engine, TRUNK + prompt(2, 4 * BLOCK))
    assert counters(engine).superseded_blocks == 0


def test_a_compaction_lets_the_old_context_go(engine: Engine) -> None:
    summary = TRUNK[:BLOCK] + prompt(5, 3 * BLOCK)
    engine.serve(TRUNK, hint=MAIN)
    for tokens in (summary, summary + prompt(6, 3 * BLOCK)):
        engine.serve(tokens, hint=MAIN)
    assert is_recorded(engine, summary)
    behind = [i for i in engine.cached_ids(TRUNK)[1:] if i]
    assert not any(engine.pool.blocks[i]._session_ref_cnt for i in behind)
    assert counters(engine).superseded_tokens >= len(TRUNK) - BLOCK


def test_a_branch_that_is_taken_up_again_is_regretted(engine: Engine) -> None:
    branches = [TRUNK + prompt(family, 4 * BLOCK) for family in (2, 3)]
    engine.serve(TRUNK, hint=MAIN)
    for tokens in (*branches, branches[0]):
        engine.serve(tokens, hint=MAIN)
    assert counters(engine).superseded_regret_tokens >= 4 * BLOCK
