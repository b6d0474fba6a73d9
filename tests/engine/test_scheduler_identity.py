"""Invariant 1: an engine that has only seen unhinted requests does exactly what stock vLLM does."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.rig import KINDS, Engine, make_scheduler, prompt

Operation = Callable[[Engine], Any]


@st.composite
def arrivals(draw: st.DrawFn) -> Operation:
    """A request: prompts of one family share prefixes, some are sent again word for word."""
    shared = draw(st.sampled_from([0, 16, 40, 96]))
    family = draw(st.integers(0, 3))
    length = draw(st.sampled_from([1, 15, 16, 17, 32, 50, 64, 97, 130, 200]))
    tokens = (prompt(9, shared) + prompt(family, shared + length)[shared:])[: max(length, 1)]
    options = {
        "max_tokens": draw(st.sampled_from([1, 2, 5, 20, 40])),
        "cache_salt": draw(st.sampled_from([None, None, None, "salt"])),
    }
    # What another plugin may carry there is no hint.
    if draw(st.booleans()):
        options["extra_args"] = {"someone_elses": 1}
    return lambda engine: engine.add(tokens, **options)


def steps(n: int) -> Operation:
    def run(engine: Engine) -> None:
        for _ in range(n):
            engine.step()

    return run


def abort(k: int) -> Operation:
    def run(engine: Engine) -> None:
        alive = sorted(engine.scheduler.requests)
        if alive:
            engine.abort(alive[k % len(alive)])

    return run


def reset(running_too: bool) -> Operation:
    def run(engine: Engine) -> Any:
        try:
            return engine.scheduler.reset_prefix_cache(reset_running_requests=running_too)
        except RuntimeError as error:
            return str(error)

    return run


operations = st.one_of(
    arrivals(),
    arrivals(),
    st.integers(1, 12).map(steps),
    st.integers(0, 7).map(abort),
    st.booleans().map(reset),
    st.just(steps(40)),
)


def observed(engine: Engine) -> Any:
    """Everything of the KV core that a later step could depend on."""
    pool = engine.pool
    return (
        engine.log,
        engine.free_ids(),
        [(b.ref_cnt, b.block_hash, b.is_null) for b in pool.blocks],
        [
            list(found) if isinstance(found, dict) else found.block_id
            for found in pool.cached_block_hash_to_block._cache.values()
        ],
        engine.scheduler.get_request_counts(),
        [r.request_id for r in engine.scheduler.running],
    )


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    stream=st.lists(operations, min_size=4, max_size=30),
    num_blocks=st.sampled_from([20, 28, 40, 64]),
    max_num_batched_tokens=st.sampled_from([16, 48, 128]),
)
def test_unhinted_requests_are_scheduled_as_by_stock_vllm(
    kind: str,
    asynchronous: bool,
    stream: list[Operation],
    num_blocks: int,
    max_num_batched_tokens: int,
) -> None:
    stock, plugged = (
        Engine(
            make_scheduler(
                plugged=plugged,
                kind=kind,
                asynchronous=asynchronous,
                num_blocks=num_blocks,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=4,
            ),
            depth=2 if asynchronous else 1,
        )
        for plugged in (False, True)
    )
    for operation in stream:
        assert operation(stock) == operation(plugged)
        assert observed(stock) == observed(plugged)
    assert plugged.scheduler.agent_hint.reason == ""
    assert plugged.sam.sessions == {}
