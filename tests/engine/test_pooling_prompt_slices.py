"""Hashing the prompt of a prefetch a slice at a time, on vLLM's real scheduler.

A slice is two blocks here; it is 4,096 tokens elsewhere.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.interface import PauseState

from tests.engine.own_prompt_rig import (
    ADAPTER,
    CONTEXT,
    RESUME,
    WHOLE,
    hashed,
    plain,
    request_of,
    saved,
    server,
)
from tests.engine.pooling_rig import PoolingEngine, pooling_engine
from tests.engine.rig import BLOCK, Clock, hinted, prompt
from vllm_agent_hint.engine import own_prompt_queue
from vllm_agent_hint.engine.own_prompts import PromptInHashing
from vllm_agent_hint.pooling.tracker import Origin
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.settings import Settings

pytestmark = pytest.mark.usefixtures("clock")

SLICE = 2 * BLOCK
STEPS = len(RESUME) // SLICE
"""That hashing takes; the slice that is done when the prompt comes is the first step's."""
SHORT = prompt(9, BLOCK + 1)
KEY = SessionKey("", None, "here")


@pytest.fixture(autouse=True)
def two_blocks_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_prompt_queue, "SLICE_TOKENS", SLICE)


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each slice that has been hashed."""
    seen: list[int] = []
    go_on = PromptInHashing.go_on

    def noting(self: PromptInHashing, num_tokens: int) -> int:
        seen.append(go_on(self, num_tokens))
        return seen[-1]

    monkeypatch.setattr(PromptInHashing, "go_on", noting)
    return seen


def ask(engine: PoolingEngine, *prompts: list[int], session_id: str = "here") -> str:
    """Ask for a prefetch. Returns its status by now."""
    edits = [{"type": "prefetch"}]
    sent = [plain(tokens) for tokens in prompts]
    engine.call("edit", session_id=session_id, edits=edits, prompts=sent, operation_id=session_id)
    return status(engine, session_id)


def status(engine: PoolingEngine, session_id: str = "here") -> str:
    (result,) = engine.results(session_id)
    return str(result["status"])


def finish(engine: PoolingEngine, session_id: str = "here") -> tuple[str, int]:
    engine.run()
    (result,) = engine.results(session_id)
    return result["status"], result["tokens"]


@pytest.fixture(scope="module")
def hashing_engine() -> PoolingEngine:
    return pooling_engine()


# -- hashes ----------------------------------------------------------------------------------------

ITEMS = st.lists(
    st.tuples(st.sampled_from(["image", "film", "sound"]), st.integers(0, 110), st.integers(1, 60)),
    max_size=4,
).map(lambda items: sorted(items, key=lambda item: item[1]))


@settings(max_examples=300, deadline=None)
@given(
    num_tokens=st.integers(0, 10 * BLOCK + 3),
    slices=st.lists(st.integers(0, 4 * BLOCK), max_size=12),
    cache_salt=st.sampled_from([None, "pepper"]),
    lora=st.sampled_from([None, ADAPTER]),
    items=ITEMS,
)
def test_any_slices_give_the_hashes_that_the_scheduler_goes_by(
    hashing_engine: PoolingEngine, num_tokens: int, slices: list[int], **marks: Any
) -> None:
    tokens = prompt(5, num_tokens)
    request = request_of(tokens, **marks)
    found = hashed(hashing_engine, plain(tokens, **marks), slices=slices, needs_tokens=True)
    assert list(found.hashes) == list(request.block_hashes)
    assert list(found.token_ids or ()) == tokens[: num_tokens // BLOCK * BLOCK]


def test_sound_that_ends_before_its_film_does_not_mislead_a_slice(
    hashing_engine: PoolingEngine,
) -> None:
    items = [("film", 0, 6 * BLOCK), ("sound", 4, 8)]
    tokens = prompt(5, 10 * BLOCK)
    found = hashed(hashing_engine, plain(tokens, items=items), slices=[BLOCK] * 10)
    assert list(found.hashes) == list(request_of(tokens, items=items).block_hashes)


def test_a_vllm_that_goes_on_with_the_last_item_has_the_same_hashes(
    hashing_engine: PoolingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM did before 0.31, which never went on within a prompt."""
    items = [("image", 5, 20), ("other", 3 * BLOCK, 2 * BLOCK), ("third", 6 * BLOCK + 3, 9)]
    tokens = prompt(5, 10 * BLOCK)
    whole = list(request_of(tokens, items=items).block_hashes)
    monkeypatch.setattr(
        kv_cache_utils, "get_mm_features_in_window", lambda found, *_: (len(found) - 1, len(found))
    )
    found = hashed(hashing_engine, plain(tokens, items=items), slices=[BLOCK] * 10)
    assert list(found.hashes) == whole


