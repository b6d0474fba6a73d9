"""Failing open in a built engine: what vLLM has built, and what goes wrong at run time."""

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.core import kv_cache_coordinator, kv_cache_manager
from vllm.v1.core.block_pool import BlockPool as StockBlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager as StockManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine.conftest import Log
from tests.engine.invariants import check_queue, check_zones
from tests.engine.rig import KINDS, Clock, Engine, hinted, make_scheduler, prompt
from vllm_agent_hint.engine import hooks as engine_hooks
from vllm_agent_hint.engine.hooks import EngineHooks
from vllm_agent_hint.engine.utility import agent_hint_rpc
from vllm_agent_hint.frontend import carry
from vllm_agent_hint.hints import AgentHintParams
from vllm_agent_hint.kvcache import manager as our_manager
from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.kvcache.manager import KVCacheManagerMixin
from vllm_agent_hint.kvcache.pool import AgentBlockPool, PoolObserver
from vllm_agent_hint.sessions.ledger import Ledger
from vllm_agent_hint.sessions.manager import SessionAwareManager
from vllm_agent_hint.sessions.usage import Usage
from vllm_agent_hint.settings import Settings


def hinted_traffic(engine: Engine, *, seed: int = 0) -> list[int]:
    """Hinted and unhinted requests, aborts, preemptions, a reset. Returns cached tokens."""
    rng = random.Random(seed)
    found = []
    for k in range(40):
        tokens = prompt(rng.randrange(4), rng.choice([20, 64, 100, 160]))
        hint = (
            hinted(rng.choice("ab"), rng.choice([0.0, 60.0, None])) if rng.random() < 0.6 else None
        )
        if rng.random() < 0.3:
            engine.add(tokens, hint=hint, max_tokens=40)
            engine.step()
        elif rng.random() < 0.2:
            request_id = engine.add(tokens, hint=hint, max_tokens=9)
            engine.step()
            engine.abort(request_id)
        else:
            found.append(engine.serve(tokens, hint=hint, max_tokens=rng.choice([1, 3])))
        if k == 25:
            engine.run()
            engine.scheduler.reset_prefix_cache()
    engine.run()
    return found


# -- ring three: what the scheduler has built --------------------------------------------------


