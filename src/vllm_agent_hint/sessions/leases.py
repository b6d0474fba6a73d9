"""How the protections that a request asks for become leases on its prompt."""

import math
from collections.abc import Sequence

from vllm_agent_hint.sessions.capacity import Clipping
from vllm_agent_hint.sessions.intent import Protection
from vllm_agent_hint.sessions.lineage import Lease, Lineage
from vllm_agent_hint.settings import Settings


def lay_leases(
    lineage: Lineage,
    protections: Sequence[Protection],
    now: float,
    settings: Settings,
    clipping: Clipping,
) -> list[Lease]:
    """Leases that begin now, rising in their end and falling in their deadline."""
    leases: list[Lease] = []
    for asked in sorted(
        protections, key=lambda p: math.inf if p.end_token is None else p.end_token
    ):
        ttl = min(asked.ttl, settings.max_ttl)
        if ttl < asked.ttl:
            clipping.blocks["max_ttl"] += 1
        lease = Lease(lineage, ttl, asked.end_token, now + ttl)
        while leases and leases[-1].deadline <= lease.deadline:
            leases.pop()
        reaches_further = not leases or leases[-1].end_token != lease.end_token
        if ttl > 0 and reaches_further and asked.end_token != 0:
            leases.append(lease)
    excess = len(leases) - settings.max_protections
    if excess > 0:
        clipping.blocks["max_protections"] += excess
        del leases[-excess:]
    return leases


def end_leases_at(lineage: Lineage, end_token: int) -> None:
    """Shorten the leases of a lineage to what is left of it."""
    kept: list[Lease] = []
    for lease in lineage.leases:
        reaches = lease.end_token is None or lease.end_token > end_token
        if reaches and (not end_token or (kept and kept[-1].end_token == end_token)):
            lease.disarm()
            continue
        if reaches:
            lease.end_token = end_token
        kept.append(lease)
    lineage.leases = kept
