"""What the plugin costs: stock vLLM beside it, both sides in turn, no model behind them."""

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_agent_hint.cli.bench.engine import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    SAMPLED_TOKEN,
    build_request,
    build_scheduler,
    full_attention,
    model_output,
)
from vllm_agent_hint.cli.bench.paired import (
    Ratio,
    clock,
    compare_in_pairs,
    quiet_collector,
    seconds,
)
from vllm_agent_hint.engine.scheduler import agent_scheduler
from vllm_agent_hint.kvcache.manager import TrackedRequest
from vllm_agent_hint.kvcache.pool import AgentBlockPool
from vllm_agent_hint.seams import installed_vllm_version
from vllm_agent_hint.sessions.intent import Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.lineage import GroupLayout, RecordedPrefix
from vllm_agent_hint.sessions.manager import SessionAwareManager
from vllm_agent_hint.settings import Settings

LIMITS: Final = {
    "unhinted_block_ratio": 1.03,
    "unhinted_block_ratio_live": 1.06,
    "unhinted_step_ratio": 1.02,
    "hinted_turn_ratio": 1.5,
    "idle_tick_us": 0.5,
}

POOL_BLOCKS: Final = 20_000
CHUNK: Final = 256
CHUNKS_PER_SECTION: Final = 40
LIVE_SESSIONS: Final = 1_000
BLOCKS_PER_SESSION: Final = 8

DECODING: Final = 64
STEPS_PER_SECTION: Final = 100

TURN_BLOCKS: Final = 131_072 // BLOCK_SIZE
NEW_BLOCKS: Final = 128
OTHER_SESSIONS: Final = 100

TTL: Final = 3_600.0


