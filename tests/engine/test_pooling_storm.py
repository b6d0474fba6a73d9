"""Anything at any time: turns, edits, aborts, pauses, resets and a failing store, shuffled.

The stand-in for the model checks every token that a request finds in the cache, so a block that
is overwritten while it is saved or loaded, or served without having been loaded, fails the test.
"""

import random

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.engine.invariants import check_queue, check_zones
from tests.engine.pooling_rig import PoolingEngine, pooling_engine
from tests.engine.rig import BLOCK, Clock, hinted, prompt
from vllm_agent_hint.settings import Settings

SESSIONS = "abcd"
EDITS = ("offload", "prefetch", "evict", "offload", "prefetch")


class Storm:
    def __init__(self, engine: PoolingEngine, clock: Clock, seed: int) -> None:
        self.engine = engine
        self.clock = clock
        self.random = random.Random(seed)
        self.contexts = {s: prompt(ord(s), 5 * BLOCK + 3) for s in SESSIONS}
        self.alive: list[str] = []
        self.operations: list[str] = []

    def turn(self) -> None:
        session = self.random.choice(SESSIONS)
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
        name = f"op{len(self.operations)}"
        self.operations.append(name)
        edits = self.random.choices(EDITS, k=self.random.randrange(1, 4))
        self.engine.ask(self.random.choice(SESSIONS), *edits, operation_id=name)

    def free(self) -> None:
        self.engine.call("free", session_id=self.random.choice(SESSIONS), operation_id="free")

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
        often = [self.turn, self.edit, self.steps, self.steps, self.stranger]
        seldom = [self.free, self.abort, self.store_fails, self.store_forgets, self.pause]
        seldom += [self.time, self.reset]
        for _ in range(gusts):
            self.random.choice(often if self.random.random() < 0.75 else seldom)()
            check_queue(self.engine.pool)
            check_zones(self.engine.pool)

    def calm_down(self) -> None:
        self.engine.faults.is_silent = False
        self.engine.faults.loads_to_lose = 0
        self.engine.run(limit=4_000)
        for name in self.operations:
            for result in self.engine.results(name):
                assert result["status"] != "pending", name


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_after_a_storm_nothing_is_left_and_no_request_has_read_wrong_content(
    clock: Clock, seed: int, asynchronous: bool
) -> None:
    engine = pooling_engine(
        num_blocks=90,
        chunks=[60, 400][seed % 2],
        asynchronous=asynchronous,
        max_num_seqs=4,
        settings=Settings(prefetch_reserve=[0.0, 0.2][seed // 2 % 2], protected_share=0.8),
    )
    storm = Storm(engine, clock, seed)

    storm.blow(250)
    storm.calm_down()

    assert engine.scheduler.agent_hint.sam is not None
    assert engine.remote.reason == ""
    engine.assert_nothing_is_left()
