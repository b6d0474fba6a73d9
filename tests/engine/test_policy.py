"""Which blocks go first under pressure, in vLLM's real scheduler: those that the policy says."""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engine.conftest import Log
from tests.engine.invariants import check_invariants
from tests.engine.rig import BLOCK, KINDS, Clock, Engine, hinted, make_scheduler, prompt
from vllm_agent_hint.hookspecs import hookimpl, plugins, retention_policy
from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.sessions.lineage import LOST
from vllm_agent_hint.sessions.policy import RestingTurn, RetentionPolicy, ReusePolicy
from vllm_agent_hint.settings import GiveWay, Settings

pytestmark = pytest.mark.usefixtures("clock")

BLOCKS = 20
CALLS = prompt(1, BLOCKS * BLOCK)
DONE = prompt(2, BLOCKS * BLOCK)


def make_engine(num_blocks: int = 64, **options: Any) -> Engine:
    settings = Settings(protected_share=1.0, **options.pop("flags", {}))
    return Engine(make_scheduler(plugged=True, num_blocks=num_blocks, settings=settings, **options))


def tell(engine: Engine, name: str, ended: str, *tools: str, **more: Any) -> bool:
    facts = {"session_id": name, "ended": ended, "tools": list(tools), "operation_id": "", **more}
    used: bool = engine.call("facts", **facts)["used"]
    return used


def two_sessions(engine: Engine, ttl: float | None = 300.0) -> None:
    """One runs a tool; the other, which rested later, has said its last word."""
    engine.serve(CALLS, hint=hinted("calls", ttl))
    assert tell(engine, "calls", "tool_call", "bash")
    engine.serve(DONE, hint=hinted("done", ttl))
    assert tell(engine, "done", "final_message")


def lost(engine: Engine, name: str, group: int = 0) -> int:
    """Recorded blocks of a session whose content is gone. Those that are left begin the context."""
    chain = engine.session(name).lineage.chains[group].block_ids
    count = chain.count(LOST)
    assert LOST not in chain[: len(chain) - count], "not from the tail"
    return count


def press(engine: Engine, num_blocks: int) -> None:
    """A stranger takes so many blocks of sessions."""
    ordinary = len(engine.zone_ids(Zone.ORDINARY))
    blocks = engine.pool.get_new_blocks(ordinary + num_blocks)
    assert len(blocks) == ordinary + num_blocks
    check_invariants(engine.scheduler)
    engine.pool.free_blocks(blocks)


def test_who_has_said_its_last_word_goes_before_who_runs_a_tool_and_rested_longer() -> None:
    engine = make_engine()
    two_sessions(engine)
    press(engine, 7)
    assert (lost(engine, "calls"), lost(engine, "done")) == (0, 7)
    press(engine, 15)
    assert (lost(engine, "calls"), lost(engine, "done")) == (2, BLOCKS)
    assert engine.serve(CALLS + prompt(9, BLOCK)) == (BLOCKS - 2) * BLOCK


def test_with_lru_who_has_rested_longest_goes_first() -> None:
    engine = make_engine(flags={"give_way": GiveWay.LRU})
    two_sessions(engine)
    press(engine, 7)
    assert (lost(engine, "calls"), lost(engine, "done")) == (7, 0)


def test_a_real_request_is_served_from_what_gives_way() -> None:
    engine = make_engine()
    two_sessions(engine)
    engine.serve(prompt(3, 30 * BLOCK))
    assert lost(engine, "calls") == 0 < lost(engine, "done")
    assert engine.serve(CALLS + prompt(9, BLOCK), hint=hinted("calls")) == BLOCKS * BLOCK


def test_decodes_that_take_one_block_at_a_time_go_on_in_the_same_order() -> None:
    engine = make_engine(num_blocks=64 * (BLOCKS + 4))
    two_sessions(engine)
    asked = Counter[Zone]()
    observer = engine.pool.observer
    wanted = observer.blocks_wanted
    observer.blocks_wanted = lambda zone, n: asked.update([zone]) or wanted(zone, n)
    for taken in range(1, BLOCKS + 5):
        blocks = engine.pool.get_new_blocks(1 + (taken == 1) * len(engine.zone_ids(Zone.ORDINARY)))
        assert lost(engine, "done") == min(taken, BLOCKS)
        assert lost(engine, "calls") == max(0, taken - BLOCKS)
        assert blocks
    assert asked[Zone.TTL] == 1, "one choice for many blocks"


