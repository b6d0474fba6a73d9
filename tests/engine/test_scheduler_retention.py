"""What hints do to real requests in vLLM's real scheduler, one behaviour at a time."""

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.invariants import check_invariants
from tests.engine.rig import (
    BLOCK,
    KINDS,
    SAMPLED_TOKEN,
    Clock,
    Engine,
    hinted,
    make_request,
    make_scheduler,
    prompt,
)
from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.settings import GiveWay, Placement, Settings
from vllm_agent_hint.stamp import STAMP_KEY, Stamp

CONTEXT = prompt(1, 20 * BLOCK)
RESUMED = CONTEXT + prompt(2, BLOCK)


def make_engine(*, plugged: bool = True, depth: int = 1, **options: object) -> Engine:
    return Engine(make_scheduler(plugged=plugged, asynchronous=depth > 1, **options), depth=depth)


def flood(engine: Engine, num_prompts: int = 10, num_tokens: int = 200) -> None:
    """Strangers that need more blocks than there are, one after another."""
    for k in range(num_prompts):
        engine.serve(prompt(100 + k, num_tokens))


# -- leases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hinted_context_survives_a_flood_that_would_evict_it(kind: str, depth: int) -> None:
    hits = {}
    for plugged in (False, True):
        engine = make_engine(plugged=plugged, kind=kind, depth=depth)
        engine.serve(CONTEXT, hint=hinted("agent", 300.0))
        flood(engine)
        hits[plugged] = engine.serve(RESUMED, hint=hinted("agent"))
    assert hits == {False: 0, True: len(CONTEXT)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_lease_ends_when_its_ttl_has_passed(kind: str, clock: Clock) -> None:
    engine = make_engine(kind=kind)
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    assert engine.pool.num_blocks_in[Zone.TTL] >= 20
    clock.advance(301.0)
    flood(engine)
    assert engine.serve(RESUMED) == 0
    assert engine.scheduler.agent_hint.statistics()["expired"] == 1


def test_a_lease_holds_until_its_ttl_has_passed(clock: Clock) -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    clock.advance(299.0)
    flood(engine)
    assert engine.serve(RESUMED) == len(CONTEXT)


def test_a_lease_that_is_due_gives_way_to_an_allocation_within_the_same_second(
    clock: Clock,
) -> None:
    """The wheel is looked at once a second; an allocation that is short looks closer."""
    engine = make_engine(num_blocks=25)
    engine.serve(CONTEXT, hint=hinted("agent", 300.5))
    engine.serve(prompt(3, BLOCK))
    clock.advance(300.6)
    engine.serve(prompt(4, 10 * BLOCK))
    stats = engine.scheduler.agent_hint.statistics()
    assert stats["expired"] == 1
    assert stats["pressure_overrides"] == {}


def test_a_ttl_of_zero_keeps_the_association_only() -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 0.0))
    assert sorted(engine.zone_ids(Zone.SESSION)) == sorted(engine.cached_ids(CONTEXT))
    assert engine.zone_ids(Zone.TTL) == []


def test_a_ttl_of_zero_ends_a_lease_at_once() -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    engine.serve(RESUMED, hint=hinted("agent", 0.0))
    assert engine.pool.num_blocks_in[Zone.TTL] == 0
    assert engine.pool.num_blocks_in[Zone.SESSION] == len(RESUMED) // BLOCK


def test_a_later_turn_without_cache_control_renews_the_lease(clock: Clock) -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    clock.advance(200.0)
    engine.serve(RESUMED, hint=hinted("agent"))
    clock.advance(200.0)
    flood(engine)
    assert engine.serve(RESUMED) == len(RESUMED) - BLOCK


def test_with_renewal_off_a_later_turn_without_cache_control_keeps_the_deadline(
    clock: Clock,
) -> None:
    engine = make_engine(settings=Settings(renew=False))
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    clock.advance(200.0)
    engine.serve(RESUMED, hint=hinted("agent"))
    assert engine.pool.num_blocks_in[Zone.TTL] == len(RESUMED) // BLOCK
    clock.advance(102.0)
    engine.step()
    assert engine.pool.num_retained_blocks == 0


