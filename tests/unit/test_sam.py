"""The session core beside a naive one, and its invariants where bounds are in play."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.naive_sam import check_marks
from tests.unit.plain_engine import DENSE, EVICT, HYBRID, PAGE, PlainEngine, Request
from tests.unit.session_invariants import check_invariants, check_nothing_left
from vllm_agent_hint.hints import EditStatus, EditType
from vllm_agent_hint.sessions.intent import Edit, Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.lineage import LOST, GroupLayout
from vllm_agent_hint.settings import Placement, Settings

KEYS = (
    SessionKey("", None, "a"),
    SessionKey("", None, "b"),
    SessionKey("", "salt", "a"),
    SessionKey("tenant", None, "a"),
)
TTLS = st.sampled_from([0.0, 0.5, 5.0, 5.25, 60.0, 300.0, 3600.0])
ENDS = st.sampled_from([None, None, 0, 8, 16, 24, 32, 40, 64])
PROTECTIONS = st.one_of(
    st.just(()),
    st.builds(lambda ttl: (Protection(ttl),), TTLS),
    st.lists(st.builds(Protection, TTLS, ENDS), min_size=1, max_size=3).map(tuple),
)
PROTECTIONS_OF_ALL = ((), (Protection(0.0),), (Protection(60.0),))
DIFFERENT_ENDS = ((0, 0, 0), (1, 1, 1), (0, 1, 1))
"""None goes on with another one."""
INTENTS = st.one_of(
    st.builds(SessionIntent, st.sampled_from([*KEYS, KEYS[0], None]), protections=PROTECTIONS),
    st.builds(
        SessionIntent,
        st.sampled_from(KEYS[:2]),
        parent_session_id=st.sampled_from("abc"),
        protections=PROTECTIONS,
    ).filter(lambda intent: intent.parent_session_id != intent.key.session_id),
)
PAGES = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
MAX_PAGES = 6
STEPS = st.one_of(
    st.integers(0, 12).map(lambda quarter: quarter / 4),
    st.sampled_from([30.0, 59.75, 300.0, 1800.0, 3600.0, 10_000.0]),
)


class SessionMachine(RuleBasedStateMachine):
    """Requests and edits come and go. Subclasses say how large everything is."""

    layouts: tuple[GroupLayout, ...] = DENSE
    num_blocks: int
    settings: Settings
    is_naive_beside: bool

    def __init__(self) -> None:
        super().__init__()
        self.engine = PlainEngine(
            self.layouts,
            self.num_blocks,
            self.settings,
            is_naive_beside=self.is_naive_beside,
            has_steps_after_each_call=self.is_naive_beside,
        )
        self.sam, self.port, self.naive = self.engine.sam, self.engine.port, self.engine.naive
        self.requests: list[Request] = []
        self.answers: list[list[Any]] = []
        """Results of edits, each of which comes sooner or later."""
        self.last_pages: dict[Any, tuple[int, ...]] = {}

    @property
    def waiting(self) -> list[Request]:
        return [r for r in self.requests if not r.tables]

    @property
    def running(self) -> list[Request]:
        return [r for r in self.requests if r.tables]

    @property
    def recorded(self) -> list[int]:
        return [i for i, block in enumerate(self.port.blocks) if block.count]

    @property
    def named(self) -> list[SessionKey]:
        return [key for key in self.sam.sessions if isinstance(key, SessionKey)]

    # -- the life of a request -----------------------------------------------------------------

    @initialize(turns=st.lists(st.tuples(INTENTS, PAGES), min_size=2, max_size=5))
    def some_sessions_have_had_a_turn(
        self, turns: list[tuple[SessionIntent, tuple[int, ...]]]
    ) -> None:
        for intent, pages in turns:
            self._turn(intent, pages)

    def _turn(self, intent: SessionIntent, pages: tuple[int, ...]) -> None:
        request = self._arrive(intent)
        if request is not None:
            self.last_pages[request.live.session.key] = pages
            self.engine.run(request, pages)
            self.engine.end(request)

    @rule(intents=st.lists(INTENTS, min_size=1, max_size=3), data=st.data())
    def some_turns(self, intents: list[SessionIntent], data: st.DataObject) -> None:
        for intent in intents:
            request = self._arrive(intent)
            if request is not None:
                self._run(request, data)
                succeeds = data.draw(st.sampled_from([True, True, True, False]), "succeeds")
                self.engine.end(request, succeeds=succeeds)

    @precondition(lambda self: len(self.requests) < 4)
    @rule(intent=INTENTS)
    def a_request_arrives(self, intent: SessionIntent) -> None:
        request = self._arrive(intent)
        if request is not None:
            self.requests.append(request)

    def _arrive(self, intent: SessionIntent) -> Request | None:
        sessions = list(self.sam.sessions.values())
        request = self.engine.arrive(intent)
        if request is None:
            named = [session for session in sessions if not session.is_heir]
            assert len(named) == self.settings.max_sessions
            assert all(session.live for session in named)
            assert self.sam.counters.clipped["max_sessions"]
        return request

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_request_runs(self, data: st.DataObject) -> None:
        self._run(data.draw(st.sampled_from(self.waiting), "request"), data)

    def _run(self, request: Request, data: st.DataObject) -> None:
        pages = self._draw_pages(request.live.session.key, data)
        subsets = st.sets(st.integers(0, MAX_PAGES - 1))
        self.engine.run(
            request,
            pages,
            forgone_hits=data.draw(st.sampled_from([0, 0, 1, MAX_PAGES]), "forgone hits"),
            checkpoints=[
                data.draw(subsets, "checkpoints") if layout.is_checkpoint else ()
                for layout in self.layouts
            ],
        )

    def _draw_pages(self, key: Any, data: st.DataObject) -> tuple[int, ...]:
        last = self.last_pages.get(key, ())
        kinds = ["is new", "extends", "extends", "repeats", "is shorter", "diverges"]
        kind = data.draw(st.sampled_from(kinds), "the prompt")
        pages: tuple[int, ...] = data.draw(PAGES, "pages")
        if kind == "extends":
            pages = (*last, *pages)
        elif kind == "repeats":
            pages = last
        elif kind == "is shorter":
            pages = last[: len(last) // 2]
        elif kind == "diverges" and last:
            pages = (*last[:-1], 1 - last[-1], *pages)
        self.last_pages[key] = pages[:MAX_PAGES]
        return pages[:MAX_PAGES]

    @precondition(lambda self: self.recorded)
    @rule(data=st.data())
    def an_outsider_is_served(self, data: st.DataObject) -> None:
        """By an unhinted request, which leaves no claim."""
        hit = st.lists(st.sampled_from(self.recorded), min_size=1, max_size=3, unique=True)
        self.engine.serve_outsider(data.draw(hit, "hit"))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_request_is_preempted(self, data: st.DataObject) -> None:
        self.engine.preempt(data.draw(st.sampled_from(self.running), "request"))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), succeeds=st.booleans())
    def a_request_ends(self, data: st.DataObject, succeeds: bool) -> None:
        request = data.draw(st.sampled_from(self.requests), "request")
        self.requests.remove(request)
        self.engine.end(request, succeeds=succeeds and bool(request.tables))

    @rule(
        key=st.sampled_from(KEYS[:2]),
        start=st.lists(st.integers(0, 1), min_size=1, max_size=2).map(tuple),
        kept=st.lists(PROTECTIONS, min_size=2, max_size=3),
        beside=st.sampled_from([None, *PROTECTIONS_OF_ALL]),
    )
    def a_session_of_several_prompts_that_begin_alike_is_evicted(
        self,
        key: SessionKey,
        start: tuple[int, ...],
        kept: list[tuple[Protection, ...]],
        beside: tuple[Protection, ...] | None,
    ) -> None:
        """Others use the beginning: a stranger, and maybe a session with a claim of its own."""
        turns = [
            (SessionIntent(key, protections=asked), (*start, *end))
            for asked, end in zip(kept, DIFFERENT_ENDS, strict=False)
        ]
        if beside is not None:
            turns.append((SessionIntent(KEYS[2], protections=beside), start))
        for intent, pages in turns:
            self._turn(intent, pages)
        self._serve_outsider_what_is_shared(key)
        if key not in self.sam.sessions:
            return
        if self.naive is None:
            self._edit(key, EVICT, at_once=False)
        else:
            self._evict(key)

    def _serve_outsider_what_is_shared(self, key: SessionKey) -> None:
        index, session = self.sam.ledger.index, self.sam.sessions.get(key)
        shared = {
            block_id
            for lineage in (session.lineages if session else ())
            for chain in lineage.chains
            for block_id in chain.block_ids
            if block_id != LOST and len(index.owners(block_id)) > 1
        }
        if shared:
            self.engine.serve_outsider(sorted(shared))

    # -- what becomes of blocks ------------------------------------------------------------------

    @precondition(lambda self: self.recorded)
    @rule(data=st.data())
    def a_block_loses_its_content(self, data: st.DataObject) -> None:
        """Reused for other content, or evicted from the prefix cache by a connector."""
        self.port.lose(data.draw(st.sampled_from(self.recorded), "block"))

    @precondition(lambda self: self.recorded)
    @rule(data=st.data())
    def a_block_moves(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self.recorded), "source")
        ordinary = [i for i in self.port.free if not self.port.blocks[i].is_retained]
        if ordinary and not self.port.blocks[source].users:
            self.engine.move(source, ordinary[0])

    @precondition(lambda self: self.recorded and not self.running)
    @rule(really=st.booleans())
    def the_prefix_cache_is_reset(self, really: bool) -> None:
        if really:
            self.engine.reset()

    # -- who gives way ---------------------------------------------------------------------------

    @precondition(lambda self: self.named)
    @rule(
        data=st.data(),
        facts=st.sampled_from([("tool_call", "bash"), ("tool_call", "read"), ("final_message",)]),
        operation=st.sampled_from(["", "", "of an earlier turn"]),
        told=st.booleans(),
        times=st.integers(1, 2),
    )
    def more_becomes_known_of_a_turn(
        self, data: st.DataObject, facts: tuple[str, ...], operation: str, told: bool, times: int
    ) -> None:
        """In time or late, once or twice, of this turn or another."""
        session = self.sam.sessions[data.draw(st.sampled_from(self.named), "session")]
        before = session.rested_at, session.turn, session.is_told
        for _ in range(times):
            is_of_use = self.sam.turn_ended(
                session.key, operation, facts[0], facts[1:], self.engine.now, told=told
            )
            can_be = before[0] is not None and not operation and (told or not before[2])
            assert is_of_use == can_be
        after = session.rested_at, session.turn, session.is_told
        assert after[0] == before[0], "it rests no longer for what is known of it"
        if not is_of_use:
            assert after == before

    @precondition(lambda self: self.recorded)
    @rule(wanted=st.integers(1, 6), leased=st.booleans())
    def blocks_are_chosen(self, wanted: int, leased: bool) -> None:
        """Of free blocks that one session holds, and of one zone."""
        marks = [(block.count, block.deadline) for block in self.port.blocks]
        found = self.sam.give_way(self.engine.now, wanted, leased=leased)
        assert found <= wanted
        for block_id in self.port.free[:found]:
            owners = self.sam.ledger.index.owners(block_id)
            assert len({chain.lineage.session for chain in owners}) == 1
            assert bool(self.port.blocks[block_id].deadline) is leased
        assert marks == [(block.count, block.deadline) for block in self.port.blocks]

    # -- edits -----------------------------------------------------------------------------------

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self._evict(data.draw(st.sampled_from(self.named), "session"))

    def _evict(self, key: SessionKey) -> None:
        kept = self._kept_for_others(key)
        with self._only_exclusive_blocks_are_given_up(key):
            result = self.engine.evict(key)
        assert key in self.sam.sessions
        assert result.status in (EditStatus.APPLIED, EditStatus.MISSING)
        for block_id, deadline in kept.items():
            assert self.port.blocks[block_id].count, "somebody else's block lost its claim"
            assert self.port.blocks[block_id].deadline >= deadline, "it is kept for less"

    def _kept_for_others(self, key: SessionKey) -> dict[int, float]:
        """Blocks of a session that an evict must not offer for reuse, and their deadlines."""
        if self.naive is None:
            return {}
        kept = self.naive.blocks_of(self.naive.sessions[key]) & self.naive.unclaimed_use
        return {i: self.port.blocks[i].deadline for i in kept}

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def free_session(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.named), "session")
        with self._only_exclusive_blocks_are_given_up(key):
            assert self.engine.free_session(key)
        assert key not in self.sam.sessions

    @contextmanager
    def _only_exclusive_blocks_are_given_up(self, key: SessionKey) -> Iterator[None]:
        self.port.fronted.clear()
        if self.naive is None:
            yield
            return
        exclusive = self.naive.exclusive_blocks(self.naive.sessions[key])
        yield
        assert sorted(self.port.fronted) == sorted(exclusive)

    @rule(key=st.sampled_from(KEYS))
    def an_unknown_session_is_missing(self, key: SessionKey) -> None:
        if key not in self.sam.sessions:
            (result,) = self.engine.apply_edits(key, [EVICT])
            assert result.status is EditStatus.MISSING
            assert not self.sam.free_session(key)

    # -- edits that the naive core doesn't know ----------------------------------------------------

    @precondition(lambda self: self.named and self.naive is None)
    @rule(data=st.data(), start=st.integers(0, 3), length=st.integers(1, 4), at_once=st.booleans())
    def evict_a_range(self, data: st.DataObject, start: int, length: int, at_once: bool) -> None:
        key = data.draw(st.sampled_from(self.named), "session")
        edit = Edit(EditType.EVICT, start * PAGE, (start + length) * PAGE)
        self._edit(key, edit, at_once=at_once)

    @precondition(lambda self: self.named and self.naive is None)
    @rule(data=st.data(), at_once=st.booleans())
    def free_a_tree(self, data: st.DataObject, at_once: bool) -> None:
        key = data.draw(st.sampled_from(self.named), "session")
        self._edit(key, Edit(EditType.EVICT, include_children=True), at_once=at_once)
        assert key not in self.sam.sessions

    @precondition(lambda self: self.named and self.naive is None)
    @rule(data=st.data())
    def evict_while_the_engine_goes_on(self, data: st.DataObject) -> None:
        self._edit(data.draw(st.sampled_from(self.named), "session"), EVICT, at_once=False)

    def _edit(self, key: SessionKey, edit: Edit, *, at_once: bool) -> None:
        results: list[Any] = []
        self.answers.append(results)
        self.sam.start_edits(key, [edit], self.engine.now, results.extend)
        if at_once:
            self.sam.finish_releases()
            assert len(results) == 1

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def the_invariants_hold(self) -> None:
        check_invariants(self.sam, self.port, self.settings)

    def teardown(self) -> None:
        """Invariant 4, whatever has happened; half of the requests outlive their session."""
        for request in self.requests[::2]:
            self.engine.end(request)
        self.engine.free_all_sessions()
        assert all(len(results) == 1 for results in self.answers)
        assert self.sam.num_open_edits == 0
        check_nothing_left(self.sam, self.port)
        for request in self.requests[1::2]:
            self.engine.end(request)
        check_nothing_left(self.sam, self.port)


class UnboundedMachine(SessionMachine):
    """Bounds are out of reach: every mark is the one that the naive core says."""

    num_blocks = 100
    settings = Settings(protected_share=1.0, release_slice=3)
    is_naive_beside = True

    @rule(seconds=STEPS)
    def time_passes(self, seconds: float) -> None:
        self.engine.wait(seconds)

    @rule(wanted=st.integers(1, 8))
    def zone_a_runs_dry(self, wanted: int) -> None:
        now = self.engine.now
        ordinary = self._ordinary()
        gained = self.sam.release_due(now, wanted)
        assert gained == len(self._ordinary() - ordinary) <= wanted
        check_invariants(self.sam, self.port, self.settings)
        self.engine.tick_to_the_end()
        self.naive.expire(now, lambda deadline: deadline <= now, only_holders=True)

    def _ordinary(self) -> set[int]:
        return {i for i in self.port.free if not self.port.blocks[i].is_retained}

    @invariant()
    def every_block_is_marked_as_the_naive_core_says(self) -> None:
        check_marks(self.port, self.naive)

    @invariant()
    def the_same_sessions_live(self) -> None:
        ours, naive = self.sam.sessions, self.naive.sessions
        assert set(self.named) == {key for key, session in naive.items() if session.is_named}
        assert len(ours) == len(naive)

    @invariant()
    def each_session_has_recorded_what_the_naive_one_has(self) -> None:
        for key in self.named:
            session, naive = self.sam.sessions[key], self.naive.sessions[key]
            assert len(session.lineages) == len(naive.contexts)
            for lineage, context in zip(session.lineages, naive.contexts, strict=True):
                for chain, wanted in zip(lineage.chains, context.records, strict=True):
                    records = enumerate(chain.block_ids)
                    found = {chain.logical_index(k): i for k, i in records if i != LOST}
                    assert found == {i: r.block for i, r in wanted.items() if r.block is not None}
            assert bool(session.history) == naive.has_history

    @invariant()
    def each_lease_that_ran_out_is_counted_and_nothing_is_clipped(self) -> None:
        assert self.sam.counters.expired == self.naive.num_expired
        assert not self.sam.counters.clipped


class UnboundedHybridMachine(UnboundedMachine):
    layouts = HYBRID
    num_blocks = 160


class WithoutRenewalMachine(UnboundedMachine):
    settings = Settings(protected_share=1.0, release_slice=2, idle_seconds=7.5, renew=False)


class BoundedMachine(SessionMachine):
    """Every bound is tight, the pool runs dry, and slices are left over for later steps."""

    num_blocks = 25
    settings = Settings(
        max_sessions=4,
        max_records=15,
        max_history=9,
        protected_share=0.5,
        tenant_share=0.7,
        release_slice=2,
        idle_seconds=8.0,
        expired_enters=Placement.FRONT,
    )
    is_naive_beside = False

    @rule(seconds=STEPS, steps=st.integers(0, 3))
    def time_passes(self, seconds: float, steps: int) -> None:
        self.engine.now += seconds
        for _ in range(steps):
            self.engine.step()

    @rule(wanted=st.integers(1, 4))
    def zone_a_runs_dry(self, wanted: int) -> None:
        assert self.sam.release_due(self.engine.now, wanted) <= wanted

    @invariant()
    def no_lease_of_a_session_without_a_request_is_longer_than_it_may_be(self) -> None:
        for session in self.sam.sessions.values():
            for lease in session.leases:
                assert lease.deadline <= self.engine.now + lease.ttl


class BoundedHybridMachine(BoundedMachine):
    layouts = HYBRID
    num_blocks = 40
    settings = Settings(
        max_sessions=4, max_records=30, protected_share=0.5, release_slice=3, idle_seconds=8.0
    )


def checked(machine: type[SessionMachine], max_examples: int) -> Any:
    case = machine.TestCase
    case.settings = settings(max_examples=max_examples, stateful_step_count=40, deadline=None)
    return case


TestUnbounded = checked(UnboundedMachine, 300)
TestUnboundedHybrid = checked(UnboundedHybridMachine, 150)
TestWithoutRenewal = checked(WithoutRenewalMachine, 100)
TestBounded = checked(BoundedMachine, 300)
TestBoundedHybrid = checked(BoundedHybridMachine, 200)