def test_who_was_chosen_before_goes_before_who_is_chosen_now() -> None:
    """A large allocation after single blocks takes what is left of their choice first."""
    engine = make_engine(num_blocks=200)
    for k in range(9):
        engine.serve(prompt(10 + k, BLOCKS * BLOCK), hint=hinted(f"s{k}", 300.0))
        tell(engine, f"s{k}", "final_message" if k == 8 else "tool_call")
    press(engine, 1)
    press(engine, 150)
    gone = [lost(engine, f"s{k}") for k in range(9)]
    assert gone == [*[BLOCKS] * 6, 151 - 7 * BLOCKS, 0, BLOCKS]


def test_a_session_without_a_lease_goes_before_one_with() -> None:
    """Whatever they have said: zone B is used up before C is touched."""
    engine = make_engine()
    engine.serve(CALLS, hint=hinted("calls"))
    tell(engine, "calls", "tool_call")
    engine.serve(DONE, hint=hinted("done", 300.0))
    tell(engine, "done", "final_message")
    press(engine, 22)
    assert (lost(engine, "calls"), lost(engine, "done")) == (BLOCKS, 2)
    assert engine.pool.pressure_overrides == {Zone.SESSION: 20, Zone.TTL: 2}


def test_a_session_that_comes_back_in_time_keeps_what_was_chosen() -> None:
    engine = make_engine()
    two_sessions(engine)
    press(engine, 1)
    left = BLOCKS - 1
    assert engine.serve(DONE + prompt(9, BLOCK), hint=hinted("done")) == left * BLOCK
    tell(engine, "done", "tool_call")
    tell(engine, "calls", "final_message")
    assert lost(engine, "done") == 0, "it has computed again what it had lost"


def test_blocks_that_two_sessions_hold_stay_while_others_go() -> None:
    engine = make_engine(num_blocks=80)
    shared = prompt(5, 10 * BLOCK)
    for name, family in (("calls", 6), ("done", 7)):
        tokens = shared + prompt(family, BLOCKS * BLOCK)
        engine.serve(tokens, hint=hinted(name, 300.0))
        tell(engine, name, "final_message")
    both = engine.session("calls").lineage.chains[0].block_ids[:10]
    assert both == engine.session("done").lineage.chains[0].block_ids[:10]
    press(engine, 2 * BLOCKS)
    assert lost(engine, "calls") == lost(engine, "done") == BLOCKS
    assert engine.serve(shared + prompt(8, BLOCK)) == len(shared)


def test_blocks_that_a_request_uses_are_taken_nowhere() -> None:
    engine = make_engine()
    two_sessions(engine)
    running = engine.add([*DONE[: 10 * BLOCK], 7], max_tokens=100)
    engine.step()
    used = engine.cached_ids(DONE)[:10]
    before = [engine.pool.blocks[i].block_hash for i in used]
    press(engine, 10 + 5)
    assert [engine.pool.blocks[i].block_hash for i in used] == before
    assert (lost(engine, "calls"), lost(engine, "done")) == (5, 10)
    engine.abort(running)


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_of_every_group_is_kept_while_another_goes(kind: str) -> None:
    engine = make_engine(num_blocks=120, kind=kind)
    two_sessions(engine)
    num_done = sum(len(chain) for chain in engine.session("done").lineage.chains)
    press(engine, num_done)
    assert not any(LOST in c.block_ids for c in engine.session("calls").lineage.chains)
    assert all(set(c.block_ids) == {LOST} for c in engine.session("done").lineage.chains)
    assert engine.serve(CALLS + prompt(9, BLOCK)) == BLOCKS * BLOCK


def test_in_shadow_mode_nobody_is_asked_who_gives_way() -> None:
    engine = make_engine(flags={"shadow": True})
    two_sessions(engine)
    engine.pool.observer.blocks_wanted = lambda zone, n: 1 / 0
    engine.serve(prompt(3, 40 * BLOCK))
    assert engine.scheduler.agent_hint.reason == ""
    assert lost(engine, "calls") > 0, "stock's order: who came first goes first"


# -- what is told ----------------------------------------------------------------------------------


def test_an_engine_says_whether_it_had_use_for_what_it_was_told(clock: Clock) -> None:
    engine = make_engine()
    assert not tell(engine, "calls", "tool_call")
    engine.serve(CALLS, hint=hinted("calls", 300.0))
    assert tell(engine, "calls", "tool_call")
    assert not tell(engine, "calls", "tool_call", operation_id="another turn")
    assert not tell(engine, "calls", "tool_call", tenant="another")
    assert not tell(engine, "calls", "tool_call", cache_salt="another")
    engine.add(CALLS, hint=hinted("calls"))
    assert not tell(engine, "calls", "tool_call")


def test_what_a_client_says_decides_whatever_the_front_end_has_seen() -> None:
    engine = make_engine()
    two_sessions(engine)
    assert tell(engine, "done", "tool_call", told=True)
    assert tell(engine, "calls", "final_message", told=True)
    assert not tell(engine, "done", "final_message")
    assert not tell(engine, "calls", "tool_call")
    press(engine, 5)
    assert (lost(engine, "calls"), lost(engine, "done")) == (5, 0)


