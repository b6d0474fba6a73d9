"""Read-only descriptions of sessions, for those who ask at ``/v1/agent_hint/sessions``.

A cache salt is a secret that users share with nobody: whether a session has one is all that is
said of it.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import nsmallest
from operator import attrgetter
from typing import Any, Final

from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.sessions.lineage import LOST, Chain, GroupLayout, Lease, Lineage
from vllm_agent_hint.sessions.session import Session
from vllm_agent_hint.stamp import digest_of

_SEPARATOR: Final = "\n"
"""Sorts before every character that a session id may hold, so that cursors sort like ids."""


def keys_of(tenant: str, keys: Iterable[Any]) -> Iterable[SessionKey]:
    """The named sessions of one tenant among all keys of SAM. O(keys), 0.1 us each."""
    return [key for key in keys if type(key) is SessionKey and key.tenant == tenant]


def page(keys: Iterable[SessionKey], limit: int, after: str | None) -> list[SessionKey]:
    """The next keys of one tenant, ordered by session id, then by a digest of the cache salt.

    The order does not depend on use, so that a session is neither skipped nor seen twice while
    others come and go between two pages. O(keys), 0.1 us each: only those that could stand on
    the page are compared by more than their id, since a digest costs 5 us.

    Args:
        keys: Of one tenant.
        limit: How many.
        after: The cursor of the last one seen; None to begin.
    """
    if after is None:
        rest = list(keys)
    else:
        seen_id = after.partition(_SEPARATOR)[0]
        rest = [
            key
            for key in keys
            if key.session_id > seen_id or (key.session_id == seen_id and cursor_of(key) > after)
        ]
    by_id = attrgetter("session_id")
    firsts = nsmallest(limit, rest, key=by_id)
    if len(firsts) == limit:
        # Equals of the last one, of which some may stand before it.
        last_id = firsts[-1].session_id
        firsts = [key for key in firsts if key.session_id < last_id]
        firsts += [key for key in rest if key.session_id == last_id]
    return sorted(firsts, key=cursor_of)[:limit]


def cursor_of(key: SessionKey) -> str:
    """Where a session stands in its tenant's list; the same on every engine."""
    return f"{key.session_id}{_SEPARATOR}{_salt_digest(key.tenant, key.cache_salt)}"


@lru_cache(maxsize=10_000)
def _salt_digest(tenant: str, cache_salt: str | None) -> str:
    return "" if cache_salt is None else digest_of("cache salt", tenant, cache_salt)


def summary(key: SessionKey, session: Session, layouts: Sequence[GroupLayout]) -> dict[str, Any]:
    """A line of the list. O(lineages): it looks at no block."""
    return {
        "cursor": cursor_of(key),
        "session_id": key.session_id,
        "has_cache_salt": key.cache_salt is not None,
        "parent_session_id": _id_of(session.parent),
        "live_requests": len(session.live),
        "lineages": len(session.lineages),
        "blocks": sum(len(lineage) for lineage in session.lineages),
        "tokens": sum(_tokens(lineage, layouts) for lineage in session.lineages),
    }


def describe(
    key: SessionKey, session: Session, layouts: Sequence[GroupLayout], now: float
) -> dict[str, Any]:
    """All that there is to know of a session. O(blocks), at C speed.

    Args:
        key: Its name.
        session: The session.
        layouts: One per KV cache group.
        now: Monotonic seconds.

    Returns:
        Plain data. ``tokens`` are those of the KV cache group that holds most, as in the results
        of edits; ``resident_blocks`` are the recorded ones whose content is still in the cache;
        ``remaining`` of a lease is None while a live request of the session holds it.
    """
    return {
        "session_id": key.session_id,
        "has_cache_salt": key.cache_salt is not None,
        "parent_session_id": _id_of(session.parent),
        "children": sorted(child for child in map(_id_of, session.children) if child is not None),
        "live_requests": len(session.live),
        "lineages": [
            {
                "tokens": _tokens(lineage, layouts),
                "blocks": len(lineage),
                "resident_blocks": sum(map(_resident, lineage.chains)),
                "leases": [_describe_lease(lease, now) for lease in lineage.leases],
            }
            for lineage in session.lineages
        ],
    }


def _describe_lease(lease: Lease, now: float) -> dict[str, Any]:
    return {
        "ttl": lease.ttl,
        "remaining": max(0.0, lease.deadline - now) if lease.is_armed else None,
        "end_token": lease.end_token,
    }


def _tokens(lineage: Lineage, layouts: Sequence[GroupLayout]) -> int:
    return max(
        len(chain) * layout.block_size
        for chain, layout in zip(lineage.chains, layouts, strict=True)
    )


def _resident(chain: Chain) -> int:
    return len(chain) - chain.block_ids.count(LOST)


def _id_of(session: Session | None) -> str | None:
    if session is None or not isinstance(session.key, SessionKey):
        return None
    return session.key.session_id