def test_a_shorter_ttl_of_a_later_turn_counts(clock: Clock) -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    engine.serve(CONTEXT, hint=hinted("agent", 5.0))
    clock.advance(7.0)
    engine.step()
    assert engine.pool.num_retained_blocks == 0


def test_a_lease_does_not_end_while_a_request_of_the_session_runs(clock: Clock) -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 5.0))
    request_id = engine.add(RESUMED, hint=hinted("agent"), max_tokens=30)
    engine.step()
    clock.advance(100.0)
    engine.step()
    assert engine.pool.num_blocks_in[Zone.TTL] == 20
    engine.run()
    assert request_id not in engine.scheduler.requests
    clock.advance(4.0)
    engine.step()
    assert engine.pool.num_blocks_in[Zone.TTL] >= 21


def test_expiry_of_one_session_keeps_the_later_deadline_of_another(clock: Clock) -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("long", 300.0))
    engine.serve(CONTEXT, hint=hinted("short", 5.0))
    clock.advance(7.0)
    engine.step()
    flood(engine)
    assert engine.serve(RESUMED) == len(CONTEXT)


def test_a_session_that_moves_on_leaves_no_deadline_on_what_it_shared(clock: Clock) -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("moves on", 300.0))
    engine.serve(CONTEXT, hint=hinted("stays"))
    clock.advance(1.0)
    moved_on = CONTEXT[:BLOCK] + prompt(7, 64)
    for tokens in (moved_on, moved_on):
        engine.serve(tokens, hint=hinted("moves on", 300.0))
    assert engine.pool.num_blocks_in[Zone.SESSION] == len(CONTEXT) // BLOCK - 1
    assert engine.pool.num_blocks_in[Zone.TTL] == len(moved_on) // BLOCK
    check_invariants(engine.scheduler)


def test_a_protection_without_a_session_ends_with_its_lease(clock: Clock) -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted(None, 60.0))
    flood(engine)
    assert engine.serve(RESUMED) == len(CONTEXT)
    clock.advance(62.0)
    engine.step()
    assert engine.sam.sessions == {}
    assert engine.pool.num_retained_blocks == 0


@pytest.mark.parametrize("placement", Placement)
def test_expired_blocks_enter_the_end_of_the_line_that_the_settings_name(
    placement: Placement, clock: Clock
) -> None:
    engine = make_engine(settings=Settings(expired_enters=placement))
    engine.serve(CONTEXT, hint=hinted("agent", 60.0))
    ids = engine.cached_ids(CONTEXT)
    clock.advance(62.0)
    engine.step()
    line = engine.zone_ids(Zone.ORDINARY)
    expired = line[:20] if placement is Placement.FRONT else line[-20:]
    assert expired == ids[::-1], "tail first"


# -- edits -------------------------------------------------------------------------------------


def test_an_evicted_context_is_the_next_to_be_reused_tail_first() -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    context = engine.cached_ids(CONTEXT)
    [result] = engine.edit("agent", "evict")
    assert (result["status"], result["blocks"], result["tokens"]) == ("applied", 20, 320)
    blocks = engine.pool.get_new_blocks(20)
    assert [b.block_id for b in blocks] == context[::-1]


def test_an_evicted_context_still_matches_until_it_is_reused() -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    engine.edit("agent", "evict")
    assert engine.serve(RESUMED) == len(CONTEXT)


def test_an_evict_spares_what_a_stranger_was_served_from() -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    stranger = CONTEXT[: 5 * BLOCK] + prompt(3, 20)
    engine.serve(stranger)
    [result] = engine.edit("agent", "evict")
    assert result["reason"] == "", "nothing is said of strangers"
    flood(engine)
    assert engine.serve(stranger) == 5 * BLOCK
    assert engine.serve(RESUMED) == 5 * BLOCK