def test_behind_its_last_item_a_prompt_is_cut_again(tmp_path: Path, slices: list[int]) -> None:
    second = server(tmp_path)
    sent = [plain(RESUME, items=[("image", 5, 20), ("other", 3 * BLOCK, 2 * BLOCK + 1)])]
    edits = [{"type": "prefetch"}]
    second.call("edit", session_id="here", edits=edits, prompts=sent, operation_id="here")
    second.run()
    assert slices[:2] == [6 * BLOCK, SLICE]
    assert max(slices[1:]) == SLICE
    second.assert_nothing_is_left()


# -- a slice in each step --------------------------------------------------------------------------


def test_what_is_hashed_in_slices_is_what_the_next_request_finds(
    tmp_path: Path, slices: list[int]
) -> None:
    saved(tmp_path)
    second = server(tmp_path)
    assert ask(second, RESUME) == "pending"
    assert finish(second) == ("applied", WHOLE)
    assert len(slices) == STEPS
    assert second.serve(RESUME, hint=hinted("here")) == WHOLE
    second.assert_nothing_is_left()


def test_a_step_of_a_running_request_is_held_for_one_slice_at_most(
    tmp_path: Path, slices: list[int]
) -> None:
    saved(tmp_path)
    second = server(tmp_path)
    second.add(prompt(3, BLOCK), max_tokens=STEPS + 4)
    second.step()
    (running,) = second.scheduler.requests.values()
    ask(second, RESUME)
    for step in range(STEPS + 3):
        if step == 1:
            ask(second, prompt(2, 10 * BLOCK), session_id="another")
            ask(second, SHORT, session_id="short")
        before = running.num_output_tokens
        second.step()
        assert running.num_output_tokens == before + 1
        assert sum(slices) <= SLICE, "more than a slice since the last step"
        slices.clear()
    assert finish(second) == ("applied", WHOLE)
    second.assert_nothing_is_left()


def test_the_load_begins_with_the_step_in_which_the_last_slice_is_done(tmp_path: Path) -> None:
    saved(tmp_path)
    second = server(tmp_path)
    ask(second, RESUME)
    second.steps(STEPS - 1)
    assert second.remote.loads.num_loading == 0
    assert len(second.remote.own_prompts) == 1
    second.step()
    assert second.remote.loads.num_loading == 1
    assert len(second.remote.own_prompts) == 0
    assert finish(second) == ("applied", WHOLE)
    second.assert_nothing_is_left()


def test_two_prompts_at_once_share_a_slice_first_come_first_served(
    tmp_path: Path, slices: list[int]
) -> None:
    saved(tmp_path)
    second = server(tmp_path)
    ask(second, RESUME)
    ask(second, prompt(2, 3 * BLOCK), session_id="another")
    per_step = [sum(slices)]
    while second.scheduler.has_requests():
        slices.clear()
        second.step()
        per_step.append(sum(slices))
        if len(second.remote.own_prompts) == 2:
            assert status(second, "another") == "pending"
    assert max(per_step) == SLICE
    assert sum(per_step) == len(RESUME) // BLOCK * BLOCK + 3 * BLOCK
    assert finish(second) == ("applied", WHOLE)
    assert finish(second, "another") == ("missing", 0)
    second.assert_nothing_is_left()


def test_a_prompt_for_which_the_slice_has_room_is_known_at_once(tmp_path: Path) -> None:
    second = server(tmp_path)
    assert ask(second, SHORT) == "missing"
    assert not second.scheduler.has_requests()
    second.assert_nothing_is_left()


def test_an_idle_engine_steps_until_the_prompt_is_known_and_then_rests(tmp_path: Path) -> None:
    second = server(tmp_path)
    ask(second, RESUME)
    for _ in range(STEPS):
        assert second.scheduler.has_requests()
        second.step()
    assert status(second) == "missing"
    assert not second.scheduler.has_requests()
    second.assert_nothing_is_left()


def test_several_prompts_of_one_prefetch_are_hashed_one_after_the_other(
    tmp_path: Path, slices: list[int]
) -> None:
    first = saved(tmp_path)
    other = prompt(2, 10 * BLOCK + 1)
    first.serve(other, hint=hinted("another"))
    first.done("another", "offload")
    second = server(tmp_path)
    ask(second, RESUME, other)
    assert finish(second) == ("applied", WHOLE + 10 * BLOCK)
    assert max(slices) == SLICE
    second.assert_nothing_is_left()


# -- what comes in between -------------------------------------------------------------------------


def halfway(directory: Path, **more: Any) -> PoolingEngine:
    """A server that has hashed a part of a prompt."""
    engine = server(directory, **more)
    assert ask(engine, RESUME) == "pending"
    engine.steps(3)
    assert len(engine.remote.own_prompts) == 1
    return engine


