"""What must hold of the session core and its blocks between any two calls (design.md 9)."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from tests.unit.plain_port import PlainPort
from vllm_agent_hint.sessions.lineage import LOST, Chain, Lineage
from vllm_agent_hint.sessions.manager import SessionAwareManager
from vllm_agent_hint.sessions.releases import Release
from vllm_agent_hint.settings import Settings

Owners = dict[int, list[tuple[Chain, int]]]
"""For each block id, ``(chain, logical index)`` of each record of it."""


def lineages(sam: SessionAwareManager) -> Iterator[Lineage]:
    for session in sam.sessions.values():
        yield from session.lineages
        yield from (live.held for live in session.live if live.held is not None)
    attached = {id(lineage) for s in sam.sessions.values() for lineage in s.lineages}
    yield from (lineage for lineage in sam.releases.lineages if id(lineage) not in attached)


def owners_by_chains(sam: SessionAwareManager) -> Owners:
    owners: Owners = {}
    for lineage in lineages(sam):
        for chain in lineage.chains:
            for position, block_id in enumerate(chain.block_ids):
                if block_id != LOST:
                    owners.setdefault(block_id, []).append((chain, chain.logical_index(position)))
    return owners


def check_invariants(sam: SessionAwareManager, port: PlainPort, settings: Settings) -> None:
    owners = owners_by_chains(sam)
    check_records(sam, port, owners)
    check_deadlines(sam, port, owners)
    check_wheels(sam)
    check_standing(sam)
    check_bounds(sam, port, settings)


def check_records(sam: SessionAwareManager, port: PlainPort, owners: Owners) -> None:
    """Invariant 3: counts, index and chains tell the same story."""
    for block_id, block in enumerate(port.blocks):
        held = owners.get(block_id, [])
        assert block.count == len(held), "counts are the associations held"
        assert set(sam.ledger.index.owners(block_id)) == {chain for chain, _ in held}
        assert len({id(chain) for chain, _ in held}) == len(held), "recorded twice in a chain"
        for chain, logical in held:
            assert sam.ledger.index.logical_index(block_id) == logical
            assert chain.hashes[chain.position_of(logical)] == block.hash
    num_records = sum(map(len, owners.values()))
    assert sum(block.count for block in port.blocks) == num_records
    assert sam.ledger.index.num_records == num_records
    tenants = Counter(t for held in owners.values() for t in {_tenant(c) for c, _ in held})
    for tenant in {_tenant(c) for held in owners.values() for c, _ in held} | {""}:
        assert sam.ledger.index.num_blocks_of(tenant) == tenants[tenant]
    shared = Counter(id(c) for held in owners.values() if len(held) > 1 for c, _ in held)
    for lineage in lineages(sam):
        for chain in lineage.chains:
            assert chain.num_shared == shared[id(chain)]
            assert len(chain.block_ids) == len(chain.hashes) == len(chain.computed)
            if chain.logical is not None:
                assert len(chain.logical) == len(chain.block_ids)
                assert chain.logical == sorted(set(chain.logical))


def _tenant(chain: Chain) -> str:
    return chain.lineage.session.tenant


def check_deadlines(sam: SessionAwareManager, port: PlainPort, owners: Owners) -> None:
    """A block carries the latest deadline of its owners, and none without an owner.

    Owners whose lease has run out, and which let go of their blocks a slice at a time, may have
    left the deadline there until it is their block's turn. Where an edit has ended it, they have:
    an heir may be about to get it.
    """

    def given(chain: Chain, logical: int) -> float:
        start = logical * sam.ledger.layouts[chain.group].block_size
        lineage = chain.lineage
        terms = [(lease.end_token, lease.deadline) for lease in lineage.leases]
        release = lineage.releasing
        if isinstance(release, Release) and release.is_current and release.estate is not None:
            terms += release.estate.written
        return max((d for end, d in terms if end is None or start < end), default=0.0)

    for block_id, block in enumerate(port.blocks):
        held = owners.get(block_id, [])
        wanted = max((given(*owner) for owner in held), default=0.0)
        lineages_of = [chain.lineage for chain, _ in held]
        # Of a live one, whatever was left when its request arrived is as it was.
        may_carry = [
            lineage.latest_written
            for lineage in lineages_of
            if lineage.trim_to is not None or lineage.session.live
        ]
        if block.deadline != wanted:
            assert block.deadline > wanted, "protected for less than an owner asked"
            assert block.deadline <= max(may_carry, default=0.0), "a deadline that no owner gives"
    for lineage in lineages(sam):
        for chain in lineage.chains:
            check_never_rises(chain, port, owners)


def check_never_rises(chain: Chain, port: PlainPort, owners: Owners) -> None:
    """Invariant 7, of neighbours that the same lineages hold; a lost copy leaves a hole."""
    resident = [i for i in chain.block_ids if i != LOST]
    for before, behind in pairwise(resident):
        holders = {c for c, _ in owners[before]}
        if holders >= {c for c, _ in owners[behind]} and not any(
            c.lineage.trim_to is not None or c.lineage.session.live for c in holders
        ):
            assert port.blocks[before].deadline >= port.blocks[behind].deadline


def check_wheels(sam: SessionAwareManager) -> None:
    """A session waits for one thing at a time, and for nothing while a request of it is alive."""
    trimming = {id(lineage) for lineage in sam.releases.lineages}
    armed = 0
    for session in sam.sessions.values():
        leases = sum(lease.is_armed for lease in session.leases)
        armed += leases + session.idle.is_armed
        is_trimming = any(id(lineage) in trimming for lineage in session.lineages)
        for lineage in session.lineages:
            assert (id(lineage) in trimming) == (lineage.trim_to is not None)
        if session.live:
            assert not leases, "the lease of a live request may not run out"
            assert not session.idle.is_armed
            for lineage in session.lineages:
                is_expiring = lineage.releasing is not None and lineage.releasing.is_expiry
                may_go_on = any(r.nearest is lineage or not r.is_placed for r in session.live)
                assert not (is_expiring and may_go_on), "what a request may go on with expires"
        else:
            assert leases == sum(1 for _ in session.leases)
            waits_for = [bool(leases), session.idle.is_armed, is_trimming and not leases]
            assert any(waits_for), "a session would never end"
            assert not (leases and session.idle.is_armed)
        assert not session.is_freed
        for live in session.live:
            assert live.session is session
            assert live.held is None or not any(e.is_armed for e in live.held.leases)
    assert len(sam.agenda.leases) + len(sam.agenda.unleased) + len(sam.agenda.idle) == armed
    waits = (
        len(sam.agenda.leases) + len(sam.agenda.unleased) + len(sam.agenda.idle) + len(sam.releases)
    )
    assert (sam.next_tick_at < float("inf")) == (waits > 0)


def check_standing(sam: SessionAwareManager) -> None:
    """Who rests and has something to give stands where the policy can find it, and nobody else."""
    standing = sam.standing
    for session in sam.sessions.values():
        rests = session.rested_at is not None
        assert rests <= (not session.live), "it rests while a request is alive"
        assert session.is_heir <= (not rests)
        gives = any(len(lineage) and lineage.trim_to != 0 for lineage in session.lineages)
        if rests and gives:
            assert session in standing, "nobody finds what it holds"
        if session in standing:
            assert rests
            # Some of it may have been let go since it began to stand.
            assert session.num_records, "a place was left behind"
    assert len(standing) == sum(session in standing for session in sam.sessions.values())
    for kind, classes in standing._classes.items():
        for queue in classes.values():
            assert queue.places
            assert queue.places == sorted(queue.places, key=lambda place: place.order)
            for place in queue.places:
                assert not place.is_left
                assert place in standing._places[place.session]
                assert place.order[0] == place.session.rested_at
                assert place.kind is kind
    in_queues = sum(
        len(q.places) for classes in standing._classes.values() for q in classes.values()
    )
    spent = sum(map(len, standing._spent.values()))
    assert sum(map(len, standing._places.values())) == in_queues + spent


def check_bounds(sam: SessionAwareManager, port: PlainPort, settings: Settings) -> None:
    assert len(sam.sessions) - sam.num_heirs <= settings.max_sessions
    assert sam.ledger.index.num_records <= settings.max_records
    share = int(settings.protected_share * (port.num_gpu_blocks - 1))
    assert port.num_retained_blocks <= share
    for tenant in {session.tenant for session in sam.sessions.values()}:
        assert sam.ledger.index.num_blocks_of(tenant) <= int(settings.tenant_share * share)
    assert sam.history.size == sum(
        len(s.history) + sum(len(tail.digests) for tail in s.superseded)
        for s in sam.sessions.values()
    )
    for session in sam.sessions.values():
        assert 1 <= len(session.lineages) <= settings.max_lineages
    assert sam.history.size <= settings.max_history
    assert sam.num_heirs == sum(s.is_heir for s in sam.sessions.values())


def check_nothing_left(sam: SessionAwareManager, port: PlainPort) -> None:
    """Invariant 4: every session has been freed and no request is alive."""
    assert sam.sessions == {}
    assert all(not block.count and not block.deadline for block in port.blocks)
    assert sam.ledger.index.num_records == 0
    assert not sam.ledger.index
    assert not any(sam.ledger.index.owners(i) for i in range(port.num_gpu_blocks))
    assert len(sam.agenda.leases) == len(sam.agenda.unleased) == len(sam.agenda.idle) == 0
    assert sam.history.size == sam.num_heirs == 0
    assert len(sam.releases) == len(sam.standing) == 0
