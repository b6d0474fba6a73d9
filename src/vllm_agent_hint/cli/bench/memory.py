"""What blocks and records take, and what records add to a pause of the garbage collector."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

from vllm.v1.core.block_pool import BlockPool

from vllm_agent_hint.cli.bench.engine import BLOCK_SIZE
from vllm_agent_hint.cli.bench.figure import Measured
from vllm_agent_hint.cli.bench.paired import clock, ratio_of
from vllm_agent_hint.cli.bench.pools import fill, fresh_hashes, record_sessions
from vllm_agent_hint.kvcache.pool import AgentBlockPool

FEWER_BLOCKS: Final = 50_000
MORE_BLOCKS: Final = 150_000

SESSIONS: Final = 125
BLOCKS_EACH: Final = 8_000
RETAINED_POOL: Final = SESSIONS * BLOCKS_EACH * 5 // 4 + 1
"""Blocks of which sessions may hold so many under the default settings."""


def bytes_per_block() -> Measured:
    """Bytes that a block of our pool takes more than one of stock's, all of them cached.

    From the growth between two sizes: what a pool takes by itself is no part of a block. To a
    tenth of a byte: the thread that shows the progress allocates, too.
    """
    stock, ours = _bytes_per_block(BlockPool), _bytes_per_block(AgentBlockPool)
    return Measured(round(ours - stock, 1), parts={"stock": stock, "ours": ours})


def _bytes_per_block(pool_cls: Any) -> float:
    _bytes_of_pool(pool_cls, 2)  # What is made once and stays.
    fewer, more = (_bytes_of_pool(pool_cls, size) for size in (FEWER_BLOCKS, MORE_BLOCKS))
    return (more - fewer) / (MORE_BLOCKS - FEWER_BLOCKS)


def _bytes_of_pool(pool_cls: Any, num_blocks: int) -> int:
    with _traced() as traced_bytes:
        pool = pool_cls(num_blocks, True, BLOCK_SIZE)
        fill(pool, fresh_hashes())
        return traced_bytes()


def bytes_per_record(*, sessions: int) -> Measured:
    """Bytes that SAM keeps alive for each record: blocks resident, and all of them reused."""
    pool = _retained_pool(sessions)
    num_records = sessions * BLOCKS_EACH
    with _traced() as traced_bytes:
        sam = record_sessions(pool, sessions, BLOCKS_EACH)
        assert sam.ledger.index.num_records == num_records
        resident = traced_bytes() / num_records
        for reused in _reuse_all(pool):
            sam.ledger.blocks_reused(reused)
        assert sam.ledger.index.num_records == 0
        evicted = traced_bytes() / num_records
    return Measured(max(resident, evicted), parts={"resident": resident, "evicted": evicted})


def _reuse_all(pool: AgentBlockPool) -> Iterator[list[int]]:
    """Allocate every block; yields those that sessions lose by it."""
    while pool.get_num_free_blocks():
        next_ones = islice(pool.free_block_queue.iter_blocks_after(None), 4_096)
        lost = [block.block_id for block in next_ones if block._session_ref_cnt]
        pool.get_new_blocks(min(4_096, pool.get_num_free_blocks()))
        yield lost


def gc_ratio(*, sessions: int, collections: int) -> Measured:
    """A full collection with records over one without, in a process that has loaded vLLM.

    Each is compared with the mean of one before the records are made and one after they have gone.
    """
    pool = _retained_pool(sessions)
    gc.collect()
    before = _pauses(collections)
    sam: Any = record_sessions(pool, sessions, BLOCKS_EACH)
    having = _pauses(collections)
    sam.free_all_sessions()
    del sam
    after = _pauses(collections)
    without = [(first + last) / 2 for first, last in zip(before, after, strict=True)]
    ratio = ratio_of(list(zip(without, having, strict=True)), unit_count=1)
    return Measured.of(ratio, added_ms=(ratio.ours_us - ratio.stock_us) / 1e3)


def _pauses(collections: int) -> list[float]:
    pauses: list[float] = []
    for _ in range(collections + 1):
        start = clock()
        gc.collect()
        pauses.append(clock() - start)
    return pauses[1:]


def _retained_pool(sessions: int) -> AgentBlockPool:
    pool = AgentBlockPool(RETAINED_POOL * sessions // SESSIONS + 2, True, BLOCK_SIZE)
    fill(pool, fresh_hashes())
    return pool


@contextmanager
def _traced() -> Iterator[Callable[[], int]]:
    """Yields a function that says how many bytes made since are alive."""

    def alive() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    gc.collect()
    tracemalloc.start()
    try:
        yield alive
    finally:
        tracemalloc.stop()
