"""What an allocation pays when every block is kept for a session, and some have to give way."""

import time
from collections.abc import Callable
from typing import Any, Final

from vllm.v1.core.block_pool import BlockPool

from vllm_agent_hint.cli.bench.engine import BLOCK_SIZE
from vllm_agent_hint.cli.bench.figure import Measured
from vllm_agent_hint.cli.bench.paired import Ratio, compare_in_pairs, seconds
from vllm_agent_hint.cli.bench.pools import (
    cache_blocks,
    fill,
    fresh_hashes,
    key_of,
    prefix_of,
    record,
    record_sessions,
)
from vllm_agent_hint.cli.bench.ticks import PREFILL_BLOCKS, scheduler_of
from vllm_agent_hint.sessions.lineage import LOST
from vllm_agent_hint.settings import Settings

RESTING_SESSIONS: Final = 1_000
BLOCKS_EACH: Final = 20
CLASSES: Final = 200
SINGLE_BLOCKS: Final = 512


def pressure_allocation(*, pairs: int) -> Measured:
    """``get_new_blocks`` of a prefill chunk, and of single blocks, beside stock's.

    The value is that of the chunk. Single blocks, as decodes take them, are a part of their own:
    stock's cost so little that their ratio says less than the time.

    Args:
        pairs: Pairs to measure, of each.
    """
    chunks = _compare([PREFILL_BLOCKS], pairs)
    singles = _compare([1] * SINGLE_BLOCKS, pairs)
    return Measured.of(
        chunks,
        added_ms=(chunks.ours_us - chunks.stock_us) * PREFILL_BLOCKS / 1e3,
        single_blocks=singles.median,
        single_block_us=singles.ours_us,
    )


def _compare(sizes: list[int], pairs: int) -> Ratio:
    stock, ours = _StockPool(sizes), _PressedPool(sizes)
    return compare_in_pairs(stock, ours, pairs=pairs, unit_count=sum(sizes))


class _StockPool:
    """Allocations of some sizes; all is content again afterwards."""

    def __init__(self, sizes: list[int]) -> None:
        self.pool: Any = BlockPool(RESTING_SESSIONS * BLOCKS_EACH + 1, True, BLOCK_SIZE)
        self._sizes = sizes
        self._hashes = fresh_hashes()
        fill(self.pool, self._hashes)

    def __call__(self) -> float:
        allocated: list[Any] = []
        take: Callable[[int], list[Any]] = self.pool.get_new_blocks

        def allocate() -> None:
            for size in self._sizes:
                allocated.extend(take(size))

        spent = seconds(allocate)
        cache_blocks(self.pool, allocated, self._hashes)
        self.pool.free_blocks(allocated[::-1])
        self.give_back(allocated)
        return spent

    def give_back(self, allocated: list[Any]) -> None:
        """Nobody wants the blocks."""


class _PressedPool(_StockPool):
    """Every block has a lease. Who has lost blocks comes back and computes them again."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        scheduler = scheduler_of(RESTING_SESSIONS * BLOCKS_EACH + 1)
        self.pool = scheduler.kv_cache_manager.block_pool
        fill(self.pool, self._hashes)
        self._sam = record_sessions(
            self.pool,
            RESTING_SESSIONS,
            BLOCKS_EACH,
            settings=Settings(protected_share=1.0),
        )
        scheduler.agent_hint.sam = self._sam
        for number in range(RESTING_SESSIONS):
            # Again, so that all have come back once: else those that do would be of new classes.
            name = f"session-{number}"
            chain = self._sam.sessions[key_of(name)].lineage.chains[0]
            self._come_back(number, [self.pool.blocks[i] for i in chain.block_ids])

    def _come_back(self, number: int, blocks: list[Any]) -> None:
        """A turn of a session with all of its blocks, which calls the tool of its class."""
        name, now = f"session-{number}", time.monotonic()
        record(self._sam, name, prefix_of(blocks), now)
        self._sam.turn_ended(key_of(name), "", "tool_call", (f"tool-{number % CLASSES}",), now)

    def give_back(self, allocated: list[Any]) -> None:
        """To the sessions that have lost as many."""
        blocks = iter(allocated)
        for number in range(RESTING_SESSIONS):
            name = f"session-{number}"
            chain = self._sam.sessions[key_of(name)].lineage.chains[0]
            if LOST not in chain.block_ids:
                continue
            held = [self.pool.blocks[i] if i != LOST else next(blocks) for i in chain.block_ids]
            self._come_back(number, held)
        assert self.pool.num_retained_blocks == RESTING_SESSIONS * BLOCKS_EACH
