"""What an engine tells the front end about its sessions, once per statistics report."""

from collections import Counter
from typing import Any

from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.kvcache.pool import AgentBlockPool
from vllm_agent_hint.sessions.manager import SessionAwareManager, SessionCounters


def take_statistics(sam: SessionAwareManager | None, pool: AgentBlockPool) -> dict[str, Any]:
    """Gauges as they are, counters since the last time; plain data for msgpack.

    Args:
        sam: The session core, or None if there is none any more.
        pool: Whose blocks.

    Returns:
        ``sessions`` (named and anonymous), ``blocks`` per zone (active ones included),
        ``pressure_overrides`` per zone, ``expired`` leases, ``clipped`` blocks per bound
        (sessions for ``max_sessions``), ``edits`` as ``[operation, status, count]``.
    """
    counters = SessionCounters()
    if sam is not None:
        counters, sam.counters = sam.counters, counters
    overrides, pool.pressure_overrides = pool.pressure_overrides, Counter()
    return {
        "sessions": len(sam.sessions) - sam.num_heirs if sam is not None else 0,
        "blocks": {
            "ordinary": pool.num_gpu_blocks - 1 - pool.num_retained_blocks,
            "session": pool.num_blocks_in[Zone.SESSION],
            "ttl": pool.num_blocks_in[Zone.TTL],
        },
        "pressure_overrides": {zone.name.lower(): n for zone, n in overrides.items()},
        "expired": counters.expired,
        "clipped": dict(counters.clipped),
        "edits": [[*what, n] for what, n in counters.edits.items()],
    }
