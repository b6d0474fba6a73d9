"""Invariants 2 to 7 inside vLLM's real scheduler, under anything that clients and operators do."""

import os
import sys
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.core.sched.interface import PauseState

from tests.engine.invariants import check_invariants, check_nothing_left
from tests.engine.rig import SAMPLED_TOKEN, Clock, Engine, hinted, make_scheduler, prompt
from vllm_agent_hint.sessions import family
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.settings import GiveWay, Placement, Settings
from vllm_agent_hint.stamp import STAMP_KEY, Stamp

SHRINKS = os.environ.get("HYPOTHESIS_PROFILE") == "explore"
"""Shrinking a failure of this machine takes minutes."""
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)

SESSIONS = ("a", "b", "c")
session_ids = st.sampled_from(SESSIONS)
ttls = st.sampled_from([None, None, 0.0, 5.0, 60.0, 300.0])
# The longest request fits the smallest pool, so that none waits for ever.
lengths = st.sampled_from([1, 15, 16, 17, 33, 48, 64, 100])
shared_lengths = st.sampled_from([0, 16, 40])
output_lengths = st.sampled_from([1, 2, 5, 20, 40])
cache_salts = st.sampled_from([None, None, None, "salt"])
families = st.integers(0, 2)
runs_now = st.sampled_from([True, True, False])


