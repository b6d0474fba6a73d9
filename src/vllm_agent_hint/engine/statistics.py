"""What an engine tells the front end about its sessions, once per statistics report."""

from collections import Counter, deque
from typing import Any, Final

from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.kvcache.manager import KVCacheManagerMixin
from vllm_agent_hint.kvcache.pool import AgentBlockPool
from vllm_agent_hint.sessions.counters import SessionCounters
from vllm_agent_hint.sessions.manager import SessionAwareManager

MAX_SLICES: Final = 1_000
"""Slice times kept for a report; the oldest go where nobody asks for one."""

PLAIN_COUNTERS: Final = (
    "expired",
    "superseded_blocks",
    "superseded_tokens",
    "superseded_regret_tokens",
    "links_rejected",
)
"""The ``SessionCounters`` that are mere numbers; each is a metric of the same name."""


def take_statistics(
    sam: SessionAwareManager | None, pool: AgentBlockPool, slices: deque[float]
) -> dict[str, Any]:
    """Gauges as they are, counters since the last time; plain data for msgpack.

    Args:
        sam: The session core, or None if there is none any more.
        pool: Whose blocks.
        slices: Seconds spent in each slice of expiry; emptied.

    Returns:
        ``active``, ``sessions`` (named and anonymous), ``conversations``, ``records``, ``leases``
        that run, ``blocks`` per zone (active ones included); each of ``PLAIN_COUNTERS``,
        ``pressure_overrides`` per zone, ``clipped`` blocks per bound (sessions for
        ``max_sessions``), ``edits`` as ``[operation, status, count]``, ``slices``.
    """
    counters = SessionCounters()
    if sam is not None:
        counters = sam.counters.take()
    overrides, pool.pressure_overrides = pool.pressure_overrides, Counter()
    spent = list(slices)
    slices.clear()
    return {
        "active": sam is not None,
        "sessions": sam.num_hinted_sessions if sam is not None else 0,
        "conversations": sam.num_conversations if sam is not None else 0,
        "records": sam.num_records if sam is not None else 0,
        "leases": sam.num_leases if sam is not None else 0,
        "blocks": {
            "ordinary": pool.num_gpu_blocks - 1 - pool.num_retained_blocks,
            "session": pool.num_blocks_in[Zone.SESSION],
            "ttl": pool.num_blocks_in[Zone.TTL],
        },
        **{name: getattr(counters, name) for name in PLAIN_COUNTERS},
        "pressure_overrides": {zone.name.lower(): n for zone, n in overrides.items()},
        "clipped": dict(counters.clipped),
        "edits": [[*what, n] for what, n in counters.edits.items()],
        "slices": spent,
    }


def take_hinted_tokens(manager: KVCacheManagerMixin) -> tuple[int, int]:
    """Prompt tokens of hinted requests, and those found cached, since the last time.

    For reports that travel with stock's own ``prefix_cache_stats`` and no others: the front end
    takes one from the other, so both must cover the same steps.
    """
    taken = manager.take_hinted_tokens()
    return taken.queried, taken.cached
