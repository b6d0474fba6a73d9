"""What must hold of a plugged-in scheduler between any two of its calls (design.md, section 9)."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.sessions.lineage import LOST, Chain, Lineage


def check_invariants(scheduler: Any) -> None:
    """Invariants 2, 3, 5 and 7, and that no fault inside the session core was swallowed."""
    assert scheduler.agent_hint.sam is not None, scheduler.agent_hint.reason
    assert scheduler.agent_hint.reason == ""
    check_queue(scheduler.kv_cache_manager.block_pool)
    check_zones(scheduler.kv_cache_manager.block_pool)
    check_records(scheduler)
    check_protections(scheduler)
    check_standing(scheduler.agent_hint.sam)


def check_queue(pool: Any) -> None:
    """The free queue is stock's set of free blocks, each once."""
    queue = pool.free_block_queue
    free = queue.get_all_free_blocks()
    assert len(free) == queue.num_free_blocks == pool.get_num_free_blocks()
    ids = [block.block_id for block in free]
    assert len(ids) == len(set(ids)), "a block is in the free queue twice"
    assert all(block.ref_cnt == 0 and not block.is_null for block in free)
    unused = {b.block_id for b in pool.blocks if b.ref_cnt == 0 and not b.is_null}
    assert set(ids) == unused, "a block that nobody uses is missing from the free queue"
    backwards = []
    node = queue._end.prev_free_block
    while node is not queue.fake_free_list_head:
        if node.block_id >= 0:
            backwards.append(node.block_id)
        node = node.prev_free_block
    assert backwards == ids[::-1], "the links back do not mirror the links forth"


def check_zones(pool: Any) -> None:
    """Each free block lies between the boundaries that its scalars say; zones are counted right."""
    queue = pool.free_block_queue
    by_zone = {zone: list(queue.iter_zone(zone)) for zone in Zone}
    assert [b for zone in Zone for b in by_zone[zone]] == queue.get_all_free_blocks()
    for zone, blocks in by_zone.items():
        assert all(block.zone is zone for block in blocks)
    counts = Counter(block.zone for block in pool.blocks)
    for zone in (Zone.SESSION, Zone.TTL):
        assert pool.num_blocks_in[zone] == counts[zone]
    assert queue.has_sessions == (counts[Zone.SESSION] + counts[Zone.TTL] > 0)
    assert queue.taken == [], "blocks were taken from sessions and not reported"
    assert all(b._session_ref_cnt >= 0 for b in pool.blocks)
    assert pool.null_block.zone is Zone.ORDINARY


def check_records(scheduler: Any) -> None:
    """Index, chains and counts tell the same story, and every record is of content still there."""
    sam = scheduler.agent_hint.sam
    pool = scheduler.kv_cache_manager.block_pool
    held = Counter[int]()
    owners: dict[int, set[Chain]] = {}
    for chain in chains(sam):
        assert len(chain.block_ids) == len(chain.hashes) == len(chain.computed)
        if chain.logical is not None:
            assert chain.logical == sorted(set(chain.logical))
            assert len(chain.logical) == len(chain.block_ids)
        for position, block_id in enumerate(chain.block_ids):
            if block_id == LOST:
                continue
            block = pool.blocks[block_id]
            assert block.block_hash == chain.hashes[position], "a record outlived its content"
            assert sam.ledger.index.logical_index(block_id) == chain.logical_index(position)
            held[block_id] += 1
            owners.setdefault(block_id, set()).add(chain)
    for block in pool.blocks:
        assert block._session_ref_cnt == held[block.block_id]
        assert set(sam.ledger.index.owners(block.block_id)) == owners.get(block.block_id, set())
        assert not block._ttl_expire_at or block._session_ref_cnt, "a deadline without a session"
    assert sam.ledger.index.num_records == sum(held.values())
    for chain in chains(sam):
        shared = sum(len(owners[b]) > 1 for b in chain.block_ids if b != LOST)
        assert chain.num_shared == shared


def check_protections(scheduler: Any) -> None:
    """A block carries the latest deadline of its owners; it never rises along a chain.

    What an edit takes from an owner counts until its slice has come: an heir may get it then.
    """
    sam = scheduler.agent_hint.sam
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    for lineage in lineages(sam):
        deadlines = [lease.deadline for lease in lineage.leases]
        assert deadlines == sorted(deadlines, reverse=True)
    wanted: dict[int, float] = {}
    expiring: dict[int, set[float]] = {}
    for chain in chains(sam):
        lineage = chain.lineage
        for position, block_id in enumerate(chain.block_ids):
            if block_id == LOST:
                continue
            deadline = max(
                sam.ledger._deadline_at(chain, chain.logical_index(position)),
                _owed_to_heirs(sam, chain, position),
            )
            wanted[block_id] = max(wanted.get(block_id, 0.0), deadline)
            # A request may arrive while what has expired is being let go: it stops that.
            was_interrupted = not lineage.leases and lineage.session.live
            if lineage.trim_to is not None or was_interrupted:
                expiring.setdefault(block_id, set()).add(lineage.latest_written)
    for block_id, deadline in wanted.items():
        carried = blocks[block_id]._ttl_expire_at
        assert carried == deadline or (
            carried > deadline and carried in expiring.get(block_id, ())
        ), f"block {block_id} carries {carried}, its owners give it {deadline}"


def _owed_to_heirs(sam: Any, chain: Chain, position: int) -> float:
    """The deadline that an edit is taking from a block and has not handed over yet; 0.0 if none."""
    start = chain.logical_index(position) * sam.ledger.layouts[chain.group].block_size
    bequest = chain.lineage.bequest
    return max((d for end, d in bequest if end is None or start < end), default=0.0)


def check_standing(sam: Any) -> None:
    """Who rests and holds something is where the policy looks, and nobody else is."""
    for session in sam.sessions.values():
        rests = session.rested_at is not None
        assert rests <= (not session.live)
        gives = any(len(lineage) and lineage.trim_to != 0 for lineage in session.lineages)
        assert (rests and gives) <= (session in sam.standing) <= rests
    assert len(sam.standing) == sum(session in sam.standing for session in sam.sessions.values())


def check_nothing_left(scheduler: Any) -> None:
    """Invariant 4: every session has been freed, and nothing is alive."""
    sam = scheduler.agent_hint.sam
    pool = scheduler.kv_cache_manager.block_pool
    assert not any(b._session_ref_cnt or b._ttl_expire_at for b in pool.blocks)
    assert sam.sessions == {}
    assert sam.num_heirs == 0
    assert sam.history.size == 0
    assert len(sam.agenda.leases) == len(sam.agenda.unleased) == len(sam.agenda.idle) == 0
    assert sam.ledger.index.num_records == 0
    assert not any(sam.ledger.index.owners(b.block_id) for b in pool.blocks)
    assert scheduler.agent_hint.tracked == {}
    assert scheduler.agent_hint.operations._alive == {}
    assert pool.num_retained_blocks == 0
    assert not pool.free_block_queue.has_sessions
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def lineages(sam: Any) -> Iterator[Lineage]:
    for session in sam.sessions.values():
        yield from session.lineages
        for live in session.live:
            if live.held is not None:
                yield live.held
    attached = {id(lineage) for s in sam.sessions.values() for lineage in s.lineages}
    yield from (lineage for lineage in sam.releases.lineages if id(lineage) not in attached)


def chains(sam: Any) -> Iterator[Chain]:
    for lineage in lineages(sam):
        yield from lineage.chains