def run_overhead(json_file: Path | None, console: Console, *, quick: bool = False) -> None:
    """Measure, print the table, and write the figures.

    Args:
        json_file: Where to write them; None prints only.
        console: Where to print.
        quick: A tenth of the repetitions: shows that the bench runs, decides nothing.
    """
    scale = 10 if quick else 1
    measurements: dict[str, Callable[[], Ratio]] = {
        "unhinted_block_ratio": lambda: unhinted_blocks(0, pairs=200 // scale),
        "unhinted_block_ratio_live": lambda: unhinted_blocks(LIVE_SESSIONS, pairs=200 // scale),
        "unhinted_step_ratio": lambda: unhinted_steps(sections=60 // scale),
        "hinted_turn_ratio": lambda: hinted_turn(pairs=40 // scale),
    }
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(measurements) + 1)
        for name, measure in measurements.items():
            progress.update(task, description=name)
            ratio = measure()
            figures[name] = ratio.median
            details[name] = ratio.as_dict()
            progress.advance(task)
        progress.update(task, description="idle_tick_us")
        figures["idle_tick_us"] = idle_tick_us()
        progress.advance(task)
    _show(figures, details, console)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        report = {
            **figures,
            "vllm": installed_vllm_version(),
            "limits": LIMITS,
            "intervals": details,
        }
        json_file.write_text(json.dumps(report, indent=2) + "\n")


def _show(figures: dict[str, Any], details: dict[str, Any], console: Console) -> None:
    table = Table(title=f"What vllm-agent-hint costs, vLLM {installed_vllm_version()} = 1")
    for heading in ("measure", "ratio", "95 % interval", "limit", "stock", "ours", "pairs"):
        table.add_column(heading, justify="left" if heading == "measure" else "right")
    for name, value in figures.items():
        limit = f"{LIMITS[name]:.2f}"
        if name not in details:
            table.add_row(name, f"{value:.3f} us", "", f"{limit} us", "", "", "")
            continue
        d = details[name]
        table.add_row(
            name,
            f"{value:.3f}",
            f"{d['low']:.3f} - {d['high']:.3f}",
            limit,
            f"{d['stock_us']:.3f} us",
            f"{d['ours_us']:.3f} us",
            str(d["pairs"]),
        )
    console.print(table)
    console.print(
        "stock and ours: microseconds per block (block ratios), per step, per turn; medians."
    )


# -- blocks ------------------------------------------------------------------------------------


def unhinted_blocks(num_sessions: int, *, pairs: int) -> Ratio:
    """Allocate cached blocks, touch and free them, none of them a session's.

    Args:
        num_sessions: Sessions recorded in our pool before; their blocks stay where they are.
        pairs: Pairs to measure.
    """
    stock = BlockPool(POOL_BLOCKS, True, BLOCK_SIZE)
    ours = AgentBlockPool(POOL_BLOCKS, True, BLOCK_SIZE)
    sections = []
    for pool in (stock, ours):
        hashes = _fresh_hashes()
        _fill(pool, hashes)
        sections.append(_BlockSection(pool, hashes))
    if num_sessions:
        _record_sessions(ours, num_sessions)
    return compare_in_pairs(
        sections[0], sections[1], pairs=pairs, unit_count=CHUNK * CHUNKS_PER_SECTION
    )


class _BlockSection:
    """A timed section: chunk after chunk through ``get_new_blocks``, ``free``, ``touch``."""

    def __init__(self, pool: Any, hashes: Iterator[bytes]) -> None:
        self._pool = pool
        self._hashes = hashes

    def __call__(self) -> float:
        pool, spent = self._pool, 0.0
        for _ in range(CHUNKS_PER_SECTION):
            start = clock()
            blocks = pool.get_new_blocks(CHUNK)
            spent += clock() - start
            _cache(pool, blocks, self._hashes)
            blocks.reverse()
            start = clock()
            pool.free_blocks(blocks)
            pool.touch(blocks)
            pool.free_blocks(blocks)
            spent += clock() - start
        return spent


def _fresh_hashes() -> Iterator[bytes]:
    return (
        make_block_hash_with_group_id(number.to_bytes(32, "big"), 0) for number in itertools.count()
    )


def _cache(pool: Any, blocks: list[KVCacheBlock], hashes: Iterator[bytes]) -> None:
    for block in blocks:
        pool._insert_block_hash(next(hashes), block, num_tokens=BLOCK_SIZE)


def _fill(pool: Any, hashes: Iterator[bytes]) -> None:
    """Give every block of a pool content, in an order that is not that of its ids."""
    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    _cache(pool, blocks, hashes)
    random.Random(1).shuffle(blocks)
    pool.free_blocks(blocks)


def _record_sessions(pool: AgentBlockPool, num_sessions: int) -> SessionAwareManager:
    now = time.monotonic()
    sam = SessionAwareManager(pool, [GroupLayout(BLOCK_SIZE)], Settings(), now)
    blocks = iter(pool.free_block_queue.get_all_free_blocks())
    for number in range(num_sessions):
        own = list(itertools.islice(blocks, BLOCKS_PER_SESSION))
        prefix = RecordedPrefix([b.block_id for b in own], [b._block_hash for b in own])
        _record(sam, f"session-{number}", prefix, now)
    return sam


def _record(sam: SessionAwareManager, name: str, prefix: RecordedPrefix, now: float) -> None:
    intent = SessionIntent(SessionKey("", None, name), None, (Protection(TTL),))
    live = sam.request_added(intent, now)
    assert live is not None
    sam.request_scheduled(live, [prefix.hashes])
    sam.request_finished(live, [prefix], now, succeeded=True)


# -- steps -------------------------------------------------------------------------------------


def unhinted_steps(*, sections: int) -> Ratio:
    """``schedule`` and ``update_from_output`` with 64 requests that decode."""
    arms = [_StepSection(cls) for cls in (Scheduler, agent_scheduler(Scheduler))]
    return compare_in_pairs(arms[0], arms[1], pairs=sections, unit_count=STEPS_PER_SECTION)


class _StepSection:
    def __init__(self, scheduler_cls: Any) -> None:
        self._scheduler = build_scheduler(
            scheduler_cls,
            full_attention(),
            num_blocks=60_000,
            max_num_seqs=DECODING,
            max_num_batched_tokens=8_192,
        )
        rng = random.Random(2)
        for number in range(DECODING):
            prompt = [rng.randrange(1_000) for _ in range(512)]
            self._scheduler.add_request(
                build_request(f"decode-{number}", prompt, max_tokens=100_000)
            )
        for _ in range(DECODING * 512 // 8_192 + 4):
            self._step()

    def __call__(self) -> float:
        return sum(self._step() for _ in range(STEPS_PER_SECTION))

    def _step(self) -> float:
        start = clock()
        output = self._scheduler.schedule()
        scheduled = clock()
        requests = self._scheduler.requests
        ids = list(output.num_scheduled_tokens)
        sampled = [
            [SAMPLED_TOKEN] if requests[i].num_computed_tokens >= requests[i].num_tokens else []
            for i in ids
        ]
        answer = model_output(ids, sampled)
        resumed = clock()
        self._scheduler.update_from_output(output, answer)
        return clock() - resumed + scheduled - start


# -- turns -------------------------------------------------------------------------------------


def hinted_turn(*, pairs: int) -> Ratio:
    """A turn of 131,072 tokens with 128 new blocks, of a session known from the turn before."""
    return compare_in_pairs(_StockTurn(), _HintedTurn(), pairs=pairs, unit_count=1)


class _StockTurn:
    """Plays turns on a KV cache manager: a long known context, and a new tail each time."""

    def __init__(self) -> None:
        self._rng = random.Random(3)
        self._known = [self._rng.randrange(1_000) for _ in range(MAX_MODEL_LEN)]
        self._known = self._known[: (TURN_BLOCKS - NEW_BLOCKS) * BLOCK_SIZE]
        self._numbers = itertools.count()
        self.scheduler = build_scheduler(
            self.scheduler_cls(),
            full_attention(),
            num_blocks=POOL_BLOCKS,
            max_num_seqs=1,
            max_num_batched_tokens=8_192,
        )
        self.manager = self.scheduler.kv_cache_manager
        self._prepare()

    def scheduler_cls(self) -> Any:
        return Scheduler

    def _prepare(self) -> None:
        self._turn(self._request([]))

    def __call__(self) -> float:
        self._forget_session()
        self._turn(self._request([]))  # the turn before
        request = self._request(
            [self._rng.randrange(1_000) for _ in range(NEW_BLOCKS * BLOCK_SIZE)]
        )
        return seconds(lambda: self._turn(request))

    def _forget_session(self) -> None:
        """Each measured turn follows a first one that knows no other tail."""

    def _request(self, tail: list[int]) -> Any:
        return build_request(f"turn-{next(self._numbers)}", self._known + tail, max_tokens=1)

    def _turn(self, request: Any) -> None:
        blocks, num_cached, _ = self.manager.get_computed_blocks(request)
        self.manager.allocate_slots(request, request.num_tokens - num_cached, num_cached, blocks)
        self.manager.free(request)


class _HintedTurn(_StockTurn):
    """The same through our manager and SAM."""

    def scheduler_cls(self) -> Any:
        return agent_scheduler(Scheduler)

    def _prepare(self) -> None:
        self._sam = self.scheduler.agent_hint.sam
        self._intent = SessionIntent(SessionKey("", None, "agent"), None, (Protection(TTL),))
        for number in range(OTHER_SESSIONS):
            prompt = [self._rng.randrange(1_000) for _ in range(BLOCKS_PER_SESSION * BLOCK_SIZE)]
            intent = SessionIntent(
                SessionKey("", None, f"other-{number}"), None, (Protection(TTL),)
            )
            self._hinted(build_request(f"other-{number}", prompt, max_tokens=1), intent)
        super()._prepare()

    def _forget_session(self) -> None:
        assert self._intent.key is not None
        self._sam.free_session(self._intent.key)

    def _turn(self, request: Any) -> None:
        self._hinted(request, self._intent)

    def _hinted(self, request: Any, intent: SessionIntent) -> None:
        manager = self.manager
        live = self._sam.request_added(intent, time.monotonic())
        assert live is not None
        self._sam.request_scheduled(live, manager.prompt_hashes(request))
        manager.tracked[request.request_id] = TrackedRequest(live)
        blocks, num_cached, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - num_cached, num_cached, blocks)
        self._sam.request_finished(
            live, manager.recorded_prefixes(request), time.monotonic(), succeeded=True
        )
        manager.free(request)
        del manager.tracked[request.request_id]


# -- ticks -------------------------------------------------------------------------------------


def idle_tick_us() -> float:
    """What a scheduling step pays for expiry when nothing is due; 1,000 sessions recorded."""
    scheduler = build_scheduler(
        agent_scheduler(Scheduler),
        full_attention(),
        num_blocks=POOL_BLOCKS,
        max_num_seqs=1,
        max_num_batched_tokens=8_192,
    )
    pool = scheduler.kv_cache_manager.block_pool
    _fill(pool, _fresh_hashes())
    scheduler.agent_hint.sam = _record_sessions(pool, LIVE_SESSIONS)
    rounds, calls = 50, 2_000

    def ticks() -> None:
        for _ in range(calls):
            scheduler.agent_hint.expire_due()

    def empty_loop() -> None:
        for _ in range(calls):
            pass

    with quiet_collector():
        spent = min(seconds(ticks) - seconds(empty_loop) for _ in range(rounds))
    return spent / calls * 1e6
