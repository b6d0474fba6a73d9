"""Block pools full of content, and sessions recorded in them."""

import itertools
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from vllm_agent_hint.cli.bench.engine import BLOCK_SIZE
from vllm_agent_hint.sessions.intent import Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.lineage import GroupLayout, RecordedPrefix
from vllm_agent_hint.sessions.manager import SessionAwareManager
from vllm_agent_hint.settings import Settings

TTL: Final = 3_600.0


def fresh_hashes() -> Iterator[bytes]:
    """Block hashes that nobody has seen."""
    return (
        make_block_hash_with_group_id(number.to_bytes(32, "big"), 0) for number in itertools.count()
    )


def cache_blocks(pool: Any, blocks: Iterable[KVCacheBlock], hashes: Iterator[bytes]) -> None:
    """Give blocks content, as when a prefill has computed them."""
    for block in blocks:
        pool._insert_block_hash(next(hashes), block, num_tokens=BLOCK_SIZE)


def fill(pool: Any, hashes: Iterator[bytes]) -> None:
    """Give every block of a pool content, in an order that is not that of its ids."""
    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    cache_blocks(pool, blocks, hashes)
    random.Random(1).shuffle(blocks)
    pool.free_blocks(blocks)


def prefix_of(blocks: Iterable[KVCacheBlock]) -> RecordedPrefix:
    """What a request with these blocks reports."""
    held = list(blocks)
    return RecordedPrefix([b.block_id for b in held], [b._block_hash for b in held])


def new_sam(pool: Any, now: float, settings: Settings | None = None) -> SessionAwareManager:
    """A session core over one group of full attention; None for the default settings."""
    return SessionAwareManager(pool, [GroupLayout(BLOCK_SIZE)], settings or Settings(), now)


def key_of(name: str) -> SessionKey:
    return SessionKey("", None, name)


def record(
    sam: SessionAwareManager, name: str, prefix: RecordedPrefix, now: float, *, ttl: float = TTL
) -> None:
    """A turn of a session, as SAM sees it."""
    live = sam.request_added(SessionIntent(key_of(name), None, (Protection(ttl),)), now)
    assert live is not None
    sam.request_scheduled(live, [prefix.hashes])
    sam.request_finished(live, [prefix], now, succeeded=True)


def record_sessions(
    pool: Any,
    num_sessions: int,
    blocks_each: int,
    *,
    ttl: float = TTL,
    now: float | None = None,
    settings: Settings | None = None,
) -> SessionAwareManager:
    """A session core with sessions over the free blocks of a pool, no two of which share any.

    Args:
        pool: Ours; filled.
        num_sessions: How many.
        blocks_each: Blocks of each.
        ttl: Seconds for which each is kept.
        now: When they were recorded; None for the present.
        settings: Of the core; None for the default ones.
    """
    now = time.monotonic() if now is None else now
    sam = new_sam(pool, now, settings)
    blocks = iter(pool.free_block_queue.get_all_free_blocks())
    for number in range(num_sessions):
        prefix = prefix_of(itertools.islice(blocks, blocks_each))
        record(sam, f"session-{number}", prefix, now, ttl=ttl)
    return sam