def test_an_evict_spares_the_window_of_a_stranger_that_ran_beside_the_session() -> None:
    """The session's request had freed the window block already when the stranger hit it."""
    engine = make_engine(kind="window", num_blocks=32)
    engine.add(prompt(1, 64), hint=hinted("agent", 300.0))
    stranger = [*prompt(1, 48), 5]
    engine.add(stranger)
    engine.run()
    engine.edit("agent", "evict")
    engine.serve(prompt(9, BLOCK))
    assert engine.serve(stranger) == 48


def test_an_evict_does_not_touch_the_lease_of_another_session() -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("other", 300.0))
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    engine.edit("agent", "evict")
    flood(engine)
    assert engine.serve(RESUMED) == len(CONTEXT)


def test_an_evict_does_not_touch_the_blocks_of_a_running_request() -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    engine.add(RESUMED, hint=hinted("agent"), max_tokens=20)
    engine.step()
    running = engine.scheduler.running[0]
    before = engine.scheduler.kv_cache_manager.get_block_ids(running.request_id)
    assert engine.edit("agent", "evict")[0]["status"] == "applied"
    assert engine.scheduler.kv_cache_manager.get_block_ids(running.request_id) == before
    assert not set(before[0]) & set(engine.free_ids())
    engine.run()
    check_invariants(engine.scheduler)


def test_edits_of_an_unknown_session_say_that_nothing_is_there() -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    assert [r["status"] for r in engine.edit("nobody", "evict")] == ["missing"]
    assert [r["status"] for r in engine.edit("agent", "evict", cache_salt="s")] == ["missing"]


def test_offload_and_prefetch_are_unsupported_and_change_nothing() -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    before = engine.free_ids()
    results = engine.edit("agent", "offload", "prefetch")
    assert [r["status"] for r in results] == ["unsupported", "unsupported"]
    assert engine.free_ids() == before


def test_the_edits_of_a_request_run_after_it_has_succeeded() -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0, "evict"))
    assert engine.pool.num_retained_blocks == 0
    assert engine.free_ids()[:20] == engine.cached_ids(CONTEXT)[::-1]
    assert engine.scheduler.agent_hint.statistics()["edits"] == [["evict", "applied", 1]]


def test_the_edits_of_an_aborted_request_are_rejected() -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    request_id = engine.add(RESUMED, hint=hinted("agent", None, "evict"), max_tokens=20)
    engine.step()
    engine.abort(request_id)
    assert engine.pool.num_blocks_in[Zone.TTL] >= 20
    assert engine.scheduler.agent_hint.statistics()["edits"] == [["evict", "rejected", 1]]


@pytest.mark.parametrize("is_complete", [True, False], ids=["stop string", "client left"])
def test_a_request_that_the_front_end_ends_is_complete_if_it_is_named_twice(
    is_complete: bool,
) -> None:
    engine = make_engine()
    request_id = engine.add(CONTEXT, hint=hinted("agent", 300.0, "evict"), max_tokens=50)
    engine.step()
    ids = [request_id] * (2 if is_complete else 1)
    engine.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
    engine.run()
    status = "applied" if is_complete else "rejected"
    assert engine.scheduler.agent_hint.statistics()["edits"] == [["evict", status, 1]]


def test_an_aborted_request_ends_no_part_of_the_recorded_context() -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    request_id = engine.add(prompt(8, 200), hint=hinted("agent"), max_tokens=20)
    engine.step()
    engine.abort(request_id)
    flood(engine)
    assert engine.serve(RESUMED) == len(CONTEXT)


def test_siblings_run_their_edits_once_after_the_last() -> None:
    engine = make_engine()
    stamp = Stamp(hinted("agent", 300.0, "evict"), "", "op", 3)
    for tokens in (2, 5, 9):
        engine.add(CONTEXT, extra_args={STAMP_KEY: stamp.sealed()}, max_tokens=tokens)
    edits = []
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        edits.append((len(engine.scheduler.requests), *engine.sam.counters.edits.values()))
    assert (1,) in edits, "two have ended and the edit has not run"
    assert edits[-1] == (0, 1)
    assert not any(len(entry) > 1 for entry in edits[:-1])


