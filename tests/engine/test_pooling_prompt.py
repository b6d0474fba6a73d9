"""A prefetch with the prompt of its own request, on vLLM's real scheduler over one directory.

Two engines stand for two servers: what one has saved the other has never seen.
"""

import math
from pathlib import Path
from typing import Any

import pytest

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
from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.pooling.tracker import Origin
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.settings import Settings

pytestmark = pytest.mark.usefixtures("clock")

KEY = SessionKey("", None, "here")


def prefetch(
    engine: PoolingEngine, *prompts: dict[str, Any], session_id: str = "here", **more: Any
) -> dict[str, Any]:
    """Run a prefetch to its end. Returns its result."""
    engine.call(
        "edit", session_id=session_id, edits=[{"type": "prefetch"}], prompts=list(prompts), **more
    )
    engine.run()
    (result,) = engine.results()
    return result


def outcome(result: dict[str, Any]) -> tuple[str, int]:
    return result["status"], result["tokens"]


# -- hashes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "marks",
    [
        {},
        {"cache_salt": "pepper"},
        {"lora": ADAPTER},
        {"items": [("image", 5, 40)]},
        {"cache_salt": "pepper", "lora": ADAPTER, "items": [("image", 5, 40), ("other", 50, 8)]},
    ],
    ids=lambda marks: "-".join(marks) or "plain",
)
def test_a_prompt_has_the_hashes_that_a_request_of_it_would_have(marks: dict[str, Any]) -> None:
    engine = pooling_engine()
    request = request_of(CONTEXT, **marks)

    content = hashed(engine, plain(CONTEXT, **marks), needs_tokens=True)

    assert list(content.hashes) == list(request.block_hashes)
    assert len(content.hashes) == 20
    assert (content.cache_salt, content.lora_request) == (request.cache_salt, request.lora_request)
    assert list(content.token_ids or ()) == CONTEXT[:WHOLE]


# -- a session that has never run here -------------------------------------------------------------


def test_what_another_server_has_saved_for_another_session_comes_and_no_model_runs(
    tmp_path: Path,
) -> None:
    saved(tmp_path)
    second = server(tmp_path)

    fetched = prefetch(second, plain(RESUME))

    # The rest of the prompt is new: nobody has lost it.
    assert outcome(fetched) == ("applied", WHOLE), fetched
    assert second.ran == []
    assert second.pool.num_blocks_in[Zone.SESSION] == 20
    loads = second.remote.counters.loaded_tokens
    assert loads == WHOLE
    assert second.serve(RESUME, hint=hinted("here")) == WHOLE
    assert second.remote.counters.loaded_tokens == loads, "it was there already"
    second.assert_nothing_is_left()


def test_blocks_are_read_as_the_other_server_has_written_them(tmp_path: Path) -> None:
    saved(tmp_path)
    second = server(tmp_path)
    prefetch(second, plain(RESUME))
    # The stand-in for the model compares each token that it reads.
    assert second.serve(RESUME, hint=hinted("here"), max_tokens=4) == WHOLE
    second.assert_nothing_is_left()