def assert_it_was_dropped(engine: PoolingEngine, slices: list[int], reason: str) -> None:
    (result,) = engine.results("here")
    assert (result["status"], result["tokens"]) == ("rejected", 0)
    assert reason in result["reason"]
    assert not engine.scheduler.has_requests()
    slices.clear()
    engine.steps(2)
    assert slices == []
    assert engine.remote.counters.loaded_tokens == 0
    assert len(engine.remote.spm.tracker) == 0
    engine.assert_nothing_is_left()


def test_the_end_of_the_session_drops_it(tmp_path: Path, slices: list[int]) -> None:
    saved(tmp_path)
    second = halfway(tmp_path)
    second.call("free", session_id="here", operation_id="free")
    assert_it_was_dropped(second, slices, "the session has ended")


def test_an_evict_of_the_session_drops_it(tmp_path: Path, slices: list[int]) -> None:
    saved(tmp_path)
    second = halfway(tmp_path)
    second.ask("here", "evict", operation_id="evict")
    assert status(second, "evict") == "missing"
    assert_it_was_dropped(second, slices, "an evict of the session has overtaken it")


def test_a_reset_drops_it(tmp_path: Path, slices: list[int]) -> None:
    saved(tmp_path)
    second = halfway(tmp_path)
    assert second.scheduler.reset_prefix_cache()
    assert_it_was_dropped(second, slices, "the prefix cache was reset")


def test_a_pause_drops_it(tmp_path: Path, slices: list[int]) -> None:
    saved(tmp_path)
    second = halfway(tmp_path)
    second.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert_it_was_dropped(second, slices, "vLLM was paused")


def test_the_end_of_another_session_leaves_it_alone(tmp_path: Path) -> None:
    saved(tmp_path)
    second = halfway(tmp_path)
    second.call("free", session_id="another", operation_id="free")
    assert finish(second) == ("applied", WHOLE)
    second.assert_nothing_is_left()


def test_what_is_asked_for_in_a_pause_is_hashed_and_loaded_afterwards(
    tmp_path: Path, slices: list[int]
) -> None:
    saved(tmp_path)
    second = server(tmp_path)
    second.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for session_id in ("here", "there", "elsewhere"):
        assert ask(second, RESUME, session_id=session_id) == "pending"
    assert sum(slices) == SLICE, "as between any two steps"
    assert not second.scheduler.has_requests(), "a pause waits until nothing wants a step"
    second.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert finish(second) == ("applied", WHOLE)
    assert finish(second, "elsewhere") == ("applied", WHOLE)
    assert max(slices) == SLICE
    second.assert_nothing_is_left()


def test_a_session_that_runs_meanwhile_comes_as_it_was_recorded(tmp_path: Path) -> None:
    saved(tmp_path)
    second = halfway(tmp_path)
    own = prompt(2, BLOCK + 1)
    second.add(own, hint=hinted("here"), max_tokens=1)
    second.step()
    assert len(second.remote.own_prompts) == 1
    assert finish(second) == ("applied", BLOCK)
    found = second.remote.spm.tracker.get(KEY)
    assert (found.origin, found.latest.num_tokens) == (Origin.RUN, BLOCK)
    assert second.cached_ids(CONTEXT) == [None] * 20
    second.assert_nothing_is_left()


def test_more_prompts_than_prefetches_may_wait_are_rejected(tmp_path: Path) -> None:
    saved(tmp_path)
    second = halfway(tmp_path, settings=Settings(max_prefetches_queued=2, prefetch_reserve=0.0))
    assert ask(second, RESUME, session_id="second") == "pending"
    assert ask(second, RESUME, session_id="third") == "rejected"
    assert finish(second) == ("applied", WHOLE)
    assert finish(second, "second") == ("applied", WHOLE)
    second.assert_nothing_is_left()


def test_a_fault_ends_it_and_what_waits_behind_it(tmp_path: Path, log: Any) -> None:
    saved(tmp_path)
    second = halfway(tmp_path)
    sent = [plain(RESUME)]
    edits = [{"type": "prefetch"}]
    second.call("edit", session_id="here", edits=edits, prompts=sent, operation_id="behind")
    second.remote.drop("a test")
    assert (status(second), status(second, "behind")) == ("rejected", "failed")
    assert len(second.remote.own_prompts) == 0
    assert second.remote.spm.num_open == 0
    assert not second.scheduler.has_requests()