class HintedScheduler(RuleBasedStateMachine):
    """One engine; hinted and unhinted requests, edits, expiry, pressure, resets and aborts."""

    kind = "full"
    asynchronous = False

    def __init__(self) -> None:
        super().__init__()
        self.while_it_runs = ExitStack()
        self.clock = self.while_it_runs.enter_context(Clock())
        self.contexts: dict[str, list[int]] = {}
        self.num_operations = 0
        self.unanswered: list[Future[Any]] = []

    @initialize(
        num_blocks=st.sampled_from([20, 20, 28, 40, 64]),
        max_num_batched_tokens=st.sampled_from([16, 48, 128]),
        protected_share=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
        max_records=st.sampled_from([0, 6, 1000, 1000]),
        max_sessions=st.sampled_from([1, 2, 100, 100]),
        max_history=st.sampled_from([3, 1000]),
        max_lineages=st.sampled_from([1, 2, 8]),
        max_depth=st.sampled_from([2, 8]),
        release_slice=st.sampled_from([1, 1024]),
        renew=st.booleans(),
        expired_enters=st.sampled_from(Placement),
        give_way=st.sampled_from(GiveWay),
        given_way_enters=st.sampled_from(Placement),
    )
    def start(self, num_blocks: int, max_num_batched_tokens: int, **bounds: object) -> None:
        self.engine = Engine(
            make_scheduler(
                plugged=True,
                kind=self.kind,
                asynchronous=self.asynchronous,
                num_blocks=num_blocks,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=4,
                settings=Settings(**bounds),
            ),
            depth=2 if self.asynchronous else 1,
        )

    # -- requests ----------------------------------------------------------------------------------

    @rule(
        family=families,
        shared=shared_lengths,
        length=lengths,
        max_tokens=output_lengths,
        cache_salt=cache_salts,
        at_once=runs_now,
    )
    def unhinted_request(
        self,
        family: int,
        shared: int,
        length: int,
        max_tokens: int,
        cache_salt: str | None,
        at_once: bool,
    ) -> None:
        self._send(
            _tokens(family, shared, length),
            max_tokens=max_tokens,
            cache_salt=cache_salt,
            at_once=at_once,
        )

    @rule(
        session_id=session_ids,
        ttl=ttls,
        family=families,
        shared=shared_lengths,
        length=lengths,
        max_tokens=output_lengths,
        cache_salt=cache_salts,
        evicts=st.booleans(),
        at_once=runs_now,
    )
    def first_turn(
        self,
        session_id: str,
        ttl: float | None,
        family: int,
        shared: int,
        length: int,
        max_tokens: int,
        cache_salt: str | None,
        evicts: bool,
        at_once: bool,
    ) -> None:
        """A session begins, or another prompt of it: also while one of it is running."""
        tokens = _tokens(family, shared, length)
        self._send(
            tokens,
            max_tokens=max_tokens,
            cache_salt=cache_salt,
            hint=hinted(session_id, ttl, *["evict"] * evicts),
            at_once=at_once,
        )
        self.contexts[session_id] = tokens + [SAMPLED_TOKEN] * max_tokens

    @precondition(lambda self: self.contexts)
    @rule(
        data=st.data(),
        ttl=ttls,
        length=st.sampled_from([1, 10, 16, 40]),
        rewinds=st.sampled_from([0, 0, 0, 20]),
        at_once=runs_now,
    )
    def next_turn(
        self, data: st.DataObject, ttl: float | None, length: int, rewinds: int, at_once: bool
    ) -> None:
        """The context so far, or all of it but a stripped tail, and something new."""
        session_id = data.draw(st.sampled_from(sorted(self.contexts)))
        before = self.contexts[session_id]
        before = before[: max(1, len(before) - rewinds)][:100]
        tokens = before + prompt(17 + len(before), length)
        self._send(tokens, hint=hinted(session_id, ttl), at_once=at_once)
        self.contexts[session_id] = tokens + [SAMPLED_TOKEN] * 2

    @rule(
        family=families,
        shared=shared_lengths,
        length=lengths,
        ttl=st.sampled_from([0.0, 5.0, 300.0]),
        at_once=runs_now,
    )
    def anonymous_protection(
        self, family: int, shared: int, length: int, ttl: float, at_once: bool
    ) -> None:
        self._send(_tokens(family, shared, length), hint=hinted(None, ttl), at_once=at_once)

    @rule(session_id=session_ids, family=families, length=lengths, n=st.integers(2, 3))
    def siblings(self, session_id: str, family: int, length: int, n: int) -> None:
        """What one HTTP request with ``n > 1`` becomes."""
        self.num_operations += 1
        stamp = Stamp(hinted(session_id, 60.0, "evict"), "", f"op{self.num_operations}", n)
        for _ in range(n):
            self.engine.add(_tokens(family, 16, length), extra_args={STAMP_KEY: stamp.sealed()})

    @rule(ttl=ttls, length=st.sampled_from([33, 48, 64]), n=st.integers(2, 4))
    def crowd(self, ttl: float | None, length: int, n: int) -> None:
        """More than fits at once: some are preempted."""
        for k in range(n):
            self.engine.add(
                _tokens(k, 16, length), hint=hinted(SESSIONS[k % 3], ttl), max_tokens=60
            )
        self.steps(12)

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.scheduler.requests))))

    def _send(self, tokens: list[int], *, at_once: bool, **options: Any) -> None:
        self.engine.add(tokens, **options)
        if at_once:
            for _ in range(60):
                if not self.engine.scheduler.has_unfinished_requests():
                    break
                self.engine.step()
                check_invariants(self.engine.scheduler)

    # -- time --------------------------------------------------------------------------------------

    @rule(n=st.integers(1, 12))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.engine.step()
            check_invariants(self.engine.scheduler)

    @rule(seconds=st.sampled_from([0.3, 1.0, 6.0, 61.0, 301.0, 1801.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # -- management --------------------------------------------------------------------------------

    @rule(session_id=session_ids, cache_salt=cache_salts)
    def evict(self, session_id: str, cache_salt: str | None) -> None:
        """Invariant 6: neither what is running nor another session's claim changes."""
        key = ("", cache_salt, session_id)
        before = self._undisturbed(key)
        results = self.engine.edit(session_id, "evict", cache_salt=cache_salt)
        assert [r["status"] for r in results] in (["applied"], ["missing"])
        assert self._undisturbed(key) == before

    @rule(
        session_id=session_ids,
        start=st.sampled_from([0, 1, 2, 5]),
        length=st.sampled_from([1, 3, 100]),
    )
    def evict_range(self, session_id: str, start: int, length: int) -> None:
        """Nothing else changes, and what lies before the range stays."""
        key = SessionKey("", None, session_id)
        before = self._undisturbed(key)
        blocks = {"block_start": start, "block_end": start + length}
        results = self.engine.edit(session_id, {"type": "evict", **blocks})
        assert [r["status"] for r in results] in (["applied"], ["partial"], ["missing"])
        assert self._undisturbed(key) == before
        if key in self.engine.sam.sessions:
            for lineage in self.engine.sam.sessions[key].lineages:
                assert len(lineage.chains[0]) <= start or lineage.chains[0].logical is not None

    @rule(session_id=session_ids)
    def evict_while_the_engine_goes_on(self, session_id: str) -> None:
        """The claims end a slice at a time, and the answer comes with the last."""
        answer = self.engine.call("edit", session_id=session_id, edits=[{"type": "evict"}])
        if isinstance(answer, Future):
            assert self.engine.scheduler.has_requests()
            self.unanswered.append(answer)

    @rule(
        session_id=session_ids,
        ended=st.sampled_from(["tool_call", "final_message", "unknown"]),
        told=st.booleans(),
        is_last=st.booleans(),
    )
    def it_is_told_how_a_turn_ended(
        self, session_id: str, ended: str, told: bool, is_last: bool
    ) -> None:
        """Of whichever turn, while its session rests, runs, or is gone."""
        operation_id = "" if is_last else "of another turn"
        session = self.engine.sam.sessions.get(SessionKey("", None, session_id))
        answer = self.engine.call(
            "facts", session_id=session_id, operation_id=operation_id, ended=ended, told=told
        )
        if answer["used"]:
            assert session is not None
            assert not session.live
            assert session.turn.ended == ended

    @rule(session_id=session_ids)
    def free_a_tree(self, session_id: str) -> None:
        key = SessionKey("", None, session_id)
        tree = list(family.tree(self.engine.sam.sessions[key])) if self._knows(key) else []
        (result,) = self.engine.edit(session_id, {"type": "evict", "include_children": True})
        assert result["status"] == ("applied" if tree else "missing")
        assert not any(self._knows(session.key) for session in tree)

    @rule(session_id=session_ids)
    def free_session(self, session_id: str) -> None:
        """A request of it that is still running leaves nothing behind."""
        (result,) = self.engine.call("free", session_id=session_id, at_once=True)["results"]
        assert result["status"] in ("applied", "missing")
        assert not self._knows(SessionKey("", None, session_id))

    def _knows(self, key: object) -> bool:
        return key in self.engine.sam.sessions

    @rule(
        session_id=session_ids,
        parent=session_ids,
        ttl=ttls,
        family=families,
        at_once=runs_now,
    )
    def work_for_a_parent(
        self, session_id: str, parent: str, ttl: float | None, family: int, at_once: bool
    ) -> None:
        if session_id != parent:
            hint = {**hinted(session_id, ttl), "parent_session_id": parent}
            self._send(_tokens(family, 16, 48), hint=hint, at_once=at_once)

    @rule(
        state=st.sampled_from([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]), n=st.integers(0, 4)
    )
    def pause(self, state: PauseState, n: int) -> None:
        """Steps, edits and a reset while the engine is paused."""
        self.engine.scheduler.set_pause_state(state)
        for _ in range(n):
            self.engine.step()
            check_invariants(self.engine.scheduler)
        assert not isinstance(
            self.engine.call("edit", session_id="a", edits=[{"type": "evict"}]), Future
        )
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _undisturbed(self, key: object) -> list[Any]:
        pool = self.engine.pool
        coordinator = self.engine.scheduler.kv_cache_manager.coordinator
        tables = [
            {request: [b.block_id for b in blocks] for request, blocks in m.req_to_blocks.items()}
            for m in coordinator.single_type_managers
        ]
        others = {}
        for other, session in self.engine.sam.sessions.items():
            if other != key and not session.is_heir:
                others[other] = [
                    (
                        [(list(c.block_ids), list(c.hashes)) for c in lineage.chains],
                        [(lease.deadline, lease.is_armed) for lease in lineage.leases],
                    )
                    for lineage in session.lineages
                    if lineage.trim_to is None and len(lineage)  # What has expired goes on going.
                ]
        return [[(b.ref_cnt, b.block_hash) for b in pool.blocks], tables, others]

    @rule(running_too=st.booleans())
    def reset(self, running_too: bool) -> None:
        sam = self.engine.sam
        sessions = [key for key, s in sam.sessions.items() if not s.is_anonymous]
        marks = _marks(self.engine)
        if self.engine.scheduler.reset_prefix_cache(reset_running_requests=running_too):
            assert not any(_marks(self.engine))
            assert sam.ledger.index.num_records == 0
        else:
            assert not running_too
            assert _marks(self.engine) == marks
        assert [key for key, s in sam.sessions.items() if not s.is_anonymous] == sessions

    @rule(data=st.data())
    def take_blocks(self, data: st.DataObject) -> None:
        """Invariant 5: an allocation succeeds exactly when as many blocks are free as it wants."""
        pool = self.engine.pool
        free = pool.get_num_free_blocks()
        n = data.draw(st.integers(0, free + 1))
        if n > free:
            with pytest.raises(ValueError, match="Cannot get"):
                pool.get_new_blocks(n)
            return
        blocks = pool.get_new_blocks(n)
        assert len({b.block_id for b in blocks}) == n
        assert all(b.ref_cnt == 1 and b.block_hash is None for b in blocks)
        assert pool.get_num_free_blocks() == free - n
        check_invariants(self.engine.scheduler)
        pool.free_blocks(reversed(blocks))

    @rule(data=st.data())
    def content_is_invalidated(self, data: st.DataObject) -> None:
        """What a KV connector does with blocks whose load has failed."""
        ids = st.sets(st.integers(1, len(self.engine.pool.blocks) - 1), max_size=4)
        self.engine.scheduler.kv_cache_manager.evict_blocks(data.draw(ids))

    @precondition(lambda self: self.engine.pool.get_num_free_blocks() > 0)
    @rule(data=st.data())
    def content_moves(self, data: st.DataObject) -> None:
        """What a Mamba group does with a cached state that is about to be written."""
        pool = self.engine.pool
        [target] = pool.get_new_blocks(1)
        cached = [b.block_id for b in pool.blocks if b.ref_cnt == 0 and b.block_hash is not None]
        if cached:
            source = pool.blocks[data.draw(st.sampled_from(cached))]
            marks = (source._session_ref_cnt, source._ttl_expire_at)
            pool.move_block_hashes(source, target)
            assert (target._session_ref_cnt, target._ttl_expire_at) == marks
        pool.free_blocks([target])

    @rule()
    def statistics(self) -> None:
        stats = self.engine.scheduler.agent_hint.statistics()
        assert sum(stats["blocks"].values()) == self.engine.pool.num_gpu_blocks - 1
        assert all(n >= 0 for n in stats["blocks"].values())

    # -- invariants --------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "engine"):
            check_invariants(self.engine.scheduler)
            self._bounds_hold()
        # No two deadlines are equal by chance.
        self.clock.advance(0.125)

    def _bounds_hold(self) -> None:
        sam = self.engine.sam
        settings_ = sam._books.settings
        pool = self.engine.pool
        share = int(settings_.protected_share * (pool.num_gpu_blocks - 1))
        assert pool.num_retained_blocks <= share
        assert sam.ledger.index.num_records <= settings_.max_records
        assert len(sam.sessions) - sam.num_heirs <= settings_.max_sessions
        assert sam.history.size <= settings_.max_history
        assert sam.history.size == sum(
            len(s.history) + sum(len(tail.digests) for tail in s.superseded)
            for s in sam.sessions.values()
        )

    def teardown(self) -> None:
        try:
            has_failed = sys.exc_info()[0] is not None
            if hasattr(self, "engine") and not has_failed:
                self._end()
        finally:
            self.while_it_runs.close()

    def _end(self) -> None:
        """Invariant 4: nothing is left of what has ended."""
        self.engine.drain()
        for request_id in sorted(self.engine.scheduler.requests):
            self.engine.abort(request_id)
        check_invariants(self.engine.scheduler)
        self.engine.step()
        self.engine.drain()
        self.engine.sam.free_all_sessions()
        assert all(answer.done() for answer in self.unanswered)
        check_invariants(self.engine.scheduler)
        check_nothing_left(self.engine.scheduler)


def _tokens(family: int, shared: int, length: int) -> list[int]:
    """Families share their first ``shared`` tokens with each other."""
    return prompt(9, shared) + prompt(family, shared + length)[shared:]


def _marks(engine: Engine) -> list[object]:
    return [
        (b.block_id, b._session_ref_cnt, b._ttl_expire_at)
        for b in engine.pool.blocks
        if b._session_ref_cnt or b._ttl_expire_at
    ]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["full", "window", "state", "all"])
def test_invariants_hold_whatever_happens(kind: str, asynchronous: bool) -> None:
    machine = type(
        "HintedScheduler", (HintedScheduler,), {"kind": kind, "asynchronous": asynchronous}
    )
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=50,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            phases=[*PHASES, *[Phase.shrink] * SHRINKS],
        ),
    )
