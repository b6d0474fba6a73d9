"""What a hint does to its session's blocks, one behaviour each."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plain_engine import DENSE, EVICT, HYBRID, PAGE, PlainEngine
from tests.unit.plain_port import content_hash
from tests.unit.session_invariants import check_invariants, check_nothing_left
from vllm_agent_hint.hints import EditStatus, EditType
from vllm_agent_hint.sessions.intent import Edit, Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.lineage import (
    DIGEST_BYTES,
    LOST,
    GroupLayout,
    RecordedPrefix,
    compare,
    eviction_order,
)
from vllm_agent_hint.settings import GiveWay, Settings

A = SessionKey("", None, "a")
B = SessionKey("", None, "b")
C = SessionKey("", None, "c")


@pytest.fixture
def engine() -> PlainEngine:
    return PlainEngine(settings=Settings(idle_seconds=600.0))


# -- leases ----------------------------------------------------------------------------------------


def test_a_context_is_protected_from_the_end_of_its_request_for_its_ttl(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    assert engine.deadlines_of(A) == [60.0, 60.0, 60.0]
    engine.wait(59.0)
    assert engine.counts_of([1, 2, 3]) == [1, 1, 1]
    engine.wait(2.0)
    assert engine.port.num_retained_blocks == 0


def test_a_context_without_cache_control_is_held_and_not_protected(engine: PlainEngine) -> None:
    engine.turn(A, "xyz")
    assert engine.counts_of(engine.blocks_of(A)) == [1, 1, 1]
    assert engine.deadlines_of(A) == [0.0, 0.0, 0.0]


def test_a_turn_without_cache_control_renews_the_last_ttl(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    engine.wait(50.0)
    engine.turn(A, "xyzw")
    assert engine.deadlines_of(A) == [60.0] * 4


def test_where_renewal_is_off_a_turn_leaves_the_lease_as_it_was() -> None:
    engine = PlainEngine(settings=Settings(renew=False))
    engine.turn(A, "xyz", ttl=300.0)
    engine.wait(100.0)
    engine.turn(A, "xyzw")
    assert engine.deadlines_of(A) == [200.0] * 4
    engine.turn(A, "xyzwv", succeeds=False)
    assert engine.deadlines_of(A) == [200.0] * 5


def test_a_lease_that_ran_out_while_a_request_was_alive_ends_once_it_has_ended() -> None:
    engine = PlainEngine(settings=Settings(renew=False))
    engine.turn(A, "xyz", ttl=5.0)
    request = engine.arrive(SessionIntent(A))
    engine.run(request, "xyz")
    engine.wait(100.0)
    assert engine.counts_of(engine.blocks_of(A)) == [1, 1, 1]
    engine.end(request)
    engine.wait(2.0)
    assert engine.port.num_retained_blocks == 0


def test_a_later_turn_may_ask_for_less(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=300.0)
    engine.turn(A, "xyzw", ttl=5.0)
    assert engine.deadlines_of(A) == [5.0] * 4


def test_a_ttl_of_zero_drops_the_lease_and_keeps_the_association(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=300.0)
    engine.turn(A, "xyz", ttl=0.0)
    assert engine.deadlines_of(A) == [0.0, 0.0, 0.0]
    assert engine.counts_of(engine.blocks_of(A)) == [1, 1, 1]


def test_a_lease_does_not_run_while_a_request_of_its_session_is_alive(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "xyz", ttl=5.0)
    request = engine.arrive(SessionIntent(A))
    engine.wait(1000.0)
    assert engine.counts_of(engine.blocks_of(A)) == [1, 1, 1]
    engine.run(request, "xyz")
    engine.end(request)
    assert engine.deadlines_of(A) == [5.0, 5.0, 5.0]


def test_a_lease_made_after_a_long_quiet_time_runs_its_full_time(engine: PlainEngine) -> None:
    """Nothing ticks while there is no session, so the wheels are hours behind."""
    engine.wait(2 * 3600.0)
    request = engine.arrive(SessionIntent(A, protections=(Protection(300.0),)))
    engine.run(request, "xyz")
    _, prefixes = engine._recorded(request)
    engine.sam.request_finished(request.live, prefixes, engine.now, succeeded=True)
    engine.wait(299.0)
    assert engine.counts_of(engine.blocks_of(A)) == [1, 1, 1]


def test_expiry_of_one_session_keeps_the_later_deadline_of_another(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=10.0)
    engine.turn(B, "xyz", ttl=60.0)
    engine.wait(12.0)
    assert engine.counts_of(engine.blocks_of(B)) == [1, 1, 1]
    assert engine.deadlines_of(B) == [48.0, 48.0, 48.0]


def test_expiry_of_the_longer_lease_leaves_a_shared_block_to_its_other_holder(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    engine.turn(B, "xyz")
    assert engine.deadlines_of(B) == [60.0, 60.0, 60.0]
    engine.wait(62.0)
    assert engine.counts_of(engine.blocks_of(B)) == [1, 1, 1]
    assert engine.deadlines_of(B) == [0.0, 0.0, 0.0]


def test_two_protections_end_one_after_the_other(engine: PlainEngine) -> None:
    engine.turn(A, "wxyz", Protection(300.0, end_token=2 * PAGE), Protection(60.0))
    assert engine.deadlines_of(A) == [300.0, 300.0, 60.0, 60.0]
    engine.wait(61.0)
    assert engine.deadlines_of(A) == [239.0, 239.0]
    engine.wait(240.0)
    assert engine.port.num_retained_blocks == 0


def test_of_two_protections_of_the_same_range_the_longer_counts(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", Protection(300.0), Protection(60.0))
    engine.wait(61.0)
    assert engine.deadlines_of(A) == [239.0, 239.0, 239.0]


def test_protections_whose_deadlines_are_the_same_number_end_together(
    engine: PlainEngine,
) -> None:
    """Their TTLs differ by less than a clock of this size can tell."""
    engine.turn(A, "xyz", Protection(math.nextafter(5.0, 6.0), end_token=PAGE), Protection(5.0))
    engine.wait(7.0)
    assert engine.port.num_retained_blocks == 0


def test_protections_that_end_at_once_leave_no_deadline_on_a_shared_block(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "xyz", Protection(200.0, end_token=PAGE), Protection(60.0))
    engine.turn(B, "xyz")
    engine.wait(250.0)
    assert engine.deadlines_of(B) == [0.0, 0.0, 0.0]


def test_a_protection_of_a_part_leaves_no_deadline_on_a_shared_block_behind_it(
    engine: PlainEngine,
) -> None:
    engine.turn(B, "xyz")
    engine.turn(A, "xyz", Protection(60.0, end_token=PAGE))
    assert engine.deadlines_of(A) == [60.0, 0.0, 0.0]


def test_a_block_that_a_protection_ends_inside_stays_with_it_in_every_group() -> None:
    engine = PlainEngine(HYBRID)
    engine.turn(A, "xyz", Protection(300.0, end_token=PAGE + 1), Protection(60.0))
    engine.wait(61.0)
    assert engine.deadlines_of(A, group=0) == [239.0, 239.0]
    assert engine.deadlines_of(A, group=1) == [239.0, 239.0]
    assert engine.deadlines_of(A, group=2) == [239.0]


# -- turns -----------------------------------------------------------------------------------------


def test_a_session_that_is_used_again_is_not_counted_twice(engine: PlainEngine) -> None:
    for _ in range(3):
        engine.turn(A, "xyz", ttl=60.0)
    assert engine.counts_of(engine.blocks_of(A)) == [1, 1, 1]


def test_equal_ids_of_other_tenants_and_salts_are_other_sessions(engine: PlainEngine) -> None:
    for key in (A, A._replace(tenant="t"), A._replace(cache_salt="s")):
        engine.turn(key, "x", ttl=60.0)
    assert engine.counts_of(engine.blocks_of(A)) == [3]
    engine.evict(A)
    assert engine.counts_of([1]) == [2]


def test_a_turn_that_rewinds_lets_go_of_the_tail_that_it_does_not_share(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "wxyzst", ttl=60.0)
    old = engine.blocks_of(A)
    engine.turn(A, "wxvu")
    assert engine.counts_of(old) == [2, 2, 1, 1, 1, 1], "it may come back yet"
    engine.turn(A, "wxvut")
    assert engine.counts_of(old) == [1, 1, 0, 0, 0, 0]
    assert engine.blocks_of(A)[:2] == old[:2]
    assert engine.deadlines_of(A) == [60.0] * 5


def test_a_turn_that_ends_early_keeps_what_lies_behind_its_end(engine: PlainEngine) -> None:
    engine.turn(A, "wxyz", ttl=60.0)
    engine.turn(A, "wx", ttl=300.0)
    assert engine.deadlines_of(A) == [300.0] * 4


def test_a_turn_replaces_nothing_while_another_request_of_its_session_is_alive(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "wxyz", ttl=60.0)
    alive = engine.arrive(SessionIntent(A))
    engine.turn(A, "title")
    assert engine.counts_of(range(1, 10)) == [1] * 9
    engine.run(alive, "wxyzv")
    engine.end(alive)
    assert engine.deadlines_of(A) == [60.0] * 5


def test_a_turn_that_rewinds_takes_its_deadline_from_a_block_that_another_still_holds(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "xyz", ttl=300.0)
    engine.turn(B, "xyz")
    engine.wait(10.0)
    engine.turn(A, "xyw", ttl=300.0)
    assert engine.deadlines_of(B) == [300.0, 300.0, 0.0]


def test_a_failed_request_ends_nothing(engine: PlainEngine) -> None:
    engine.turn(A, "wxyz", ttl=60.0)
    old = engine.blocks_of(A)
    for pages in ("wxvu", "w", ""):
        engine.turn(A, pages, ttl=0.0, succeeds=False)
        assert engine.blocks_of(A) == old
        assert engine.deadlines_of(A) == [60.0] * 4


def test_a_failed_request_may_extend_the_context(engine: PlainEngine) -> None:
    engine.turn(A, "xy", ttl=60.0)
    engine.turn(A, "xyz", succeeds=False)
    assert len(engine.blocks_of(A)) == 3


def test_a_request_that_never_ran_and_was_aborted_changes_no_record(engine: PlainEngine) -> None:
    engine.turn(A, "xy", ttl=60.0)
    engine.end(engine.arrive(SessionIntent(A)), succeeds=False)
    assert engine.deadlines_of(A) == [60.0, 60.0]


def test_a_lost_block_that_is_computed_again_is_recorded_again(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    _, lost, _ = engine.blocks_of(A)
    engine.port.lose(lost)
    assert engine.blocks_of(A)[1] == LOST
    engine.turn(A, "xyz")
    assert engine.counts_of(engine.blocks_of(A)) == [1, 1, 1]


def test_a_failed_request_may_bring_back_a_checkpoint_that_was_lost() -> None:
    engine = PlainEngine(HYBRID)
    engine.turn(A, "xy", ttl=60.0)
    lost, kept = engine.blocks_of(A, group=1)
    engine.port.lose(lost)
    engine.turn(A, "xy", succeeds=False)
    assert LOST not in engine.blocks_of(A, group=1)
    assert len(engine.blocks_of(A, group=1)) == 2
    assert kept in engine.blocks_of(A, group=1)


def test_a_block_of_the_same_number_with_other_content_is_another_record() -> None:
    engine = PlainEngine()
    engine.turn(A, "xyz")
    (chain,) = engine.sam.sessions[A].lineage.chains
    hashes = [*chain.hashes[:2], content_hash(0, "xyw")]
    diff = compare(chain, RecordedPrefix(list(chain.block_ids), hashes))
    assert (list(diff.kept), list(diff.dropped), list(diff.added)) == ([0, 1], [2], [2])
    assert diff.diverged


def test_of_equal_copies_the_one_that_a_match_returns_is_protected(engine: PlainEngine) -> None:
    engine.turn(None, "xyz", ttl=0.0)
    served = [1, 2, 3]
    request = engine.arrive(SessionIntent(A, protections=(Protection(60.0),)))
    engine.run(request, "xyz", forgone_hits=2)
    assert list(request.tables[0].values()) != served
    engine.end(request)
    assert engine.blocks_of(A) == served


def test_a_record_follows_its_content_into_another_block(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    engine.move(2, 40)
    assert engine.blocks_of(A) == [1, 40, 3]
    engine.free_all_sessions()
    check_nothing_left(engine.sam, engine.port)


def test_a_block_that_was_lost_unseen_is_dropped_for_every_holder() -> None:
    engine = PlainEngine(is_strict=False)
    engine.turn(A, "xyz", ttl=60.0)
    engine.turn(B, "xyz", ttl=60.0)
    engine.port.lose(2, unseen=True)
    engine.evict(A)
    assert engine.blocks_of(B) == [1, LOST, 3]
    check_invariants(engine.sam, engine.port, engine.settings)


# -- preemption ------------------------------------------------------------------------------------


def test_a_preempted_request_keeps_what_it_computed_until_it_ends(engine: PlainEngine) -> None:
    request = engine.arrive(SessionIntent(A, protections=(Protection(60.0),)))
    engine.run(request, "xyz")
    engine.preempt(request)
    engine.wait(1000.0)
    assert engine.counts_of([1, 2, 3]) == [1, 1, 1]
    engine.run(request, "xyz")
    engine.end(request)
    assert engine.blocks_of(A) == [1, 2, 3]
    assert engine.counts_of([1, 2, 3]) == [1, 1, 1]


def test_a_preempted_request_replaces_nothing(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    request = engine.arrive(SessionIntent(A))
    engine.run(request, "w")
    engine.preempt(request)
    assert engine.counts_of([1, 2, 3, 4]) == [1, 1, 1, 1]


def test_a_preemption_that_ends_the_last_lease_leaves_nothing_to_tick_for() -> None:
    engine = PlainEngine(num_blocks=11, settings=Settings(protected_share=0.3))
    engine.turn(None, "xyz", ttl=60.0)
    request = engine.arrive(SessionIntent(A, protections=(Protection(60.0),)))
    engine.run(request, "uvw")
    engine.preempt(request)
    assert engine.port.num_retained_blocks == 3
    assert engine.sam.next_tick_at == math.inf


# -- edits -----------------------------------------------------------------------------------------


def test_evict_offers_what_the_session_alone_computed_tail_first(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    result = engine.evict(A)
    assert (result.status, result.blocks, result.tokens) == (EditStatus.APPLIED, 3, 3 * PAGE)
    assert engine.port.fronted == [3, 2, 1]
    assert engine.port.num_retained_blocks == 0
    assert A in engine.sam.sessions


def test_evict_leaves_an_outsiders_prefix_as_protected_as_it_was(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    engine.serve_outsider([1, 2])
    engine.wait(20.0)
    engine.evict(A)
    assert engine.port.fronted == [3]
    assert [block.deadline - engine.now for block in engine.port.blocks[1:4]] == [
        40.0,
        40.0,
        -engine.now,
    ]
    engine.wait(41.0)
    check_invariants(engine.sam, engine.port, engine.settings)
    assert engine.port.num_retained_blocks == 0


def test_evict_does_not_take_what_others_computed(engine: PlainEngine) -> None:
    engine.turn(None, "xy", ttl=0.0)
    engine.turn(A, "xyz", ttl=60.0)
    engine.evict(A)
    assert engine.port.fronted == [3]


def test_evict_leaves_another_sessions_claim_alone(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=300.0)
    engine.turn(B, "xyw", ttl=60.0)
    engine.evict(A)
    assert engine.port.fronted == [3]
    assert engine.deadlines_of(B) == [60.0, 60.0, 60.0]
    assert engine.counts_of(engine.blocks_of(B)) == [1, 1, 1]


def test_evicting_twice_finds_nothing_the_second_time(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    engine.evict(A)
    assert engine.evict(A).status is EditStatus.MISSING


def test_evicting_what_has_expired_drops_its_history(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=5.0)
    engine.wait(7.0)
    assert engine.evict(A).status is EditStatus.APPLIED
    assert engine.evict(A).status is EditStatus.MISSING


def test_an_unknown_session_is_missing(engine: PlainEngine) -> None:
    assert engine.evict(A).status is EditStatus.MISSING
    assert not engine.free_session(A)


@pytest.mark.parametrize("edit", [EditType.OFFLOAD, EditType.PREFETCH])
def test_offload_and_prefetch_are_unsupported_and_change_nothing(
    engine: PlainEngine, edit: EditType
) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    (result,) = engine.apply_edits(A, [Edit(edit)])
    assert result.status is EditStatus.UNSUPPORTED
    assert engine.deadlines_of(A) == [60.0] * 3
    assert engine.sam.counters.edits == {(edit.value, "unsupported"): 1}


def test_rejected_edits_are_counted_and_change_nothing(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    (result,) = engine.sam.reject_edits([EVICT], "the request did not succeed")
    assert (result.status, result.reason) == (EditStatus.REJECTED, "the request did not succeed")
    assert engine.deadlines_of(A) == [60.0] * 3
    assert engine.sam.counters.edits == {("evict", "rejected"): 1}


def test_a_request_that_ends_after_its_session_was_freed_leaves_nothing(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    request = engine.arrive(SessionIntent(A))
    engine.run(request, "xyz")
    engine.preempt(request)
    engine.run(request, "xyz")
    engine.free_session(A)
    engine.end(request)
    check_nothing_left(engine.sam, engine.port)


def test_a_reset_forgets_the_blocks_and_keeps_the_session(engine: PlainEngine) -> None:
    engine.turn(A, "xyz", ttl=60.0)
    engine.turn(None, "xyw", ttl=60.0)
    engine.reset()
    assert list(engine.sam.sessions) == [A]
    assert engine.blocks_of(A) == []
    check_invariants(engine.sam, engine.port, engine.settings)


def test_a_request_that_was_preempted_before_a_reset_holds_nothing_after_it(
    engine: PlainEngine,
) -> None:
    request = engine.arrive(SessionIntent(A, protections=(Protection(60.0),)))
    engine.run(request, "xyz")
    engine.preempt(request)
    engine.reset()
    check_invariants(engine.sam, engine.port, engine.settings)
    engine.run(request, "xyz")
    engine.end(request)
    assert engine.counts_of(engine.blocks_of(A)) == [1, 1, 1]


# -- how a session ends ----------------------------------------------------------------------------


def test_an_anonymous_session_ends_with_its_lease(engine: PlainEngine) -> None:
    engine.turn(None, "xyz", ttl=5.0)
    assert len(engine.sam.sessions) == 1
    engine.wait(7.0)
    check_nothing_left(engine.sam, engine.port)


def test_a_session_without_a_lease_lets_its_blocks_go_and_ends_after_its_idle_time(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "xyz")
    engine.wait(299.0)
    assert engine.counts_of([1, 2, 3]) == [1, 1, 1]
    engine.wait(2.0)
    assert engine.port.num_retained_blocks == 0
    engine.wait(297.0)
    assert list(engine.sam.sessions) == [A]
    engine.wait(3.0)
    check_nothing_left(engine.sam, engine.port)


def test_a_session_whose_lease_ran_out_is_remembered_for_its_idle_time(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "xyz", ttl=5.0)
    engine.wait(600.0)
    assert A in engine.sam.sessions
    digests = [engine.port.blocks[i].hash[:DIGEST_BYTES] for i in (3, 2, 1)]
    assert engine.sam.sessions[A].history.tobytes() == b"".join(digests)
    engine.wait(7.0)
    check_nothing_left(engine.sam, engine.port)


def test_a_context_that_expires_again_is_in_its_history_once(engine: PlainEngine) -> None:
    for _ in range(3):
        engine.turn(A, "xyz", ttl=5.0)
        engine.wait(7.0)
    assert len(engine.sam.sessions[A].history) == 3


# -- slices and pressure ---------------------------------------------------------------------------


def test_an_expiry_is_cut_into_slices_tail_first() -> None:
    engine = PlainEngine(settings=Settings(release_slice=2))
    engine.turn(A, "vwxyz", ttl=5.0)
    engine.now += 7.0
    remaining = []
    for _ in range(3):
        assert engine.step()
        remaining.append(len(engine.blocks_of(A)))
    assert remaining == [3, 1, 0]


def test_a_session_that_comes_back_in_the_midst_of_its_expiry_keeps_the_rest() -> None:
    engine = PlainEngine(settings=Settings(release_slice=2))
    engine.turn(A, "vwxyz", ttl=5.0)
    engine.now += 7.0
    engine.step()
    engine.turn(A, "vwxyz")
    engine.wait(3.0)
    assert engine.deadlines_of(A) == [2.0] * 5


def test_a_shortage_releases_what_is_due_only_and_only_as_much_as_is_short(
    engine: PlainEngine,
) -> None:
    engine.turn(A, "vwxyz", ttl=5.5)
    engine.turn(B, "u", ttl=60.0)
    engine.now += 5.5  # Due, though the wheel's slot has not ended.
    assert engine.sam.release_due(engine.now, 2) == 2
    assert engine.blocks_of(A) == [1, 2, 3]
    assert engine.sam.release_due(engine.now, 100) == 3
    assert engine.counts_of(engine.blocks_of(B)) == [1]


# -- bounds ----------------------------------------------------------------------------------------


def test_the_session_used_longest_ago_goes_when_there_are_too_many() -> None:
    engine = PlainEngine(settings=Settings(max_sessions=2))
    for key in (A, B, A, C):
        engine.turn(key, key.session_id, ttl=60.0)
    assert set(engine.sam.sessions) == {A, C}
    assert engine.sam.counters.clipped == {"max_sessions": 1}


def test_a_session_is_refused_when_all_others_have_a_live_request() -> None:
    engine = PlainEngine(settings=Settings(max_sessions=1))
    assert engine.arrive(SessionIntent(A)) is not None
    assert engine.arrive(SessionIntent(B)) is None
    assert engine.arrive(SessionIntent(A)) is not None
    assert engine.sam.counters.clipped == {"max_sessions": 1}


def tenant_engine() -> PlainEngine:
    """Twenty blocks may be protected, ten of them by one tenant."""
    return PlainEngine(num_blocks=41, settings=Settings(protected_share=0.5, tenant_share=0.5))


def test_a_tenants_own_lease_gives_way_to_its_newcomer_and_nobody_elses() -> None:
    engine = tenant_engine()
    other, old, new = (
        SessionKey("o", None, "x"),
        SessionKey("t", None, "a"),
        SessionKey("t", None, "b"),
    )
    engine.turn(other, "0123456789", ttl=50.0)
    engine.turn(old, "abcdefghij", ttl=100.0)
    engine.turn(new, "klmnop", ttl=300.0)
    held = {key: engine.sam.sessions[key].num_records for key in (other, old, new)}
    assert held == {other: 10, old: 4, new: 6}


def test_what_a_tenant_may_not_hold_is_clipped_by_the_name_of_that_bound() -> None:
    engine = tenant_engine()
    engine.turn(SessionKey("t", None, "a"), "abcdefghijklm", ttl=100.0)
    assert engine.sam.counters.clipped == {"tenant_share": 3}


def test_a_prompt_shorter_than_a_block_leaves_the_context_as_it_is(engine: PlainEngine) -> None:
    engine.turn(A, "wxyz", ttl=300.0)
    engine.turn(A, "", ttl=5.0)
    assert engine.deadlines_of(A) == [300.0] * 4


def test_a_request_that_is_aborted_in_the_queue_renews_nothing(engine: PlainEngine) -> None:
    engine.turn(A, "wxyz", ttl=300.0)
    engine.wait(250.0)
    engine.end(engine.arrive(SessionIntent(A)), succeeds=False)
    assert engine.deadlines_of(A) == [50.0] * 4


def test_records_beyond_the_bound_are_clipped_from_the_newcomers_tail() -> None:
    engine = PlainEngine(settings=Settings(max_records=4))
    engine.turn(A, "xyz", ttl=60.0)
    engine.turn(B, "uvw", ttl=60.0)
    assert engine.blocks_of(A) == [1, 2, 3]
    assert engine.blocks_of(B) == [4]
    assert engine.sam.counters.clipped == {"max_records": 2}


def test_the_lease_that_is_due_soonest_gives_way_to_a_newcomer() -> None:
    settings = Settings(protected_share=0.5, give_way=GiveWay.DEADLINE)
    engine = PlainEngine(num_blocks=11, settings=settings)
    engine.turn(A, "xyz", ttl=300.0)
    engine.turn(B, "uv", ttl=60.0)
    engine.turn(C, "w", ttl=5.0)
    assert engine.blocks_of(A) == [1, 2, 3]
    assert engine.blocks_of(B) == [4]
    assert engine.blocks_of(C) == [6]


def test_a_session_without_a_lease_gives_way_before_one_with_a_lease() -> None:
    engine = PlainEngine(num_blocks=11, settings=Settings(protected_share=0.5))
    engine.turn(A, "xyz", ttl=60.0)
    engine.turn(B, "uv")
    engine.turn(C, "w", ttl=5.0)
    assert engine.blocks_of(A) == [1, 2, 3]
    assert engine.blocks_of(B) == [4]


def test_a_newcomer_is_clipped_from_its_tail_when_nothing_is_left_to_give_way() -> None:
    engine = PlainEngine(num_blocks=11, settings=Settings(protected_share=0.5))
    engine.turn(A, "stuvwxyz", ttl=300.0)
    assert engine.blocks_of(A) == [1, 2, 3, 4, 5]
    assert engine.sam.counters.clipped == {"protected_share": 3}


def test_what_sessions_of_a_tenant_share_counts_once_for_its_share() -> None:
    engine = tenant_engine()
    first, second = (SessionKey("red", None, name) for name in "ab")
    for key in (first, second):
        engine.turn(key, "qrstuvwxyz", ttl=300.0)
    assert len(engine.blocks_of(first)) == 10
    assert engine.blocks_of(second) == engine.blocks_of(first)
    assert not engine.sam.counters.clipped


def test_what_gives_way_and_is_shared_with_the_newcomer_makes_no_room() -> None:
    engine = PlainEngine(num_blocks=11, settings=Settings(protected_share=0.5))
    engine.turn(A, "wxyz", ttl=60.0)
    engine.turn(B, "wxyzuv", ttl=300.0)
    assert engine.port.num_retained_blocks <= 5


@pytest.mark.parametrize(
    "bound", [{"max_records": 4}, {"protected_share": 0.4}], ids=["max_records", "protected_share"]
)
def test_a_rewind_at_the_bound_has_the_room_of_the_tail_that_it_lets_go_of(
    bound: dict[str, Any],
) -> None:
    engine = PlainEngine(num_blocks=11, settings=Settings(**bound))
    engine.turn(A, "wxyz", ttl=60.0)
    engine.turn(A, "wxv")
    engine.sam.counters.clipped.clear()
    engine.turn(A, "wxv")
    assert engine.deadlines_of(A) == [60.0] * 3
    assert not engine.sam.counters.clipped


def test_a_rewind_that_is_clipped_keeps_nothing_of_the_old_branch() -> None:
    engine = PlainEngine(num_blocks=11, settings=Settings(protected_share=0.4))
    engine.turn(B, "wxyz", ttl=60.0)
    engine.turn(A, "wxyz", ttl=60.0)
    engine.arrive(SessionIntent(B))  # So that it does not give way.
    engine.turn(A, "wxvu")
    assert engine.blocks_of(A) == engine.blocks_of(B)[:2]
    assert engine.sam.counters.clipped == {"protected_share": 2}


def test_history_beyond_the_bound_is_dropped_of_the_session_used_longest_ago() -> None:
    engine = PlainEngine(settings=Settings(max_history=5))
    for key, pages in ((A, "xyz"), (B, "uvw")):
        engine.turn(key, pages, ttl=5.0)
    engine.wait(7.0)
    assert len(engine.sam.sessions[A].history) == 0
    assert len(engine.sam.sessions[B].history) == 3


# -- hybrids ---------------------------------------------------------------------------------------


def layouts_and_blocks() -> st.SearchStrategy[Any]:
    """A few KV cache groups, the first an attention group, and which logical blocks each has."""
    layout = st.builds(GroupLayout, st.sampled_from([16, 32, 48]), st.booleans(), st.booleans())
    layouts = st.lists(layout, max_size=2).map(lambda rest: (GroupLayout(16), *rest))

    def with_blocks(layouts: tuple[GroupLayout, ...]) -> st.SearchStrategy[Any]:
        some = st.sets(st.integers(0, 7)).map(sorted)
        leading = st.integers(0, 8).map(lambda n: list(range(n)))
        groups = [some if layout.is_checkpoint else leading for layout in layouts]
        return st.tuples(st.just(layouts), st.tuples(*groups))

    return layouts.flatmap(with_blocks)


def checkpoints(layout: GroupLayout, indices: list[int]) -> list[list[int]]:
    """Each state by itself; neighbours that make up a window together."""
    found: list[list[int]] = []
    for i in indices if layout.is_checkpoint else []:
        if found and found[-1][-1] == i - 1 and not layout.stands_alone:
            found[-1].append(i)
        else:
            found.append([i])
    return found


@given(layouts_and_blocks())
def test_a_context_is_reused_tail_first_and_a_checkpoint_after_what_only_it_makes_usable(
    case: tuple[tuple[GroupLayout, ...], tuple[list[int], ...]],
) -> None:
    layouts, logical = case
    order = eviction_order(layouts, logical)
    turn = {(g, logical[g][k]): when for when, (g, k) in enumerate(order)}
    assert sorted(turn) == sorted((g, i) for g, indices in enumerate(logical) for i in indices)
    for g, indices in enumerate(logical):
        turns = [turn[g, i] for i in indices]
        assert turns == sorted(turns, reverse=True), "tail first in each group"
    attention = [
        (g, i, (i + 1) * layout.block_size)
        for g, layout in enumerate(layouts)
        if not layout.is_checkpoint
        for i in logical[g]
    ]
    for g, layout in enumerate(layouts):
        usable_without = 0
        for run in checkpoints(layout, logical[g]):
            for other, i, end in attention:
                for checkpoint in run:
                    goes_first = turn[other, i] < turn[g, checkpoint]
                    assert goes_first == (end > usable_without)
            usable_without = (run[-1] + 1) * layout.block_size


def test_a_hybrid_session_gives_up_its_state_after_the_attention_blocks_behind_it() -> None:
    engine = PlainEngine((GroupLayout(PAGE), GroupLayout(PAGE, True)))
    request = engine.arrive(SessionIntent(A, protections=(Protection(60.0),)))
    engine.run(request, "wxyz", checkpoints=[(), (1, 3)])
    engine.end(request)
    attention, states = engine.blocks_of(A, 0), engine.blocks_of(A, 1)
    engine.evict(A)
    assert engine.port.fronted == [
        *attention[:1:-1],
        states[1],
        *attention[1::-1],
        states[0],
    ]


@pytest.mark.parametrize("layouts", [DENSE, HYBRID], ids=["dense", "hybrid"])
@pytest.mark.parametrize(
    "end",
    [
        lambda engine: engine.free_all_sessions(),
        lambda engine: [engine.free_session(key) for key in (A, B)],
        lambda engine: [engine.wait(seconds) for seconds in (3600.0, 3600.0, 1.0)],
    ],
    ids=["free all", "free each", "wait"],
)
def test_nothing_is_left_when_every_session_has_ended(
    layouts: tuple[GroupLayout, ...], end: Callable[[PlainEngine], object]
) -> None:
    engine = PlainEngine(layouts)
    engine.turn(A, "xyz", ttl=300.0)
    engine.turn(B, "xyw", Protection(300.0, end_token=PAGE), Protection(5.0))
    engine.turn(A, "xyzv")
    end(engine)
    check_nothing_left(engine.sam, engine.port)