# -- a policy of somebody else ---------------------------------------------------------------------


@contextmanager
def installed(policy: Any) -> Iterator[None]:
    """As if a plugin beside ours offered it."""

    class Plugin:
        @hookimpl
        def agent_hint_retention_policy(self, settings: Settings) -> RetentionPolicy | None:
            made: RetentionPolicy | None = policy()
            return made

    plugin = Plugin()
    plugins().register(plugin)
    try:
        yield
    finally:
        plugins().unregister(plugin)


class NewestFirst(RetentionPolicy):
    def worth(self, turns: Hashable, resting: float) -> float:
        return resting


def test_another_plugin_may_say_who_gives_way(clock: Clock) -> None:
    with installed(NewestFirst):
        engine = make_engine()
    for name, tokens in (("done", DONE), ("calls", CALLS)):
        engine.serve(tokens, hint=hinted(name, 300.0))
        clock.advance(1.0)
    press(engine, 7)
    assert (lost(engine, "calls"), lost(engine, "done")) == (7, 0)


def test_a_plugin_that_has_no_policy_leaves_it_to_ours() -> None:
    with installed(lambda: None):
        assert isinstance(retention_policy(Settings()), ReusePolicy)


def test_each_engine_gets_a_policy_of_its_own() -> None:
    assert retention_policy(Settings()) is not retention_policy(Settings())


class Raises(RetentionPolicy):
    """Raises where it is told to."""

    where = ""

    def _check(self, method: str) -> None:
        if method == self.where:
            raise RuntimeError("the policy is broken")

    def class_of(self, turn: RestingTurn) -> Hashable:
        self._check("class_of")
        return turn.ended

    def worth(self, turns: Hashable, resting: float) -> float:
        self._check("worth")
        return 0.0

    def observe(self, turns: Hashable, gap: float | None) -> None:
        self._check("observe")

    def ttl_for(self, turn: RestingTurn) -> float | None:
        self._check("ttl_for")
        return None


@pytest.mark.parametrize("where", ["class_of", "worth", "observe", "ttl_for"])
def test_a_policy_that_raises_ends_hints_and_no_request(where: str, log: Log) -> None:
    with installed(Raises):
        engine = make_engine()
    engine.serve(CALLS, hint=hinted("calls", 300.0))
    engine.sam._books.policy.where = where
    engine.serve(DONE, hint=hinted("done"))
    engine.serve([*CALLS, 1], hint=hinted("calls"))
    blocks = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    assert len(blocks) == 63, "an allocation succeeds exactly when stock's would"
    assert len({block.block_id for block in blocks}) == 63
    assert engine.scheduler.agent_hint.sam is None
    assert "failed" in engine.scheduler.agent_hint.reason
    assert "sessions are dropped" in log.text
    engine.pool.free_blocks(blocks)
    assert engine.serve(DONE, hint=hinted("done")) == 0
    assert engine.pool.num_retained_blocks == 0


@pytest.mark.parametrize("zone", ["B", "C"])
def test_a_choice_that_fails_half_way_through_an_allocation_leaves_it_whole(zone: str) -> None:
    """Blocks of one zone are taken already when choosing from the next one fails."""
    with installed(Raises):
        engine = make_engine()
    engine.serve(CALLS, hint=hinted("calls"))
    engine.serve(DONE, hint=hinted("done", 300.0))
    wanted = engine.pool.observer.blocks_wanted

    def fail_later(which: Zone, n: int) -> int:
        if which is (Zone.SESSION if zone == "B" else Zone.TTL):
            engine.sam._books.policy.where = "worth"
        found: int = wanted(which, n)
        return found

    engine.pool.observer.blocks_wanted = fail_later
    ordinary = len(engine.zone_ids(Zone.ORDINARY))
    blocks = engine.pool.get_new_blocks(ordinary + 30)
    assert len({block.block_id for block in blocks}) == ordinary + 30
    assert engine.pool.get_num_free_blocks() == 63 - ordinary - 30
    assert engine.scheduler.agent_hint.sam is None
    assert engine.pool.free_block_queue.taken == []
    assert not any(b._session_ref_cnt or b._ttl_expire_at for b in engine.pool.blocks)


def test_a_hook_that_raises_leaves_vllm_as_it_is(log: Log) -> None:
    with installed(lambda: 1 / 0):
        engine = make_engine()
    assert engine.scheduler.agent_hint.sam is None
    assert "attaching" in engine.scheduler.agent_hint.reason
    engine.serve(CALLS, hint=hinted("calls", 300.0))
    assert engine.serve([*CALLS, 1]) == BLOCKS * BLOCK
