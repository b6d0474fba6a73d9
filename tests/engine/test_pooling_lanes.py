"""Several operations of one session that wait for each other, and what comes in between."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.engine.own_prompt_rig import CONTEXT, RESUME, WHOLE, plain, saved, server
from tests.engine.pooling_rig import PoolingEngine, pooling_engine
from tests.engine.rig import BLOCK, Clock, hinted, prompt
from vllm_agent_hint.engine import own_prompt_queue
from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.settings import Settings

pytestmark = pytest.mark.usefixtures("clock")

KEY = SessionKey("", None, "here")
NO_ROOM = Settings(prefetch_reserve=0.9, protected_share=1.0)


@pytest.fixture(autouse=True)
def two_blocks_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_prompt_queue, "SLICE_TOKENS", 2 * BLOCK)


def ask(engine: PoolingEngine, *edits: Any, operation_id: str, **more: Any) -> None:
    wire = [{"type": edit} if isinstance(edit, str) else edit for edit in edits]
    engine.call("edit", session_id="here", edits=wire, operation_id=operation_id, **more)


def queue(engine: PoolingEngine, count: int, **more: Any) -> None:
    """Ask for so many prefetches of one session."""
    for k in range(count):
        ask(engine, "prefetch", operation_id=f"prefetch{k}", **more)


def statuses(engine: PoolingEngine, *operations: str) -> list[str]:
    return [result["status"] for name in operations for result in engine.results(name)]


# -- what is being prefetched, and how far that is -------------------------------------------------


def recorded(_: Path, count: int, settings: Settings | None = None) -> PoolingEngine:
    """A session that has run here and whose context lies in the store only."""
    engine = pooling_engine(settings=settings)
    engine.serve(CONTEXT, hint=hinted("here", 600.0))
    engine.done("here", "offload")
    engine.flood()
    engine.faults.is_silent = True
    queue(engine, count)
    engine.steps(2)
    assert engine.remote.loads.num_loading == (settings is None)
    return engine


def recorded_without_room(_: Path, count: int) -> PoolingEngine:
    return recorded(_, count, NO_ROOM)


def unknown(directory: Path, count: int, steps: int = 14, **more: Any) -> PoolingEngine:
    """A session that has never run here and says its prompt."""
    saved(directory)
    engine = server(directory, **more)
    engine.faults.is_silent = True
    queue(engine, count, prompts=[plain(RESUME)])
    engine.steps(steps)
    return engine


def unknown_in_hashing(directory: Path, count: int) -> PoolingEngine:
    engine = unknown(directory, count, steps=3)
    assert len(engine.remote.own_prompts) == 1
    return engine


def unknown_in_loading(directory: Path, count: int) -> PoolingEngine:
    engine = unknown(directory, count)
    assert engine.remote.loads.num_loading == 1
    return engine


def unknown_without_room(directory: Path, count: int) -> PoolingEngine:
    engine = unknown(directory, count, settings=NO_ROOM)
    assert engine.remote.loads.num_waiting == 1
    return engine


UNDER_WAY = pytest.mark.parametrize(
    "under_way",
    [
        recorded,
        recorded_without_room,
        unknown_in_hashing,
        unknown_in_loading,
        unknown_without_room,
    ],
    ids=lambda build: build.__name__,
)
COUNT = pytest.mark.parametrize("count", [1, 2, 3])


# -- what comes in between -------------------------------------------------------------------------


def free(engine: PoolingEngine) -> None:
    engine.call("free", session_id="here", operation_id="end")


def free_the_tree(engine: PoolingEngine) -> None:
    ask(engine, {"type": "evict", "include_children": True}, operation_id="end")


def evict(engine: PoolingEngine) -> None:
    ask(engine, "evict", operation_id="end")


def reset(engine: PoolingEngine) -> None:
    engine.scheduler.reset_prefix_cache()


def pause(engine: PoolingEngine) -> None:
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)


def goes_on(engine: PoolingEngine) -> None:
    """Whatever has come in between is over."""
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.faults.is_silent = False
    engine.run()


@COUNT
@UNDER_WAY
@pytest.mark.parametrize(
    "end", [free, free_the_tree, evict, reset, pause], ids=lambda end: end.__name__
)
def test_all_prefetches_that_were_asked_for_before_are_rejected(
    tmp_path: Path,
    end: Callable[[PoolingEngine], None],
    under_way: Callable[[Path, int], PoolingEngine],
    count: int,
) -> None:
    engine = under_way(tmp_path, count)
    end(engine)
    assert statuses(engine, *(f"prefetch{k}" for k in range(count))) == ["rejected"] * count
    assert engine.remote.spm.num_open == 0
    goes_on(engine)
    assert engine.pool.num_blocks_in[Zone.TTL] == engine.pool.num_blocks_in[Zone.SESSION] == 0
    engine.assert_nothing_is_left()


@COUNT
@UNDER_WAY
@pytest.mark.parametrize("end", [free, free_the_tree], ids=lambda end: end.__name__)
def test_a_session_that_was_freed_stays_freed_however_many_prefetches_it_waits_for(
    tmp_path: Path,
    end: Callable[[PoolingEngine], None],
    under_way: Callable[[Path, int], PoolingEngine],
    count: int,
) -> None:
    engine = under_way(tmp_path, count)
    end(engine)
    goes_on(engine)
    assert KEY not in engine.sam.sessions
    assert KEY not in engine.remote.spm.tracker
    engine.assert_nothing_is_left()


@COUNT
@UNDER_WAY
def test_an_evict_ends_what_prefetches_before_it_would_have_brought(
    tmp_path: Path, under_way: Callable[[Path, int], PoolingEngine], count: int
) -> None:
    engine = under_way(tmp_path, count)
    evict(engine)
    goes_on(engine)
    assert not (session := engine.sam.sessions.get(KEY)) or session.num_records == 0
    assert KEY not in engine.remote.spm.tracker
    engine.assert_nothing_is_left()


def test_a_prefetch_behind_an_evict_is_not_one_that_the_evict_overtakes(tmp_path: Path) -> None:
    engine = unknown_in_loading(tmp_path, 2)
    ask(engine, "prefetch", "evict", "prefetch", operation_id="more", prompts=[plain(RESUME)])
    goes_on(engine)
    assert statuses(engine, "prefetch0", "prefetch1") == ["rejected"] * 2
    assert statuses(engine, "more") == ["rejected", "missing", "applied"]
    engine.assert_nothing_is_left()


def test_the_end_of_another_session_leaves_what_waits_alone(tmp_path: Path) -> None:
    engine = recorded(tmp_path, 3)
    engine.call("free", session_id="another", operation_id="end")
    goes_on(engine)
    assert statuses(engine, "prefetch0", "prefetch1", "prefetch2") == ["applied"] * 3
    engine.assert_nothing_is_left()


def test_what_a_session_has_asked_for_is_not_done_to_the_next_of_its_name() -> None:
    engine = pooling_engine()
    engine.serve(CONTEXT, hint=hinted("here", 600.0), max_tokens=BLOCK)
    engine.faults.is_silent = True
    ask(engine, "offload", operation_id="saving")
    engine.steps(2)
    ask(engine, "evict", operation_id="waiting")
    free(engine)
    engine.add(prompt(2, WHOLE + 3), hint=hinted("here", 600.0))
    engine.steps(4)
    goes_on(engine)
    assert statuses(engine, "saving", "waiting") == ["applied", "applied"]
    assert "the session has ended" in engine.results("waiting")[0]["reason"]
    assert engine.pool.num_blocks_in[Zone.TTL] == 20
    assert KEY in engine.remote.spm.tracker
    engine.assert_nothing_is_left()


# -- faults ----------------------------------------------------------------------------------------


def broken(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("planted")


@UNDER_WAY
@pytest.mark.parametrize("room", ["_saves", "_prefetches"])
def test_a_fault_in_beginning_what_waits_leaves_no_operation_open(
    tmp_path: Path,
    under_way: Callable[[Path, int], PoolingEngine],
    room: str,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    log: Any,
) -> None:
    engine = under_way(tmp_path, 1)
    monkeypatch.setattr(getattr(engine.remote.spm, room), "start", broken)
    for k, edit in enumerate(["offload", "prefetch", "offload", "prefetch"]):
        ask(engine, edit, operation_id=f"behind{k}", prompts=[plain(RESUME)])
    clock.advance(31.0 if engine.remote.loads.num_waiting else 0.0)
    goes_on(engine)
    assert "without the KV connector" in log.text
    every = statuses(engine, "prefetch0", *(f"behind{k}" for k in range(4)))
    assert "pending" not in every
    assert every.count("failed") >= 2
    assert engine.remote.spm.num_open == 0
    assert engine.sam.num_open_edits == 0
    assert not engine.scheduler.has_requests()


def test_a_fault_in_beginning_what_is_asked_for_leaves_no_operation_open(
    monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    engine = pooling_engine()
    engine.serve(CONTEXT, hint=hinted("here", 600.0))
    monkeypatch.setattr(engine.remote.spm._saves, "start", broken)
    ask(engine, "offload", "prefetch", "offload", operation_id="all")
    engine.run()
    assert statuses(engine, "all") == ["failed"] * 3
    assert engine.remote.spm.num_open == 0


# -- how many may wait -----------------------------------------------------------------------------


def at_most(bound: int, **more: Any) -> Settings:
    return Settings(**{"max_prefetches_queued": bound, "prefetch_reserve": 0.0, **more})


@pytest.mark.parametrize("prompts", [(), (plain(RESUME),)], ids=["recorded", "own"])
def test_prefetches_that_wait_for_their_session_count_like_all_that_wait(
    tmp_path: Path, prompts: tuple[dict[str, Any], ...]
) -> None:
    saved(tmp_path, "here", 600.0)
    engine = server(tmp_path, settings=at_most(3, prefetch_reserve=0.9))
    queue(engine, 6, prompts=list(prompts))
    engine.steps(14)
    every = statuses(engine, *(f"prefetch{k}" for k in range(6)))
    assert every == ["pending"] * 3 + ["rejected"] * 3
    assert "max_prefetches_queued" in engine.results("prefetch5")[0]["reason"]
    assert engine.remote.num_prefetches_waiting == 3
    free(engine)
    assert engine.remote.num_prefetches_waiting == 0
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("steps", range(0, 16, 3))
def test_prefetches_that_wait_for_anything_are_counted_together(tmp_path: Path, steps: int) -> None:
    saved(tmp_path)
    engine = server(tmp_path, settings=at_most(4, prefetch_reserve=0.9))
    for k in range(6):
        engine.call(
            "edit",
            session_id=f"session{k % 3}",
            edits=[{"type": "prefetch"}],
            prompts=[plain(RESUME)],
            operation_id=f"prefetch{k}",
        )
        engine.steps(steps)
    every = statuses(engine, *(f"prefetch{k}" for k in range(6)))
    assert every == ["pending"] * 4 + ["rejected"] * 2
    assert engine.remote.num_prefetches_waiting == 4


def test_a_prompt_that_waits_is_no_list_of_numbers(tmp_path: Path) -> None:
    def lists_of_it() -> int:
        lists = (each for each in gc.get_objects() if type(each) is list)
        return sum(1 for each in lists if each[:WHOLE] == RESUME[:WHOLE])

    engine = unknown_in_hashing(tmp_path, 1)
    before = lists_of_it()
    ask(engine, "prefetch", operation_id="waiting", prompts=[plain(RESUME)])
    assert lists_of_it() == before
    goes_on(engine)
    assert statuses(engine, "waiting") == ["applied"]
