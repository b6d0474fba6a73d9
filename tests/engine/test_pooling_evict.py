"""What an evict deletes in a store, and what it must leave: what anybody else has a use for."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine.own_prompt_rig import hashed, plain
from tests.engine.pooling_rig import PoolingEngine, pooling_engine
from tests.engine.rig import BLOCK, hinted, prompt
from tests.engine.simple_cpu_rig import simple_cpu_engine
from vllm_agent_hint.cli.bench.engine import SAMPLED_TOKEN
from vllm_agent_hint.pooling.capability import Content
from vllm_agent_hint.settings import Settings

pytestmark = pytest.mark.usefixtures("clock")

SHARED = 8 * BLOCK
SYSTEM = prompt(1, SHARED)
WHOLE = 20 * BLOCK
OURS = [*SYSTEM, *prompt(2, WHOLE - SHARED + 3)]
THEIRS = [*SYSTEM, *prompt(3, WHOLE - SHARED + 3)]


def engine_over(directory: Path | None) -> PoolingEngine:
    extra = {} if directory is None else {"directory": str(directory)}
    return pooling_engine(
        extra=extra,
        num_blocks=80,
        settings=Settings(prefetch_reserve=0.0, protected_share=1.0, idle_seconds=60.0),
    )


def park(engine: PoolingEngine, session_id: str, context: list[int]) -> None:
    engine.serve(context, hint=hinted(session_id, 600.0))
    (parked,) = engine.done(session_id, "offload")
    assert (parked["status"], parked["tokens"]) == ("applied", WHOLE)


def content_of(engine: PoolingEngine, session_id: str) -> Content:
    tracker = engine.remote.spm.tracker
    found: Content = next(tracker.get(k).latest for k in tracker if k.session_id == session_id)
    return found


def in_store(engine: PoolingEngine, content: Content) -> int:
    found: int = engine.remote.spm.store.loadable_tokens(content)
    return found


def settle(engine: PoolingEngine) -> None:
    """What a server says to others, it says soon."""
    engine.remote.spm.store.manifest.finish()
    engine.tier.folder.finish()


def served_from_the_store(engine: PoolingEngine, tokens: list[int]) -> int:
    """Tokens that a request finds when the GPU cache is empty. What it reads is checked."""
    assert engine.scheduler.reset_prefix_cache()
    return engine.serve(tokens)


# -- one server ------------------------------------------------------------------------------------


@pytest.fixture(params=["host memory", "directory", "SimpleCPUOffloadConnector"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> PoolingEngine:
    if request.param == "SimpleCPUOffloadConnector":
        return simple_cpu_engine(num_blocks=80)
    return engine_over(tmp_path if request.param == "directory" else None)


@pytest.mark.parametrize("when", ["before", "after", "meanwhile"])
def test_a_prefix_of_requests_without_a_session_outlives_the_evict(
    engine: PoolingEngine, when: str
) -> None:
    if when == "before":
        engine.serve(THEIRS)
    if when == "meanwhile":
        engine.add(OURS, hint=hinted("a", 600.0), max_tokens=4)
        engine.step()
        engine.add(THEIRS)
        engine.run()
    park(engine, "a", OURS)
    if when == "after":
        engine.serve(THEIRS)
    content = content_of(engine, "a")

    engine.done("a", "evict")

    assert in_store(engine, content) == SHARED
    assert served_from_the_store(engine, THEIRS) == WHOLE
    engine.assert_nothing_is_left()


def test_a_prefix_of_a_session_that_has_ended_outlives_the_evict(engine: PoolingEngine) -> None:
    engine.serve(THEIRS, hint=hinted("b", 600.0))
    park(engine, "a", OURS)
    engine.sam.free_session(engine.session("b").key)
    content = content_of(engine, "a")

    engine.done("a", "evict")

    assert in_store(engine, content) == SHARED
    engine.assert_nothing_is_left()


def test_what_a_request_finds_on_the_gpu_before_what_it_loads_is_used_by_it(
    engine: PoolingEngine,
) -> None:
    engine.serve(THEIRS)
    theirs = hashed(engine, plain(THEIRS))
    engine.remote.spm.store.delete(theirs.hashes[: SHARED // BLOCK])
    assert engine.scheduler.reset_prefix_cache()
    park(engine, "a", OURS)
    assert engine.serve(THEIRS) == WHOLE
    assert engine.cached_ids(OURS)[0] == engine.cached_ids(THEIRS)[0]

    engine.done("a", "evict")

    assert in_store(engine, theirs) == WHOLE
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("is_parked", [False, True])
def test_what_only_the_session_has_used_is_gone(
    engine: PoolingEngine, turns: int, is_parked: bool
) -> None:
    context = list(OURS)
    for _ in range(turns):
        engine.serve(context, hint=hinted("a", 600.0), max_tokens=BLOCK)
        context += [*[7] * BLOCK, *prompt(5, BLOCK)]
        if is_parked:
            engine.done("a", "offload")
            assert engine.scheduler.reset_prefix_cache()
            engine.done("a", "prefetch")
    content = content_of(engine, "a")
    there = in_store(engine, content)
    assert there >= WHOLE

    (evicted,) = engine.done("a", "evict")

    assert f"{there // BLOCK} blocks were deleted" in evicted["reason"]
    # The connector stores the end of a request a step later.
    engine.steps(3)
    assert engine.remote.spm.store.refresh(content.hashes)[0] == 0
    engine.assert_nothing_is_left()


def test_what_somebody_else_has_generated_too_outlives_the_evict(engine: PoolingEngine) -> None:
    engine.serve(OURS, max_tokens=3 * BLOCK)
    theirs = hashed(engine, plain([*OURS, *[SAMPLED_TOKEN] * 3 * BLOCK]))
    before = in_store(engine, theirs)
    engine.serve(OURS, hint=hinted("a", 600.0), max_tokens=3 * BLOCK)

    engine.done("a", "evict")

    assert in_store(engine, theirs) == before
    engine.assert_nothing_is_left()


def test_a_fault_in_noting_who_uses_what_costs_the_delete_and_no_request(
    monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    engine = simple_cpu_engine(num_blocks=80)
    store = engine.remote.spm.store

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    engine.serve(OURS, hint=hinted("a", 600.0))
    with monkeypatch.context() as planted:
        planted.setattr(store, "_find", broken)
        engine.serve(THEIRS, hint=hinted("b", 600.0))
    content = content_of(engine, "a")

    engine.done("a", "evict")

    assert log.text.count("said once") == 1
    assert in_store(engine, content) == WHOLE
    engine.assert_nothing_is_left()


def test_what_only_an_offload_has_brought_is_gone_too() -> None:
    engine = pooling_engine(chunks=20, num_blocks=80)
    engine.serve(OURS, hint=hinted("a", 600.0))
    engine.serve(prompt(6, WHOLE + 1))
    content = content_of(engine, "a")
    assert in_store(engine, content) == 0
    engine.done("a", "offload")
    assert in_store(engine, content) == WHOLE

    engine.done("a", "evict")

    assert in_store(engine, content) == 0
    engine.assert_nothing_is_left()


def test_what_is_to_go_as_soon_as_it_is_written_stays_if_somebody_comes_for_it(
    engine: PoolingEngine,
) -> None:
    engine.faults.is_silent = True
    engine.step_until_it_ends(engine.add(OURS, hint=hinted("a", 600.0)))
    content = content_of(engine, "a")
    engine.ask("a", "evict")
    engine.step_until_it_ends(engine.add(THEIRS))
    engine.faults.is_silent = False
    engine.run()

    assert in_store(engine, content) == SHARED
    assert served_from_the_store(engine, THEIRS) == WHOLE
    engine.assert_nothing_is_left()


def test_what_is_evicted_while_only_its_file_is_written_is_gone_once_it_is(tmp_path: Path) -> None:
    engine = pooling_engine(chunks=1, extra={"directory": str(tmp_path)})
    engine.faults.is_silent = True
    engine.step_until_it_ends(engine.add(OURS, hint=hinted("a", 600.0)))
    content = content_of(engine, "a")
    engine.ask("a", "evict")
    engine.faults.is_silent = False
    engine.run()

    assert in_store(engine, content) == 0
    assert not list(tmp_path.rglob("*.kv"))
    engine.assert_nothing_is_left()


# -- two servers over one directory ----------------------------------------------------------------


def test_an_evict_leaves_whole_what_is_parked_on_another_server(tmp_path: Path) -> None:
    first, second = engine_over(tmp_path), engine_over(tmp_path)
    park(first, "a", OURS)
    park(second, "b", THEIRS)
    settle(second)
    content = content_of(first, "a")

    (evicted,) = first.done("a", "evict")

    assert "12 blocks were deleted" in evicted["reason"]
    assert in_store(first, content) == SHARED
    assert second.scheduler.reset_prefix_cache()
    (fetched,) = second.done("b", "prefetch")
    assert (fetched["status"], fetched["tokens"]) == ("applied", WHOLE)
    assert second.serve(THEIRS, hint=hinted("b", 600.0)) == WHOLE
    first.assert_nothing_is_left()
    second.assert_nothing_is_left()


@pytest.mark.parametrize("use", ["request", "session", "prefetch", "manifest", "loading request"])
def test_whoever_uses_a_chunk_on_another_server_keeps_it(tmp_path: Path, use: str) -> None:
    first, second = engine_over(tmp_path), engine_over(tmp_path)
    park(first, "a", OURS)
    settle(first)
    content = content_of(first, "a")
    if use == "request":
        second.serve(OURS)
    elif use == "session":
        second.serve(OURS, hint=hinted("b", 600.0))
    elif use == "prefetch":
        second.done("a", "prefetch")
    elif use == "manifest":
        assert second.remote.spm._hearsay.learn(next(iter(first.remote.spm.tracker)), ()) == ""
        second.remote.spm.keep_alive(second.remote.spm.now + 61.0)
    else:
        second.serve(THEIRS)
    settle(second)

    first.done("a", "evict")

    assert in_store(second, content) == (SHARED if use == "loading request" else WHOLE)


def test_two_servers_that_write_the_same_at_once_do_not_delete_it_for_each_other(
    tmp_path: Path,
) -> None:
    first, second = engine_over(tmp_path), engine_over(tmp_path)
    for server in (first, second):
        server.faults.is_silent = True
    # Neither has written a file when the other looks.
    held: list[Callable[[], None]] = []
    for name, server in (("a", first), ("b", second)):
        write = server.side.prepare_store_kv
        server.side.prepare_store_kv = lambda meta, write=write: held.append(partial(write, meta))
        server.add(OURS, hint=hinted(name, 600.0))
        server.step()
        server.side.prepare_store_kv = write
    for write in held:
        write()
    for server in (first, second):
        server.faults.is_silent = False
        server.run()
    settle(second)
    content = content_of(second, "b")

    first.done("a", "evict")

    assert in_store(second, content) == WHOLE


# -- what goes first -------------------------------------------------------------------------------


def nearly_full() -> tuple[PoolingEngine, Content, Content]:
    """A tier with room for five chunks beside an older context and a newer one of no session."""
    engine = pooling_engine(chunks=45, num_blocks=80)
    older = prompt(8, WHOLE + 3)
    engine.serve(older)
    engine.serve(OURS)
    return engine, hashed(engine, plain(older)), hashed(engine, plain(OURS))


def fill(engine: PoolingEngine) -> None:
    engine.serve(prompt(9, 10 * BLOCK + 1))


@pytest.mark.parametrize("end", ["evict", "free", "another prompt"])
def test_a_session_known_by_its_prompt_puts_nobodys_chunks_first_in_line(end: str) -> None:
    engine, older, newer = nearly_full()
    prefetch = {"session_id": "here", "edits": [{"type": "prefetch"}]}
    engine.call("edit", **prefetch, prompts=[plain(OURS)])
    engine.run()
    assert engine.results()[0]["status"] == "applied"
    if end == "evict":
        engine.done("here", "evict")
    elif end == "free":
        engine.call("free", session_id="here", operation_id="free")
    else:
        engine.call("edit", **prefetch, prompts=[plain(prompt(8, WHOLE + 3))])
    engine.run()

    fill(engine)

    assert in_store(engine, newer) == WHOLE
    assert in_store(engine, older) < WHOLE
    engine.assert_nothing_is_left()


def test_a_session_that_has_ended_puts_nobody_elses_chunks_first_in_line() -> None:
    engine, older, newer = nearly_full()
    engine.serve(OURS, hint=hinted("a", 600.0))
    engine.sam.free_session(engine.session("a").key)

    fill(engine)

    assert in_store(engine, newer) == WHOLE
    assert in_store(engine, older) < WHOLE
    engine.assert_nothing_is_left()


def test_dead_chunks_are_ordinary_again_for_whoever_asks_for_them() -> None:
    engine = pooling_engine(chunks=45, num_blocks=80)
    older = prompt(8, WHOLE + 3)
    engine.serve(older)
    engine.serve(OURS, hint=hinted("a", 600.0))
    engine.sam.free_session(engine.session("a").key)
    assert served_from_the_store(engine, OURS) == WHOLE

    fill(engine)

    assert in_store(engine, hashed(engine, plain(OURS))) == WHOLE
    assert in_store(engine, hashed(engine, plain(older))) < WHOLE
    engine.assert_nothing_is_left()