def test_siblings_wait_with_their_edits_for_one_that_has_not_come_yet() -> None:
    engine = make_engine()
    stamp = Stamp(hinted("agent", 300.0, "evict"), "", "op", 2)
    engine.serve(CONTEXT, extra_args={STAMP_KEY: stamp.sealed()})
    assert engine.scheduler.agent_hint.statistics()["edits"] == []
    engine.serve(CONTEXT, extra_args={STAMP_KEY: stamp.sealed()})
    assert engine.scheduler.agent_hint.statistics()["edits"] == [["evict", "applied", 1]]


def test_several_prompts_of_one_request_that_run_one_by_one_release_nothing() -> None:
    engine = make_engine(max_num_seqs=1)
    stamp = Stamp(hinted("agent", 300.0), "", "op", 2)
    prompts = [[*CONTEXT, *prompt(family, 16)] for family in (31, 32)]
    for tokens in prompts:
        engine.add(tokens, extra_args={STAMP_KEY: stamp.sealed()})
    engine.run()
    for tokens in prompts:
        blocks = engine.cached_ids(tokens)
        assert blocks
        assert all(engine.pool.blocks[i]._session_ref_cnt for i in blocks)


def test_siblings_reject_their_edits_if_one_of_them_was_aborted() -> None:
    engine = make_engine()
    stamp = Stamp(hinted("agent", 300.0, "evict"), "", "op", 2)
    first, _ = (engine.add(CONTEXT, extra_args={STAMP_KEY: stamp.sealed()}) for _ in range(2))
    engine.abort(first)
    engine.run()
    assert engine.scheduler.agent_hint.statistics()["edits"] == [["evict", "rejected", 1]]


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_request_that_never_ran_claims_nothing_of_what_others_computed(
    kind: str,
) -> None:
    engine = make_engine(kind=kind)
    engine.serve(CONTEXT)
    engine.abort(engine.add(CONTEXT, hint=hinted("agent", 300.0)))
    assert engine.pool.num_retained_blocks == 0


# -- preemption, reset -------------------------------------------------------------------------


def preempt_one(engine: Engine) -> str:
    """Run two requests in a pool that holds one and a half; returns the one that lost."""
    for family in (1, 2):
        engine.add(prompt(family, 96), hint=hinted(f"agent {family}", 300.0), max_tokens=80)
    for _ in range(200):
        engine.step()
        lost = [r.request_id for r in engine.scheduler.waiting if r.num_preemptions]
        if lost:
            return lost[0]
    raise AssertionError("nothing was preempted")


def test_a_preempted_request_holds_what_it_had_computed_until_it_ends() -> None:
    engine = make_engine(num_blocks=18)
    request_id = preempt_one(engine)
    request = engine.scheduler.requests[request_id]
    live = engine.scheduler.agent_hint.tracked[request_id].live
    assert live.held is not None
    held = [b for b in live.held.chains[0].block_ids if b >= 0]
    assert len(held) >= len(request.block_hashes) - 2
    assert all(engine.pool.blocks[b].zone is Zone.TTL for b in held)
    engine.run()
    assert live.held is None or not any(live.held.chains[0].block_ids)
    check_invariants(engine.scheduler)


def test_a_preempted_request_finds_more_of_its_blocks_again_than_in_stock_vllm() -> None:
    """A newcomer takes blocks while the preempted one waits: strangers' blocks, if there are."""
    engine = make_engine(num_blocks=18)
    request_id = preempt_one(engine)
    live = engine.scheduler.agent_hint.tracked[request_id].live
    held = {b for b in live.held.chains[0].block_ids if b >= 0}
    line = engine.free_ids()
    first_held = min(line.index(b) for b in held if b in line)
    assert all(b in held for b in line[first_held:]), "everything else goes first"


