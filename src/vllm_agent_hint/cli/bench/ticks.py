"""What a scheduling step pays for leases: when none is due, and when very many are at once."""

import itertools
import time
from collections.abc import Iterator
from functools import cache
from typing import Any, Final, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_agent_hint.cli.bench.blocks import BLOCKS_PER_SESSION, LIVE_SESSIONS
from vllm_agent_hint.cli.bench.engine import BLOCK_SIZE, build_scheduler, full_attention
from vllm_agent_hint.cli.bench.figure import Measured
from vllm_agent_hint.cli.bench.paired import Ratio, quiet_collector, ratio_of, seconds
from vllm_agent_hint.cli.bench.pools import cache_blocks, fill, fresh_hashes, record_sessions
from vllm_agent_hint.engine.scheduler import agent_scheduler

POOL_BLOCKS: Final = 20_000

EXPIRING_SESSIONS: Final = 100
EXPIRING_BLOCKS: Final = 8_192
EXPIRING_POOL: Final = 1_048_576
"""The default share of which is what they hold."""
PREFILL_BLOCKS: Final = 8_192 // BLOCK_SIZE
"""Blocks of the largest chunk that a step computes."""


def idle_tick() -> Measured:
    """Microseconds for which a step looks for what is due, and nothing is; 1,000 sessions."""
    scheduler = scheduler_of(POOL_BLOCKS)
    pool = scheduler.kv_cache_manager.block_pool
    fill(pool, fresh_hashes())
    scheduler.agent_hint.sam = record_sessions(pool, LIVE_SESSIONS, BLOCKS_PER_SESSION)
    rounds, calls = 50, 2_000

    def ticks() -> None:
        for _ in range(calls):
            scheduler.agent_hint.expire_due()

    def empty_loop() -> None:
        for _ in range(calls):
            pass

    with quiet_collector():
        spent = min(seconds(ticks) - seconds(empty_loop) for _ in range(rounds))
    return Measured(spent / calls * 1e6)


def expiry_slice(*, sessions: int) -> Measured:
    """The p99.9 of one step's slice in milliseconds, while sessions expire in the same second."""
    slices = sorted(_mass_expiry(sessions).slices_ms)
    parts = {"median": slices[len(slices) // 2], "max": slices[-1], "slices": float(len(slices))}
    return Measured(slices[int(0.999 * len(slices))], parts=parts)


def expiry_allocation(*, sessions: int) -> Measured:
    """What an allocation between those slices takes, by stock's.

    The larger of two figures: with ordinary blocks at hand, and without, when an allocation has
    to let go of what is due itself.
    """
    found = _mass_expiry(sessions)
    with_room, dry = found.with_room, found.dry
    worse = max(with_room, dry, key=lambda ratio: ratio.median)
    return Measured.of(worse, with_ordinary_blocks=with_room.median, without=dry.median)


class _MassExpiry(NamedTuple):
    """What was measured while very many leases ran out.

    Args:
        slices_ms: Each tick.
        with_room: Allocations while there were ordinary blocks.
        dry: Allocations while there were none.
    """

    slices_ms: list[float]
    with_room: Ratio
    dry: Ratio


@cache
def _mass_expiry(sessions: int) -> _MassExpiry:
    """Measured once, for both figures; the pools are gone afterwards."""
    expiring = _ExpiringPool(sessions)
    with quiet_collector():
        with_room = expiring.steps(down_to=expiring.num_records // 2, frees=True)
        expiring.hold_what_is_ordinary()
        dry = expiring.steps(down_to=0, frees=False)
    return _MassExpiry(expiring.slices_ms, with_room, dry)


class _ExpiringPool:
    """Steps of a scheduler in which contexts of 8,192 blocks run out, stock's pool beside.

    Each step is a tick and the allocation of one prefill chunk. Every block of both pools has
    content at the start.
    """

    def __init__(self, sessions: int) -> None:
        self._scheduler = scheduler_of(EXPIRING_POOL * sessions // EXPIRING_SESSIONS)
        self._ours = self._scheduler.kv_cache_manager.block_pool
        self._stock = BlockPool(len(self._ours.blocks), True, BLOCK_SIZE)
        self._hashes = {pool: fresh_hashes() for pool in (self._stock, self._ours)}
        for pool, hashes in self._hashes.items():
            fill(pool, hashes)
        # They ran out a while ago, so that all of it is due now.
        self._scheduler.agent_hint.sam = record_sessions(
            self._ours, sessions, EXPIRING_BLOCKS, ttl=10.0, now=time.monotonic() - 100.0
        )
        self.slices_ms: list[float] = []

    @property
    def num_records(self) -> int:
        return int(self._scheduler.agent_hint.sam.ledger.index.num_records)

    def steps(self, *, down_to: int, frees: bool) -> Ratio:
        """Tick and allocate until so many records are left.

        Args:
            down_to: So many.
            frees: Whether what was allocated is freed at once; otherwise it stays in use.
        """
        times: list[tuple[float, float]] = []
        order: Iterator[tuple[Any, ...]] = itertools.cycle(
            [(self._stock, self._ours), (self._ours, self._stock)]
        )
        while self.num_records > down_to:
            self.slices_ms.append(seconds(self._scheduler.agent_hint.expire_due) * 1e3)
            if self.num_records < 2 * PREFILL_BLOCKS:
                continue
            spent = {pool: self._allocate(pool, frees=frees) for pool in next(order)}
            times.append((spent[self._stock], spent[self._ours]))
        return ratio_of(times, unit_count=PREFILL_BLOCKS)

    def _allocate(self, pool: Any, *, frees: bool) -> float:
        allocated: list[Any] = []
        spent = seconds(lambda: allocated.extend(pool.get_new_blocks(PREFILL_BLOCKS)))
        cache_blocks(pool, allocated, self._hashes[pool])
        if frees:
            pool.free_blocks(allocated[::-1])
        return spent

    def hold_what_is_ordinary(self) -> None:
        """Running requests take every block that no session holds."""
        ordinary = self._ours.get_num_free_blocks() - self._ours.num_retained_blocks
        for pool in (self._ours, self._stock):
            pool.get_new_blocks(ordinary)


def scheduler_of(num_blocks: int) -> Any:
    """One with the plugin over it, for a model of full attention and a request at a time."""
    return build_scheduler(
        agent_scheduler(Scheduler),
        full_attention(),
        num_blocks=num_blocks,
        max_num_seqs=1,
        max_num_batched_tokens=8_192,
    )