@pytest.mark.parametrize(
    "other",
    [
        plain(RESUME, cache_salt="pepper"),
        plain(RESUME, lora=ADAPTER),
        plain(RESUME, items=[("image", 5, 40)]),
        plain(prompt(9, WHOLE)),
    ],
    ids=["salt", "adapter", "image", "tokens"],
)
def test_what_differs_in_salt_adapter_image_or_text_is_missing_and_leaves_nothing(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    saved(tmp_path)
    second = server(tmp_path)

    fetched = prefetch(second, other)

    assert outcome(fetched) == ("missing", 0)
    assert "this prompt" in fetched["reason"]
    assert second.remote.counters.loaded_tokens == 0
    assert len(second.remote.spm.tracker) == 0
    assert not second.sam.sessions
    second.assert_nothing_is_left()


def test_an_adapters_context_is_found_by_a_prompt_for_the_same_adapter(tmp_path: Path) -> None:
    first = server(tmp_path)
    content = hashed(first, plain(CONTEXT, lora=ADAPTER))
    first.serve(CONTEXT, hint=hinted("there"))
    # What the rig's requests can't carry: the same blocks under the adapter's hashes.
    store = first.remote.spm.store
    blocks = [[block or 0 for block in first.cached_ids(CONTEXT)]]
    store.start_save("by-hand", content, blocks)
    first.steps(4)
    second = server(tmp_path)

    fetched = prefetch(second, plain(RESUME, lora=ADAPTER))

    assert outcome(fetched) == ("applied", WHOLE), fetched
    assert second.cached_ids(CONTEXT) == [None] * 20, "nothing without the adapter"
    second.assert_nothing_is_left()


def test_several_prompts_come_each_as_far_as_there_is_something(tmp_path: Path) -> None:
    first = saved(tmp_path)
    other = prompt(2, 10 * BLOCK + 1)
    first.serve(other, hint=hinted("another"))
    first.done("another", "offload")
    second = server(tmp_path)

    fetched = prefetch(second, plain(RESUME), plain(other), plain(prompt(9, WHOLE)))

    assert outcome(fetched) == ("applied", WHOLE + 10 * BLOCK), fetched
    assert second.serve(RESUME, hint=hinted("here")) == WHOLE
    assert second.serve(other, hint=hinted("here")) == 10 * BLOCK
    second.assert_nothing_is_left()


def test_the_ttl_is_what_the_sessions_manifest_has_left_of_it(tmp_path: Path, clock: Clock) -> None:
    saved(tmp_path, session_id="here", ttl=600.0)
    second = server(tmp_path)

    prefetch(second, plain(RESUME))

    assert second.pool.num_blocks_in[Zone.TTL] == 20
    clock.advance(603.0)
    second.steps(2)
    assert second.pool.num_blocks_in[Zone.TTL] == 0
    second.assert_nothing_is_left()


def test_the_own_prompt_goes_before_the_manifest(tmp_path: Path) -> None:
    first = saved(tmp_path, session_id="here", ttl=600.0)
    other = prompt(2, 10 * BLOCK + 1)
    first.serve(other, hint=hinted("another"))
    first.done("another", "offload")
    second = server(tmp_path)

    assert outcome(prefetch(second, plain(other))) == ("applied", 10 * BLOCK)
    assert second.cached_ids(CONTEXT) == [None] * 20
    assert prefetch(second, plain(prompt(9, WHOLE)))["status"] == "missing"
    second.assert_nothing_is_left()


@pytest.mark.parametrize("prompts", [(), (plain(CONTEXT[: BLOCK - 1]),)], ids=["none", "short"])
def test_without_a_prompt_of_a_block_the_manifest_is_asked(
    tmp_path: Path, prompts: tuple[dict[str, Any], ...]
) -> None:
    saved(tmp_path, session_id="here", ttl=600.0)
    second = server(tmp_path)

    assert outcome(prefetch(second, *prompts)) == ("applied", WHOLE)
    assert second.remote.spm.tracker.get(KEY).origin is Origin.MANIFEST
    second.assert_nothing_is_left()


# -- what is known of a session --------------------------------------------------------------------


def test_a_session_that_has_run_here_comes_as_it_was_recorded(tmp_path: Path) -> None:
    saved(tmp_path)
    second = server(tmp_path)
    own = prompt(2, 10 * BLOCK + 1)
    second.serve(own, hint=hinted("here", 600.0))
    second.done("here", "offload")
    second.flood()
    assert second.cached_ids(own) == [None] * 10

    assert outcome(prefetch(second, plain(RESUME))) == ("applied", 10 * BLOCK)

    assert second.cached_ids(own) != [None] * 10
    assert second.cached_ids(CONTEXT) == [None] * 20
    second.assert_nothing_is_left()


def test_the_next_prompt_of_a_session_that_never_ran_takes_the_place_of_the_last(
    tmp_path: Path,
) -> None:
    first = saved(tmp_path)
    other = prompt(2, 10 * BLOCK + 1)
    first.serve(other, hint=hinted("another"))
    first.done("another", "offload")
    second = server(tmp_path, num_blocks=80)

    assert outcome(prefetch(second, plain(RESUME))) == ("applied", WHOLE)
    assert outcome(prefetch(second, plain(other))) == ("applied", 10 * BLOCK)

    found = second.remote.spm.tracker.get(KEY)
    assert found.origin is Origin.PROMPT
    assert [content.num_tokens for content in found.contents] == [10 * BLOCK]
    second.assert_nothing_is_left()


def test_a_manifest_is_read_again_while_the_session_has_not_run_here(tmp_path: Path) -> None:
    first = saved(tmp_path, session_id="here", ttl=600.0)
    second = server(tmp_path, num_blocks=80)
    assert outcome(prefetch(second)) == ("applied", WHOLE)
    first.serve([*CONTEXT, *[7] * 5, *prompt(6, 2 * BLOCK)], hint=hinted("here", 600.0))
    first.done("here", "offload")
    first.remote.spm.store.manifest.finish()

    status, tokens = outcome(prefetch(second))

    assert status == "applied"
    assert tokens > WHOLE
    second.assert_nothing_is_left()


def test_a_session_has_run_here_once_it_has(tmp_path: Path) -> None:
    saved(tmp_path)
    second = server(tmp_path)
    prefetch(second, plain(RESUME))
    second.serve(RESUME, hint=hinted("here"))
    assert second.remote.spm.tracker.get(KEY).origin is Origin.RUN
    second.assert_nothing_is_left()


def test_an_evict_leaves_in_the_store_what_may_be_another_sessions(tmp_path: Path) -> None:
    saved(tmp_path)
    second, third = server(tmp_path), server(tmp_path)
    prefetch(second, plain(RESUME))

    (evicted,) = second.done("here", "evict")

    assert evicted["status"] == "applied"
    assert "may be another session's" in evicted["reason"]
    assert second.pool.num_blocks_in[Zone.SESSION] == 0
    assert outcome(prefetch(third, plain(RESUME))) == ("applied", WHOLE)
    second.assert_nothing_is_left()


def test_what_a_range_evict_leaves_is_still_known_by_the_prompt_only(tmp_path: Path) -> None:
    saved(tmp_path)
    second = server(tmp_path, settings=Settings(ranges=True, prefetch_reserve=0.0))
    prefetch(second, plain(RESUME))

    second.done("here", {"type": "evict", "block_start": 8, "block_end": 12})

    found = second.remote.spm.tracker.get(KEY)
    assert (found.latest.num_tokens, found.origin) == (8 * BLOCK, Origin.PROMPT)
    second.assert_nothing_is_left()


def test_edits_that_go_before_are_over_before_the_prompt_is_asked_for(tmp_path: Path) -> None:
    saved(tmp_path)
    second = server(tmp_path, num_blocks=80)
    second.serve(prompt(2, 10 * BLOCK + 1), hint=hinted("here", 600.0))
    second.call(
        "edit",
        session_id="here",
        edits=[{"type": "evict"}, {"type": "prefetch"}],
        prompts=[plain(RESUME)],
    )
    second.run()

    assert [outcome(r) for r in second.results()][1] == ("applied", WHOLE)
    second.assert_nothing_is_left()


def test_edits_behind_a_request_do_not_see_the_prompts_of_a_call(tmp_path: Path) -> None:
    saved(tmp_path)
    second = server(tmp_path)
    second.call("edit", session_id="nobody", edits=[{"type": "evict"}], prompts=[plain(RESUME)])

    # Too short to leave anything that could be recorded.
    second.serve(prompt(3, BLOCK - 5), hint=hinted("here", None, "prefetch"))

    assert second.cached_ids(CONTEXT) == [None] * 20
    assert second.remote.counters.loaded_tokens == 0
    second.assert_nothing_is_left()


# -- a guest ---------------------------------------------------------------------------------------


def test_a_prompt_for_which_there_is_no_room_is_rejected_and_may_be_sent_again(
    tmp_path: Path, clock: Clock
) -> None:
    saved(tmp_path)
    second = server(tmp_path, settings=Settings(prefetch_reserve=0.9, protected_share=1.0))
    second.call("edit", session_id="here", edits=[{"type": "prefetch"}], prompts=[plain(RESUME)])
    second.steps(2)
    clock.advance(31.0)
    second.step()
    assert second.results()[0]["status"] == "rejected"
    assert outcome(prefetch_later(second, clock))[0] == "rejected"
    second.assert_nothing_is_left()


def prefetch_later(engine: PoolingEngine, clock: Clock) -> dict[str, Any]:
    engine.call("edit", session_id="here", edits=[{"type": "prefetch"}], prompts=[plain(RESUME)])
    clock.advance(31.0)
    engine.step()
    (result,) = engine.results()
    return result


def test_a_prompt_that_can_not_be_hashed_harms_nothing(tmp_path: Path, log: Any) -> None:
    saved(tmp_path, session_id="here", ttl=600.0)
    second = server(tmp_path)

    fetched = prefetch(second, {"token_ids": None, "cache_salt": None, "lora": None, "items": []})

    assert outcome(fetched) == ("applied", WHOLE), "by its manifest"
    assert "hashing the prompt" in log.text
    assert second.remote.reason == ""
    second.assert_nothing_is_left()


# -- what time it is -------------------------------------------------------------------------------


def test_an_evict_on_an_idle_engine_tells_other_servers_what_is_left_of_the_ttl(
    tmp_path: Path, clock: Clock
) -> None:
    settings = Settings(ranges=True, prefetch_reserve=0.0, protected_share=1.0)
    first = server(tmp_path, settings=settings)
    first.serve(CONTEXT, hint=hinted("here", 600.0))
    clock.advance(500.0)
    first.done("here", {"type": "evict", "block_start": 8, "block_end": 12})
    first.remote.spm.store.manifest.finish()
    assert first.remote.spm.store.manifest.read(KEY).ttl == pytest.approx(100.0, abs=5.0)
    first.assert_nothing_is_left()


def test_an_idle_engine_knows_the_time_when_a_session_ends(tmp_path: Path, clock: Clock) -> None:
    first = server(tmp_path)
    first.serve(CONTEXT, hint=hinted("here", 600.0))
    clock.advance(500.0)
    first.call("free", session_id="here", operation_id="free")
    assert first.remote.spm.now == clock.now
    first.assert_nothing_is_left()


def test_the_patience_of_a_prefetch_begins_when_those_before_it_are_over(
    tmp_path: Path, clock: Clock
) -> None:
    saved(tmp_path)
    second = server(tmp_path, settings=Settings(prefetch_reserve=0.9))
    for name in ("first", "second"):
        edits, sent = [{"type": "prefetch"}], [plain(RESUME)]
        second.call("edit", session_id="here", edits=edits, prompts=sent, operation_id=name)
    second.steps(2)
    clock.advance(31.0)
    for _ in range(2):
        second.scheduler.has_requests()
        assert second.results("first")[0]["status"] == "rejected"
        assert second.results("second")[0]["status"] == "pending"
    clock.advance(31.0)
    second.scheduler.has_requests()
    assert second.results("second")[0]["status"] == "rejected"
    second.assert_nothing_is_left()


# -- what nobody ends ------------------------------------------------------------------------------


def test_a_range_behind_all_that_a_prompt_has_leaves_nothing_registered(tmp_path: Path) -> None:
    saved(tmp_path)
    second = server(tmp_path, settings=Settings(ranges=True, prefetch_reserve=0.0))
    edits = [{"type": "prefetch", "block_start": 30, "block_end": 40}]
    second.call("edit", session_id="here", edits=edits, prompts=[plain(RESUME)])
    second.run()
    assert outcome(second.results()[0]) == ("missing", 0)
    assert second.remote.spm.tracker.num_tracked == 0
    second.assert_nothing_is_left()


@pytest.mark.parametrize("prompts", [(), (plain(RESUME),)], ids=["manifest", "own"])
def test_what_a_manifest_says_is_forgotten_when_its_time_is_over_and_nothing_has_come(
    tmp_path: Path, clock: Clock, prompts: tuple[dict[str, Any], ...]
) -> None:
    saved(tmp_path, session_id="here", ttl=600.0)
    second = server(tmp_path, settings=Settings(prefetch_reserve=0.9))
    second.call("edit", session_id="here", edits=[{"type": "prefetch"}], prompts=list(prompts))
    clock.advance(31.0)
    second.step()
    assert second.results()[0]["status"] == "rejected"
    assert second.remote.spm.tracker.num_tracked > 0, "it is kept alive for its TTL"
    for _ in range(12):
        clock.advance(61.0)
        second.scheduler.has_requests()
    assert second.remote.spm.tracker.num_tracked == 0
    assert second.remote.spm.next_keep_alive_at == math.inf
    second.assert_nothing_is_left()


def test_what_is_brought_for_a_session_for_which_there_is_no_room_is_nobodys(
    tmp_path: Path,
) -> None:
    saved(tmp_path)
    second = server(tmp_path, num_blocks=80, settings=Settings(max_sessions=1, prefetch_reserve=0))
    second.add(prompt(2, 4 * BLOCK), hint=hinted("another", 600.0), max_tokens=100)
    second.step()
    prefetch(second, plain(RESUME))
    assert second.remote.counters.loaded_tokens == WHOLE
    assert KEY not in second.sam.sessions
    assert KEY not in second.remote.spm.tracker
    second.assert_nothing_is_left()


def test_what_has_come_is_known_for_as_long_as_its_session_is_here(
    tmp_path: Path, clock: Clock
) -> None:
    saved(tmp_path, session_id="here", ttl=600.0)
    second = server(tmp_path)
    assert outcome(prefetch(second)) == ("applied", WHOLE)
    for _ in range(12):
        clock.advance(61.0)
        second.scheduler.has_requests()
        assert (KEY in second.sam.sessions) == (KEY in second.remote.spm.tracker)
    second.assert_nothing_is_left()