def test_a_preempted_request_is_protected_when_its_session_has_moved_on(clock: Clock) -> None:
    engine = make_engine(num_blocks=18)
    request_id = preempt_one(engine)
    live = engine.scheduler.agent_hint.tracked[request_id].live
    clock.advance(1000.0)
    engine.scheduler.agent_hint.tick(clock.now)
    held = [b for b in live.held.chains[0].block_ids if b >= 0]
    assert held
    assert all(engine.pool.blocks[b].zone is Zone.TTL for b in held)


def test_a_reset_that_fails_changes_nothing() -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    engine.add(prompt(3, 20))
    engine.step()
    before = [(b._session_ref_cnt, b._ttl_expire_at) for b in engine.pool.blocks]
    line = engine.free_ids()
    assert engine.scheduler.reset_prefix_cache() is False
    assert [(b._session_ref_cnt, b._ttl_expire_at) for b in engine.pool.blocks] == before
    assert engine.free_ids() == line
    assert engine.sam.ledger.index.num_records == 20


def test_a_reset_that_succeeds_leaves_the_sessions_and_nothing_else() -> None:
    engine = make_engine()
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    line = engine.free_ids()
    assert engine.scheduler.reset_prefix_cache() is True
    assert engine.pool.num_retained_blocks == 0
    assert engine.zone_ids(Zone.ORDINARY) == line
    assert engine.sam.ledger.index.num_records == 0
    assert engine.session("agent").lineage.leases == []
    engine.serve(CONTEXT, hint=hinted("agent"))
    assert engine.pool.num_blocks_in[Zone.TTL] == 20, "the session still knows its TTL"


def test_a_reset_with_running_requests_keeps_them_tracked() -> None:
    engine = make_engine()
    engine.add(CONTEXT, hint=hinted("agent", 300.0), max_tokens=5)
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert engine.pool.num_retained_blocks == 0
    engine.run()
    assert engine.pool.num_blocks_in[Zone.TTL] == 20
    check_invariants(engine.scheduler)


# -- hybrid models -----------------------------------------------------------------------------


def test_the_states_at_the_ends_of_prompt_and_context_are_protected() -> None:
    engine = make_engine(kind="state")
    engine.serve(CONTEXT, hint=hinted("agent", 300.0), max_tokens=2 * BLOCK + 1)
    states = engine.session("agent").lineage.chains[1]
    ends = {(i + 1) * BLOCK for i in states.logical}
    assert len(CONTEXT) in ends
    assert len(CONTEXT) + 2 * BLOCK in ends
    assert all(engine.pool.blocks[b].zone is Zone.TTL for b in states.block_ids)


def test_the_window_before_the_end_of_the_prompt_is_protected() -> None:
    engine = make_engine(kind="window")
    engine.serve(CONTEXT, hint=hinted("agent", 300.0), max_tokens=6 * BLOCK)
    windows = engine.session("agent").lineage.chains[1]
    last = len(CONTEXT) // BLOCK - 1
    assert {last - 1, last} <= set(windows.logical), "two blocks: the window is 32 tokens"
    assert all(engine.pool.blocks[b].zone is Zone.TTL for b in windows.block_ids)


@pytest.mark.parametrize("kind", ["window", "state", "all"])
def test_a_turn_is_resumed_from_its_end_and_from_the_end_of_its_prompt(kind: str) -> None:
    generated = 5 * BLOCK
    for tail, hit in (
        ([SAMPLED_TOKEN] * generated, len(CONTEXT) + generated - BLOCK),
        ([], len(CONTEXT)),
    ):
        engine = make_engine(kind=kind, num_blocks=96)
        engine.serve(CONTEXT, hint=hinted("agent", 300.0), max_tokens=generated)
        flood(engine, 12)
        found = engine.serve(CONTEXT + tail + prompt(2, BLOCK), hint=hinted("agent"))
        assert found >= hit, "the answer was kept" if tail else "the reasoning was stripped"


