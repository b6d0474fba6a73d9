"""What allocating, touching and freeing a block costs beside stock, and how that grows."""

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from vllm.v1.core.block_pool import BlockPool

from vllm_agent_hint.cli.bench.engine import BLOCK_SIZE
from vllm_agent_hint.cli.bench.figure import Measured
from vllm_agent_hint.cli.bench.paired import (
    clock,
    compare_in_pairs,
    quiet_collector,
    ratio_of,
)
from vllm_agent_hint.cli.bench.pools import cache_blocks, fill, fresh_hashes, record_sessions
from vllm_agent_hint.kvcache.pool import AgentBlockPool

POOL_BLOCKS: Final = 20_000
CHUNK: Final = 256
CHUNKS_PER_SECTION: Final = 40
LIVE_SESSIONS: Final = 1_000
BLOCKS_PER_SESSION: Final = 8

SMALL_POOL: Final = 10_000
LARGE_POOL: Final = 1_000_000
RECORDED_SHARE: Final = 4
"""One block in so many belongs to a session while the growth is measured."""


def unhinted_blocks(num_sessions: int, *, pairs: int) -> Measured:
    """Allocate cached blocks, touch and free them, none of them a session's.

    Args:
        num_sessions: Sessions recorded in our pool before; their blocks stay where they are.
        pairs: Pairs to measure.
    """
    stock, ours = _sections(POOL_BLOCKS, num_sessions, BLOCKS_PER_SESSION)
    return Measured.of(
        compare_in_pairs(stock, ours, pairs=pairs, unit_count=CHUNK * CHUNKS_PER_SECTION)
    )


def scale(*, rounds: int) -> Measured:
    """Our time per block in a large pool over that in a small one, by stock's same quotient."""
    sections: list[Callable[[], float]] = []
    for size in (SMALL_POOL, LARGE_POOL):
        sections += _sections(size, size // RECORDED_SHARE // 250, 250)
    times: list[tuple[float, ...]] = []
    orders = itertools.cycle(itertools.permutations(range(len(sections))))
    with quiet_collector():
        for turn in range(rounds + 1):
            spent = {which: sections[which]() for which in next(orders)}
            if turn:
                times.append(tuple(spent[which] for which in range(len(sections))))
    growth = ratio_of(
        [(large / small, ours / fewer) for small, fewer, large, ours in times], unit_count=1
    )
    names = ("stock_small_us", "ours_small_us", "stock_large_us", "ours_large_us")
    unit = 1e6 / (CHUNK * CHUNKS_PER_SECTION)
    parts = {
        name: statistics.median(each) * unit
        for name, each in zip(names, zip(*times, strict=True), strict=True)
    }
    in_large_pool = replace(
        growth, stock_us=parts["stock_large_us"], ours_us=parts["ours_large_us"]
    )
    return Measured.of(in_large_pool, **parts)


def _sections(
    num_blocks: int, num_sessions: int, blocks_each: int
) -> tuple["_BlockSection", "_BlockSection"]:
    stock = BlockPool(num_blocks, True, BLOCK_SIZE)
    ours = AgentBlockPool(num_blocks, True, BLOCK_SIZE)
    sections = []
    for pool in (stock, ours):
        hashes = fresh_hashes()
        fill(pool, hashes)
        sections.append(_BlockSection(pool, hashes))
    if num_sessions:
        record_sessions(ours, num_sessions, blocks_each)
    return sections[0], sections[1]


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
            cache_blocks(pool, blocks, self._hashes)
            blocks.reverse()
            start = clock()
            pool.free_blocks(blocks)
            pool.touch(blocks)
            pool.free_blocks(blocks)
            spent += clock() - start
        return spent