def test_prompts_of_many_sessions_that_are_known_at_once_are_no_deep_recursion(
    tmp_path: Path, log: Any
) -> None:
    second = server(tmp_path, settings=Settings(max_prefetches_queued=5_000))
    ask(second, RESUME)
    sent = [plain(prompt(9, BLOCK - 1))]
    edits = [{"type": "prefetch"}] * 3
    for k in range(300):
        second.call("edit", session_id=f"s{k}", edits=edits, prompts=sent, operation_id=f"s{k}")
    second.run()
    assert second.remote.reason == ""
    assert "hashing the prompt" not in log.text
    assert {r["status"] for k in range(300) for r in second.results(f"s{k}")} == {"missing"}
    second.assert_nothing_is_left()


# -- asking the store ------------------------------------------------------------------------------


@pytest.fixture
def look_ups(monkeypatch: pytest.MonkeyPatch) -> Callable[[PoolingEngine], list[tuple[str, int]]]:
    """Has an engine note which contexts it asks about, and whom."""

    def noted(engine: PoolingEngine) -> list[tuple[str, int]]:
        seen: list[tuple[str, int]] = []
        store, local = engine.remote.spm.store, engine.remote.spm._books.local
        for place, name in ((store, "loadable_tokens"), (local, "prefix_tokens")):
            ask_it = getattr(place, name)

            def noting(content: Any, name: str = name, ask_it: Any = ask_it) -> Any:
                seen.append((name, content.num_tokens))
                return ask_it(content)

            monkeypatch.setattr(place, name, noting)
        return seen

    return noted


def test_a_prompt_is_looked_up_once(
    tmp_path: Path, look_ups: Callable[[PoolingEngine], list[tuple[str, int]]]
) -> None:
    saved(tmp_path)
    second = server(tmp_path)
    seen = look_ups(second)
    ask(second, RESUME)
    assert finish(second) == ("applied", WHOLE)
    whole = len(RESUME) // BLOCK * BLOCK
    assert sorted(seen) == [("loadable_tokens", whole), ("prefix_tokens", whole)]
    second.assert_nothing_is_left()


def test_between_two_steps_one_long_prompt_is_looked_up(
    tmp_path: Path, look_ups: Callable[[PoolingEngine], list[tuple[str, int]]]
) -> None:
    saved(tmp_path)
    second = server(tmp_path)
    seen = look_ups(second)
    others = [prompt(2 + k, 6 * BLOCK) for k in range(4)]
    ask(second, RESUME, *others)
    per_step = [len(seen)]
    while len(second.remote.own_prompts):
        seen.clear()
        second.step()
        per_step.append(len(seen))
    assert max(per_step) == 2, "one prompt, in two places"
    assert sum(per_step) == 10
    assert finish(second) == ("applied", WHOLE)
    second.assert_nothing_is_left()


def test_prompts_of_a_block_or_so_share_a_slice(tmp_path: Path) -> None:
    second = server(tmp_path)
    assert ask(second, SHORT) == "missing"
    second.step()
    assert ask(second, prompt(8, BLOCK - 1)) == "missing"
    second.assert_nothing_is_left()


# -- how long it takes -----------------------------------------------------------------------------


def test_the_time_in_the_queue_counts_from_the_wish_and_not_from_the_hash(
    tmp_path: Path, clock: Clock
) -> None:
    saved(tmp_path)
    second = server(tmp_path)
    ask(second, RESUME)
    for _ in range(STEPS):
        clock.advance(0.25)
        second.step()
    assert finish(second) == ("applied", WHOLE)
    assert list(second.remote.counters.queue_seconds) == [pytest.approx(STEPS * 0.25)]
    second.assert_nothing_is_left()


def test_the_time_in_the_queue_counts_what_the_session_has_asked_for_before(
    tmp_path: Path, clock: Clock
) -> None:
    saved(tmp_path)
    second = server(tmp_path)
    second.faults.is_silent = True
    ask(second, RESUME)
    sent, edits = [plain(RESUME)], [{"type": "prefetch"}]
    second.call("edit", session_id="here", edits=edits, prompts=sent, operation_id="behind")
    second.steps(STEPS + 2)
    clock.advance(9.0)
    second.faults.is_silent = False
    assert finish(second) == ("applied", WHOLE)
    assert finish(second, "behind") == ("applied", WHOLE)
    assert list(second.remote.counters.queue_seconds) == [pytest.approx(0.0), pytest.approx(9.0)]
    second.assert_nothing_is_left()


def test_patience_begins_with_the_prefetch_and_covers_the_time_of_hashing(
    tmp_path: Path, clock: Clock
) -> None:
    saved(tmp_path)
    second = server(tmp_path, settings=Settings(prefetch_reserve=0.9))
    ask(second, RESUME)
    clock.advance(29.0)
    second.steps(STEPS)
    assert (status(second), second.remote.loads.num_waiting) == ("pending", 1)
    clock.advance(2.0)
    second.step()
    assert status(second) == "rejected"
    second.assert_nothing_is_left()