def test_a_hinted_hybrid_request_frees_a_state_after_the_blocks_that_it_makes_usable() -> None:
    engine = make_engine(kind="state", num_blocks=64)
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    line = engine.zone_ids(Zone.TTL)
    attention = engine.session("agent").lineage.chains[0].block_ids
    states = engine.session("agent").lineage.chains[1]
    assert set(line) >= {*attention, *states.block_ids}
    assert [b for b in line if b in attention] == attention[::-1]
    ends = [(i + 1) for i in states.logical]
    assert ends == sorted(ends)
    for k, state in enumerate(states.block_ids):
        behind = attention[ends[k - 1] if k else 0 : ends[k]]
        held = [b for b in behind if b in line]
        assert all(line.index(b) < line.index(state) for b in held)


def test_an_unhinted_hybrid_request_is_freed_as_stock_does() -> None:
    lines = []
    for plugged in (False, True):
        engine = make_engine(plugged=plugged, kind="all")
        engine.serve(CONTEXT)
        lines.append(engine.free_ids())
    assert lines[0] == lines[1]


# -- bounds and pressure -----------------------------------------------------------------------


def test_of_two_copies_the_one_that_a_prefix_match_returns_is_protected() -> None:
    """Two requests compute the last block of one prompt: the hit stops before it."""
    engine = make_engine()
    engine.serve(CONTEXT)
    served = engine.cached_ids(CONTEXT)
    request_id = engine.add(CONTEXT, hint=hinted("agent", 300.0), max_tokens=2)
    for _ in range(2):
        engine.step()
    engine.run()
    assert request_id not in engine.scheduler.requests
    copies = engine.pool.cached_block_hash_to_block._cache[
        engine.pool.blocks[served[-1]].block_hash
    ]
    assert len(copies) == 2, "the last block is there twice"
    assert engine.session("agent").lineage.chains[0].block_ids == served
    assert sorted(engine.zone_ids(Zone.TTL)) == sorted(served)


def test_a_protection_beyond_the_share_is_clipped_from_its_tail_and_the_request_runs() -> None:
    engine = make_engine(num_blocks=41, settings=Settings(protected_share=0.25))
    engine.serve(CONTEXT, hint=hinted("agent", 300.0))
    assert sorted(engine.zone_ids(Zone.TTL)) == sorted(engine.cached_ids(CONTEXT)[:10])
    assert engine.scheduler.agent_hint.statistics()["clipped"] == {"protected_share": 10}
    flood(engine)
    assert engine.serve(RESUMED) == 10 * BLOCK


def test_the_lease_that_is_due_soonest_gives_way_to_a_newcomer() -> None:
    settings = Settings(protected_share=0.5, give_way=GiveWay.DEADLINE)
    engine = make_engine(num_blocks=41, settings=settings)
    engine.serve(prompt(1, 160), hint=hinted("soon", 10.0))
    engine.serve(prompt(2, 160), hint=hinted("late", 300.0))
    engine.serve(prompt(3, 80), hint=hinted("new", 300.0))
    held = {s: len(engine.session(s).lineage.chains[0]) for s in ("soon", "late", "new")}
    assert held == {"soon": 5, "late": 10, "new": 5}


def test_the_share_holds_when_what_gives_way_is_shared_with_the_newcomer() -> None:
    engine = make_engine(num_blocks=21, settings=Settings(protected_share=0.2))
    engine.serve(prompt(1, 64), hint=hinted("soon", 5.0))
    engine.serve(prompt(1, 80), hint=hinted("new", 50.0))
    assert engine.pool.num_retained_blocks <= 4
    check_invariants(engine.scheduler)


def test_an_allocation_succeeds_when_everything_is_protected() -> None:
    engine = make_engine(num_blocks=21, settings=Settings(protected_share=1.0))
    engine.serve(prompt(1, 318), hint=hinted("agent", 300.0))
    assert engine.pool.num_blocks_in[Zone.TTL] == 19
    assert engine.serve(prompt(2, 160)) == 0
    overrides = engine.scheduler.agent_hint.statistics()["pressure_overrides"]
    assert overrides == {"ttl": 10}
    check_invariants(engine.scheduler)