class BuildsItsOwnManager(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with patch.object(scheduler_module, "KVCacheManager", StockManager):
            super().__init__(*args, **kwargs)


class BuildsItsOwnPool(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        build = kv_cache_manager.get_kv_cache_coordinator

        def with_stock_pool(*args: Any, **kwargs: Any) -> Any:
            with patch.object(kv_cache_coordinator, "BlockPool", StockBlockPool):
                return build(*args, **kwargs)

        with patch.object(kv_cache_manager, "get_kv_cache_coordinator", with_stock_pool):
            super().__init__(*args, **kwargs)


class BuildsItsOwnQueue(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pool = self.kv_cache_manager.block_pool
        pool.free_block_queue = FreeKVCacheBlockQueue(pool.blocks[1:])


class OtherQueue(FreeKVCacheBlockQueue):
    """Stock's in all but name."""


class BuildsAnotherQueue(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pool = self.kv_cache_manager.block_pool
        pool.free_block_queue = OtherQueue(pool.blocks[1:])


class HandsOutBlocksAtOnce(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_cache_manager.block_pool.get_new_blocks(2)


class OrdersTheQueueItself(Scheduler):
    """As with HiSparse."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_cache_manager.kv_cache_config.hisparse_host_num_blocks = 7


BUILDERS = {
    BuildsItsOwnManager: "KV cache manager",
    BuildsItsOwnPool: "block pool",
    BuildsItsOwnQueue: "free queue",
    BuildsAnotherQueue: "OtherQueue",
    HandsOutBlocksAtOnce: "every block free",
    OrdersTheQueueItself: "HiSparse",
}


@pytest.mark.parametrize("kind", ["full", "all"])
@pytest.mark.parametrize("base", BUILDERS, ids=lambda base: base.__name__)
def test_a_scheduler_that_builds_something_else_runs_as_without_us(
    base: type, kind: str, log: Log
) -> None:
    stock, plugged = (
        Engine(make_scheduler(plugged=plugged, base=base, kind=kind, num_blocks=40))
        for plugged in (False, True)
    )
    assert plugged.scheduler.agent_hint.sam is None
    assert BUILDERS[base] in plugged.scheduler.agent_hint.reason
    [record] = log.records
    assert record.levelname == "WARNING"
    assert BUILDERS[base] in record.getMessage()
    assert hinted_traffic(stock) == hinted_traffic(plugged)
    assert stock.log == plugged.log
    assert stock.free_ids() == plugged.free_ids()
    assert len(log.records) == 1


class OneOfSeveralRanks(Scheduler):
    """As under torchrun: each rank of a tensor-parallel group schedules for itself."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.parallel_config = copy.copy(self.parallel_config)
        self.parallel_config.distributed_executor_backend = "external_launcher"
        self.parallel_config.world_size = 2


class OnlyRank(OneOfSeveralRanks):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parallel_config.world_size = 1


def test_ranks_that_must_all_decide_the_same_run_as_without_us(log: Log) -> None:
    stock, plugged = (
        Engine(make_scheduler(plugged=plugged, base=OneOfSeveralRanks, num_blocks=40))
        for plugged in (False, True)
    )
    assert plugged.scheduler.agent_hint.sam is None
    assert "external_launcher" in plugged.scheduler.agent_hint.reason
    assert hinted_traffic(stock) == hinted_traffic(plugged)
    assert stock.log == plugged.log
    alone = make_scheduler(plugged=True, base=OnlyRank, num_blocks=40)
    assert alone.agent_hint.sam is not None


def test_attaching_that_fails_leaves_the_engine_running(
    monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    monkeypatch.setattr(SessionAwareManager, "__init__", fails)
    engine = Engine(make_scheduler(plugged=True, num_blocks=40))
    stock = Engine(make_scheduler(plugged=False, num_blocks=40))
    assert "planted" in engine.scheduler.agent_hint.reason
    assert hinted_traffic(engine) == hinted_traffic(stock)
    assert len(log.records) == 1


def test_an_error_of_vllm_itself_is_not_swallowed() -> None:
    class Broken(Scheduler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise MemoryError("vLLM's own")

    with pytest.raises(MemoryError, match="vLLM's own"):
        make_scheduler(plugged=True, base=Broken)
    assert scheduler_module.KVCacheManager is StockManager, "the rebinding was undone"
    assert kv_cache_coordinator.BlockPool is StockBlockPool


def test_nothing_of_vllms_modules_stays_rebound() -> None:
    make_scheduler(plugged=True)
    assert scheduler_module.KVCacheManager is StockManager
    assert kv_cache_coordinator.BlockPool is StockBlockPool


# -- ring four: a fault inside the session core, in mid-flight ---------------------------------


def fails(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("planted")


def finish(engine: Engine) -> None:
    engine.serve(prompt(8, 64), hint=hinted("c", 60.0))


def preempt(engine: Engine) -> None:
    for family in range(11, 19):
        engine.add(prompt(family, 130), hint=hinted(f"p{family}", 60.0), max_tokens=150)
    engine.run(limit=3000)


def reuse(engine: Engine) -> None:
    blocks = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    engine.pool.free_blocks(reversed(blocks))


def reset(engine: Engine) -> None:
    assert engine.scheduler.reset_prefix_cache()


def hit(engine: Engine) -> None:
    engine.serve(prompt(1, 200))


def hit_with_a_hint(engine: Engine) -> None:
    engine.serve(prompt(1, 200), hint=hinted("a", 60.0))


def edit_with_a_request(engine: Engine) -> None:
    engine.serve(prompt(8, 64), hint=hinted("a", 60.0, "evict"))


def abort_with_an_edit(engine: Engine) -> None:
    request_id = engine.add(prompt(8, 64), hint=hinted("a", 60.0, "evict"), max_tokens=20)
    engine.step()
    engine.abort(request_id)


def manage(engine: Engine) -> None:
    answer = agent_hint_rpc(
        SimpleNamespace(scheduler=engine.scheduler),
        {"op": "edit", "session_id": "a", "edits": [{"type": "evict"}]},
    )
    assert answer["active"] is False
    assert [r["status"] for r in answer["results"]] == ["unsupported"]


def report(engine: Engine) -> None:
    stats = SimpleNamespace(agent_hint=None)
    with patch.object(Scheduler, "make_stats", lambda self: stats):
        assert engine.scheduler.make_stats() is stats
    assert stats.agent_hint is None


def wait(engine: Engine) -> None:
    engine.step()


def move(engine: Engine) -> None:
    """A retained block's content moves, as in a Mamba group with aligned states."""
    pool = engine.pool
    [target] = pool.get_new_blocks(1)
    source = pool.blocks[engine.session("a").lineage.chains[0].block_ids[-1]]
    pool.move_block_hashes(source, target)
    pool.free_blocks([target])


FAULTS: list[tuple[Any, str, Callable[[Engine], None]]] = [
    (SessionAwareManager, "request_added", finish),
    (SessionAwareManager, "request_finished", finish),
    (SessionAwareManager, "request_preempted", preempt),
    (SessionAwareManager, "tick", wait),
    (SessionAwareManager, "release_due", reuse),
    (SessionAwareManager, "reset", reset),
    (SessionAwareManager, "request_scheduled", hit_with_a_hint),
    (SessionAwareManager, "start_edits", edit_with_a_request),
    (SessionAwareManager, "start_edits", manage),
    (SessionAwareManager, "reject_edits", abort_with_an_edit),
    (Usage, "note_hits", hit),
    (Ledger, "blocks_reused", reuse),
    (Ledger, "block_moved", move),
    (Ledger, "write_deadlines", finish),
    (KVCacheManagerMixin, "recorded_prefixes", finish),
    (KVCacheManagerMixin, "recorded_prefixes", preempt),
    (AgentBlockPool, "update_blocks_meta", finish),
    (AgentBlockPool, "update_blocks_meta", reuse),
    (our_manager, "eviction_order", finish),
    (engine_hooks, "take_statistics", report),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("owner", "entry", "trigger"),
    FAULTS,
    ids=[f"{o.__name__.split('.')[-1]}.{e}-{t.__name__}" for o, e, t in FAULTS],
)
def test_a_fault_in_mid_flight_leaves_a_running_engine_with_plain_lru(
    owner: Any,
    entry: str,
    trigger: Callable[[Engine], None],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    log: Log,
) -> None:
    if entry == "eviction_order" and kind == "full":
        return  # One group is freed as stock does.
    engine = Engine(
        make_scheduler(
            plugged=True, num_blocks=70, kind=kind, settings=Settings(protected_share=1.0)
        )
    )
    engine.serve(prompt(1, 130), hint=hinted("a", 60.0))
    engine.serve(prompt(2, 130), hint=hinted("b", 0.0))
    if trigger is wait or entry in ("release_due", "update_blocks_meta"):
        clock.advance(61.5)
    assert engine.pool.num_retained_blocks > 0
    line = engine.free_ids()
    with monkeypatch.context() as planted:
        planted.setattr(owner, entry, fails)
        trigger(engine)
    assert engine.scheduler.agent_hint.sam is None
    assert "failed, see the log" in engine.scheduler.agent_hint.reason
    [record] = log.records
    assert record.levelname == "ERROR"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)
    if trigger in (wait, report, manage):
        assert engine.free_ids() == line, "in the order in which they lay"

    engine.run()
    assert_plain_lru(engine)
    hinted_traffic(engine)
    assert_plain_lru(engine)
    assert len(log.records) == 1
    answer = agent_hint_rpc(SimpleNamespace(scheduler=engine.scheduler), {"op": "state"})
    assert answer["active"] is False
    assert answer["reason"] == engine.scheduler.agent_hint.reason


# -- ring four, hook by hook: the list comes from the class, so that no new hook is forgotten ------


def begin(engine: Engine) -> None:
    engine.add(prompt(8, 64), hint=hinted("c", 60.0))


def expire(engine: Engine) -> None:
    engine.sam.next_tick_at = 0.0
    engine.step()


def pause(engine: Engine) -> None:
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)


def look_at_the_time(engine: Engine) -> None:
    engine.step()


def tell(engine: Engine) -> None:
    facts = {"op": "facts", "session_id": "a", "ended": "cut"}
    agent_hint_rpc(SimpleNamespace(scheduler=engine.scheduler), facts)


def run_short(engine: Engine) -> None:
    """Another session holds what ordinary blocks can't cover."""
    engine.serve(prompt(9, 32), hint=hinted("d", 60.0))
    reuse(engine)


def begin_without_a_hint(engine: Engine) -> None:
    engine.add(prompt(7, 40))


TRIGGERS: dict[str, Callable[[Engine], None]] = {
    "request_added": begin,
    "unhinted_added": begin_without_a_hint,
    "request_served": hit,
    "request_preempted": preempt,
    "request_ended": finish,
    "run_edits": edit_with_a_request,
    "expire_due": look_at_the_time,
    "tick": expire,
    "pause_changed": pause,
    "blocks_reused": reuse,
    "block_moved": move,
    "pool_short": run_short,
    "blocks_wanted": run_short,
    "pool_reset": reset,
    "report": report,
    "turn_facts": tell,
}
"""What makes vLLM call each hook."""

ASK_NO_SAM = {
    "attach_connector",
    "take_hint",
    "requests_complete",
    "request_complete",
    "statistics",
    "drop_sessions",
    "record_traffic",
    "is_load",
    "end_traffic",
}
"""They look a request up, hand on what a guarded caller asks for, or are the guard itself."""

HOOKS = sorted(
    name
    for name, found in vars(EngineHooks).items()
    if callable(found) and not name.startswith("_") and name not in ASK_NO_SAM
)


class BrokenSam:
    """Fails at whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError("planted")


@pytest.mark.parametrize("enable_caching", [True, False])
def test_a_hint_that_can_not_be_taken_off_its_request_harms_no_request(
    enable_caching: bool, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    engine = Engine(make_scheduler(plugged=True, num_blocks=70, enable_caching=enable_caching))
    log.records.clear()
    monkeypatch.setattr(engine_hooks, "take_hint", fails)
    for _ in range(2):
        engine.serve(prompt(1, 64), hint=hinted("a", 60.0))
    assert engine.scheduler.agent_hint.sam is None
    assert len(log.records) == enable_caching, "where hints have no effect nothing is lost"


def test_a_hint_goes_to_no_engine_that_would_leave_it_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = carry.CarriedHint(AgentHintParams(session_id="s3cret"), "op", 1)
    assert "agent_hint_stamp" in ours.put_into({"mine": 1})
    monkeypatch.setattr(carry, "load_settings", lambda: Settings(sam=False))
    assert ours.put_into({"mine": 1, "agent_hint": {}}) == {"mine": 1}


def test_each_hook_has_a_trigger() -> None:
    assert set(TRIGGERS) == set(HOOKS), "a hook is new or gone: say what makes vLLM call it"


def test_each_call_of_the_pools_observer_is_a_guarded_hook() -> None:
    observed = {name for name in vars(PoolObserver) if not name.startswith("_")}
    assert observed <= set(HOOKS)
    for name in observed:
        assert hasattr(vars(EngineHooks)[name], "__wrapped__"), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HOOKS)
def test_a_fault_at_any_hook_leaves_plain_lru_and_the_metrics_say_so(
    name: str, kind: str, clock: Clock, log: Log
) -> None:
    engine = Engine(
        make_scheduler(
            plugged=True, num_blocks=70, kind=kind, settings=Settings(protected_share=1.0)
        )
    )
    hooks = engine.scheduler.agent_hint
    engine.serve(prompt(1, 130), hint=hinted("a", 60.0))
    engine.serve(prompt(2, 130), hint=hinted("b", 0.0))
    entered: list[str] = []
    hook = getattr(hooks, name)

    def with_a_broken_sam(*args: Any, **kwargs: Any) -> Any:
        entered.append(name)
        if hooks.sam is not None:
            hooks.sam = BrokenSam()
        return hook(*args, **kwargs)

    setattr(hooks, name, with_a_broken_sam)
    if name == "request_served":
        hooks.manager.on_served = with_a_broken_sam
    TRIGGERS[name](engine)
    assert entered, "the trigger makes vLLM call the hook"
    delattr(hooks, name)

    assert hooks.sam is None
    assert hooks.reason == f"{name} failed, see the log"
    [record] = log.records
    assert isinstance(record.exc_info[1], ZeroDivisionError)
    assert last_report(engine)["active"] is False
    engine.run()
    assert_plain_lru(engine)
    hinted_traffic(engine)
    assert_plain_lru(engine)
    assert len(log.records) == 1


def last_report(engine: Engine) -> dict[str, Any]:
    # The step that failed has sent it already, where vLLM's statistics have our field.
    engine.scheduler.agent_hint.has_news = True
    stats = SimpleNamespace(agent_hint=None)
    with patch.object(Scheduler, "make_stats", lambda self: stats):
        engine.scheduler.make_stats()
    found: dict[str, Any] = stats.agent_hint
    return found


def assert_plain_lru(engine: Engine) -> None:
    pool = engine.pool
    check_queue(pool)
    check_zones(pool)
    assert engine.zone_ids(Zone.ORDINARY) == engine.free_ids()
    assert pool.num_retained_blocks == 0
    assert not any(b._session_ref_cnt or b._ttl_expire_at for b in pool.blocks)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_has_dropped_its_sessions_goes_on_as_stock_would(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, plugged = (
        Engine(make_scheduler(plugged=plugged, kind=kind, num_blocks=40))
        for plugged in (False, True)
    )
    for engine in (stock, plugged):
        engine.add(prompt(2, 64), hint=hinted("b", 60.0), max_tokens=30)
        engine.step()
        with monkeypatch.context() as planted:
            planted.setattr(SessionAwareManager, "request_added", fails)
            engine.serve(prompt(1, 64), hint=hinted("a", 60.0))
        hinted_traffic(engine)
    assert plugged.scheduler.agent_hint.sam is None
    assert stock.log == plugged.log
    assert stock.free_ids() == plugged.free_ids()


def test_with_several_engines_in_a_process_only_the_one_with_the_fault_drops_its_sessions() -> None:
    first, second = (Engine(make_scheduler(plugged=True)) for _ in range(2))
    with patch.object(first.sam, "request_added", fails):
        first.serve(prompt(1, 64), hint=hinted("a", 60.0))
        second.serve(prompt(1, 64), hint=hinted("a", 60.0))
    assert first.scheduler.agent_hint.sam is None
    assert second.pool.num_blocks_in[Zone.TTL] == 4
