"""Anything at any time: turns, edits, aborts, pauses, resets and a failing store, shuffled.

The stand-in for the model checks every token that a request finds in the cache, so a block that
is overwritten while it is saved or loaded, or served without having been loaded, fails the test.
"""

import random
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.engine.invariants import check_queue, check_zones
from tests.engine.own_prompt_rig import plain
from tests.engine.pooling_rig import PoolingEngine, pooling_engine
from tests.engine.rig import BLOCK, Clock, hinted, prompt
from vllm_agent_hint.engine import own_prompt_queue
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.settings import Settings

SESSIONS = "abcd"
EDITS = ("offload", "prefetch", "evict", "offload", "prefetch")
MOST_WAITING = 8
"""Prefetches."""


class Storm:
    def __init__(self, engine: PoolingEngine, clock: Clock, seed: int) -> None:
        self.engine = engine
        self.clock = clock
        self.random = random.Random(seed)
        self.contexts = {s: prompt(ord(s), 5 * BLOCK + 3) for s in SESSIONS}
        self.alive: list[str] = []
        self.operations: list[str] = []
        self.open: list[str] = []
        """Operations that may go on."""
        self.freed: set[str] = set()
        """Sessions of which nobody has heard since they were freed."""

    def a_session(self) -> str:
        """One that is heard of now."""
        session = self.random.choice(SESSIONS)
        self.freed.discard(session)
        return session

    def turn(self) -> None:
        session = self.a_session()
        context = self.contexts[session]
        if len(context) > 16 * BLOCK:
            context = context[: 3 * BLOCK]
        context = [*context, *prompt(self.random.randrange(1_000), self.random.randrange(60))]
        self.contexts[session] = context
        edits = self.random.sample(EDITS, self.random.randrange(3))
        hint = hinted(session, self.random.choice([None, 0.0, 5.0, 600.0]), *edits)
        if self.random.random() < 0.3:
            hint["expected_resume_seconds"] = self.random.choice([0.0, 2.0, 20.0])
        self.alive.append(
            self.engine.add(context, hint=hint, max_tokens=self.random.randrange(1, 40))
        )

    def stranger(self) -> None:
        self.alive.append(
            self.engine.add(prompt(self.random.randrange(50), self.random.randrange(1, 300)))
        )

    def edit(self) -> None:
        edits = self.random.choices(EDITS, k=self.random.randrange(1, 4))
        self.ask(self.a_session(), *edits)

    def queue(self) -> None:
        """Several prefetches of one session, some with the prompt with which it will be back."""
        session = self.a_session()
        for _ in range(self.random.randrange(2, 5)):
            prompts = [plain(self.contexts[session])] if self.random.random() < 0.5 else []
            self.ask(session, "prefetch", prompts=prompts)

    def ask(self, session: str, *edits: str, **more: Any) -> None:
        name = f"op{len(self.operations)}"
        self.operations.append(name)
        self.open.append(name)
        wire = [{"type": edit} for edit in edits]
        self.engine.call("edit", session_id=session, edits=wire, operation_id=name, **more)

    def free(self) -> None:
        session = self.random.choice(SESSIONS)
        self.engine.call("free", session_id=session, operation_id="free")
        self.freed.add(session)

    def abort(self) -> None:
        if self.alive:
            self.engine.abort(self.random.choice(self.alive))

    def store_fails(self) -> None:
        faults = self.engine.faults
        faults.is_silent = not faults.is_silent
        faults.loads_to_lose = self.random.choice([0, 0, 1, 2])

    def store_forgets(self) -> None:
        manager = self.engine.tier
        manager.delete(self.random.sample(sorted(manager._chunks), len(manager._chunks) // 3))

    def pause(self) -> None:
        state = self.random.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
        self.engine.scheduler.set_pause_state(state)
        self.steps()
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    def reset(self) -> None:
        self.engine.drain()
        self.engine.scheduler.reset_prefix_cache(
            reset_connector=not self.engine.faults.is_silent and self.random.random() < 0.3
        )
        # Stock's connector can't be reset twice between two steps.
        self.engine.step()

    def time(self) -> None:
        self.clock.advance(self.random.choice([0.1, 1.0, 6.0, 70.0]))
        self.engine.scheduler.has_requests()

    def steps(self) -> None:
        self.engine.steps(self.random.randrange(1, 8))

    def blow(self, gusts: int) -> None:
        often = [self.turn, self.edit, self.queue, self.steps, self.steps, self.stranger]
        seldom = [self.free, self.abort, self.store_fails, self.store_forgets, self.pause]
        seldom += [self.time, self.reset]
        for _ in range(gusts):
            self.random.choice(often if self.random.random() < 0.75 else seldom)()
            check_queue(self.engine.pool)
            check_zones(self.engine.pool)
            self.check_sessions()

    def check_sessions(self) -> None:
        """No session has come back by itself, and no more prefetches wait than may."""
        for session in self.freed:
            assert SessionKey("", None, session) not in self.engine.sam.sessions, session
        pending = {name: self.pending(name) for name in self.open}
        self.open = [name for name, edits in pending.items() if edits]
        waiting = sum(edits.count("prefetch") for edits in pending.values())
        # One of each session may be loading.
        assert waiting <= MOST_WAITING + len(SESSIONS)

    def pending(self, operation: str) -> list[str]:
        return [r["type"] for r in self.engine.results(operation) if r["status"] == "pending"]

    def calm_down(self) -> None:
        self.engine.faults.is_silent = False
        self.engine.faults.loads_to_lose = 0
        self.engine.run(limit=4_000)
        for name in self.operations:
            assert self.pending(name) == [], name
        assert self.engine.remote.spm.num_open == self.engine.sam.num_open_edits == 0


def storm_over(clock: Clock, seed: int, *, asynchronous: bool = False) -> Storm:
    settings = Settings(
        prefetch_reserve=[0.0, 0.2][seed // 2 % 2],
        protected_share=0.8,
        max_prefetches_queued=MOST_WAITING,
    )
    engine = pooling_engine(
        num_blocks=90,
        chunks=[60, 400][seed % 2],
        asynchronous=asynchronous,
        max_num_seqs=4,
        settings=settings,
    )
    return Storm(engine, clock, seed)


@pytest.fixture(autouse=True)
def two_blocks_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_prompt_queue, "SLICE_TOKENS", 2 * BLOCK)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_after_a_storm_nothing_is_left_and_no_request_has_read_wrong_content(
    clock: Clock, seed: int, asynchronous: bool
) -> None:
    storm = storm_over(clock, seed, asynchronous=asynchronous)

    storm.blow(250)
    storm.calm_down()

    assert storm.engine.scheduler.agent_hint.sam is not None
    assert storm.engine.remote.reason == ""
    storm.engine.assert_nothing_is_left()


@pytest.mark.parametrize("room", ["_saves", "_prefetches", "_evictions"])
@pytest.mark.parametrize("seed", range(4))
def test_a_fault_of_ours_in_a_storm_leaves_no_operation_open(
    clock: Clock, seed: int, room: str, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    storm = storm_over(clock, seed)
    storm.blow(100)

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(getattr(storm.engine.remote.spm, room), "start", broken)
    storm.blow(100)
    storm.calm_down()

    assert "without the KV connector" in log.text
    assert storm.engine.scheduler.agent_hint.sam is not None