def test_under_pressure_the_tail_of_a_context_goes_first() -> None:
    engine = make_engine(num_blocks=21, settings=Settings(protected_share=1.0))
    engine.serve(prompt(1, 318), hint=hinted("agent", 300.0))
    engine.serve(prompt(2, 160))
    found = engine.cached_ids(prompt(1, 318))
    assert [block is not None for block in found] == [True] * 9 + [False] * 10


def test_associated_blocks_go_before_protected_ones() -> None:
    engine = make_engine(num_blocks=41, settings=Settings(protected_share=1.0))
    engine.serve(prompt(1, 160), hint=hinted("protected", 300.0))
    engine.serve(prompt(2, 320), hint=hinted("associated", 0.0))
    engine.serve(prompt(3, 20 * BLOCK - 4))
    overrides = engine.scheduler.agent_hint.statistics()["pressure_overrides"]
    assert set(overrides) == {"session"}
    assert None not in engine.cached_ids(prompt(1, 160))


def test_no_session_is_made_when_all_of_them_are_alive_and_the_request_runs() -> None:
    engine = make_engine(settings=Settings(max_sessions=1))
    engine.add(prompt(1, 40), hint=hinted("first", 300.0), max_tokens=5)
    engine.add(prompt(2, 40), hint=hinted("second", 300.0), max_tokens=5)
    engine.run()
    assert [key.session_id for key in engine.sam.sessions] == ["first"]
    assert engine.scheduler.agent_hint.statistics()["clipped"] == {"max_sessions": 1}


def test_equal_ids_under_other_salts_are_other_sessions() -> None:
    engine = make_engine()
    engine.serve(prompt(1, 64), hint=hinted("agent", 300.0))
    engine.serve(prompt(1, 64), hint=hinted("agent", 300.0), cache_salt="theirs")
    assert engine.edit("agent", "evict")[0]["blocks"] == 4
    assert len(engine.session("agent", cache_salt="theirs").lineage) == 4


def test_pools_in_one_process_do_not_know_of_each_other() -> None:
    first, second = make_engine(num_blocks=40), make_engine(num_blocks=30, kind="window")
    stock = make_engine(num_blocks=40, plugged=False)
    first.serve(CONTEXT, hint=hinted("agent", 300.0))
    assert second.pool.num_retained_blocks == 0
    second.serve(prompt(5, 64), hint=hinted("agent", 300.0))
    assert second.edit("agent", "evict")[0]["status"] == "applied"
    assert first.pool.num_blocks_in[Zone.TTL] == 20
    assert type(stock.pool).__name__ == "BlockPool"
    for engine in (first, second):
        check_invariants(engine.scheduler)


# -- what is not a hint ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hint",
    [
        {},
        {"session_id": 5},
        {"session_id": "agent", "unknown": 1},
        {"cache_control": {"ttl": float("nan")}},
        "not json",
        17,
    ],
)
def test_a_hint_that_no_front_end_would_let_through_is_ignored(hint: object) -> None:
    engine = make_engine()
    request = make_request("r", prompt(1, 40), extra_args={"agent_hint": hint})
    engine.scheduler.add_request(request)
    engine.run()
    assert engine.pool.num_retained_blocks == 0
    assert engine.sam.sessions == {}


def test_a_hint_may_be_a_json_string() -> None:
    engine = make_engine()
    hint = '{"session_id": "agent", "cache_control": {"ttl": 60}}'
    engine.serve(prompt(1, 64), extra_args={"agent_hint": hint})
    assert len(engine.session("agent").lineage) == 4


def test_with_prefix_caching_off_hints_have_no_effect_and_the_reason_is_said() -> None:
    engine = make_engine(enable_caching=False)
    assert engine.serve(CONTEXT, hint=hinted("agent", 300.0)) == 0
    assert engine.scheduler.agent_hint.sam is None
    assert engine.scheduler.agent_hint.reason == "prefix caching is off"
