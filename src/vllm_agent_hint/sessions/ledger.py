"""The accounts: which lineage holds which block. The only writer of block metadata."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from vllm_agent_hint.sessions.blockmeta import BlockMetaPort, BulkMetaUpdate
from vllm_agent_hint.sessions.index import BlockIndex
from vllm_agent_hint.sessions.lineage import (
    LOST,
    Chain,
    ChainDiff,
    GroupLayout,
    Lineage,
    RecordedPrefix,
    eviction_order,
)
from vllm_agent_hint.sessions.session import Session
from vllm_agent_hint.settings import Placement


class Newcomer(NamedTuple):
    """A block that a request adds to a chain. A tuple: a first turn makes thousands.

    Args:
        position: Place in the request's ``RecordedPrefix``.
        logical: Logical block index.
        block_id: The copy that a prefix match would return.
        block_hash: That block's own hash object.
        is_computed: The session computed it, rather than finding it cached.
    """

    position: int
    logical: int
    block_id: int
    block_hash: bytes
    is_computed: bool


class Ledger:
    """Keeps one session count on a block for each record, and the latest deadline of its owners.

    Every change of a chain goes through here, together with the change of the index and of the
    block's scalars that belongs to it.

    Args:
        port: Marks the blocks.
        layouts: One per KV cache group.
    """

    def __init__(self, port: BlockMetaPort, layouts: Sequence[GroupLayout]) -> None:
        self.port = port
        self.layouts = tuple(layouts)
        self.index = BlockIndex(port.num_gpu_blocks)
        self._outside_hits: dict[int, bytes] = {}
        """Block id -> the hash object that a request from outside the block's session hit."""
        self._unclaimed_use: dict[int, bytes] = {}
        """The same, where that request or the one that computed the block holds no claim on it."""

    # -- adding --------------------------------------------------------------------------------

    def newcomers(self, diff: ChainDiff, prefix: RecordedPrefix) -> list[Newcomer]:
        """The blocks to add, each as the copy that a prefix match would return.

        Stops at the first whose content the pool no longer serves: what lies behind it can't be
        hit either.
        """
        found: list[Newcomer] = []
        for position in diff.added:
            cached = self.port.cached_block(prefix.hashes[position])
            if cached is None:
                break
            logical = prefix.logical_index(position)
            found.append(Newcomer(position, logical, *cached, logical >= prefix.num_hits))
        return found

    def drop_replaced(
        self,
        chain: Chain,
        prefix: RecordedPrefix,
        diff: ChainDiff,
        *,
        replaces: bool,
        placement: Placement = Placement.BACK,
    ) -> None:
        """End the records of a chain that a request's blocks take the place of.

        Args:
            chain: To change.
            prefix: The request's blocks.
            diff: ``compare(chain, prefix)``.
            replaces: Whether records that the request does not have end. Otherwise they stay.
            placement: Where the superseded tail enters, of what the session alone has used.
        """
        if chain.logical is not None or prefix.logical is not None:
            keep: Iterable[int] = range(len(chain))
            if replaces:
                self._release_positions(chain, diff.dropped)
                keep = diff.kept
            chain.keep_only([i for i in keep if chain.block_ids[i] != LOST])
            return
        if replaces:
            tail = [i for i in diff.dropped if i >= diff.common]
            self._release_positions(chain, tail, placement=placement)
            chain.truncate(diff.common)
        # The same content in another block, or in none.
        moved = [i for i in diff.dropped if i < diff.common]
        self._release_positions(chain, moved)
        for i in moved:
            chain.mark_lost(i)

    def add(self, chain: Chain, newcomers: Sequence[Newcomer], deadline: float) -> None:
        """Record a request's blocks in a chain, after ``drop_replaced``.

        Args:
            chain: To change.
            newcomers: What to add, clipped already.
            deadline: Of the lease that will cover them; the lineage still has the old ones.
        """
        added: list[int] = []
        if chain.logical is not None:
            known = set(chain.logical)
            fresh = [new for new in newcomers if new.logical not in known]
            for new in fresh:
                computed = new.is_computed or self._computed_beside(chain, new.block_id)
                chain.insert(new.logical, new.block_id, new.block_hash, computed=computed)
            added = [chain.position_of(new.logical) for new in fresh]
        else:
            for new in newcomers:
                if new.position > len(chain):
                    break
                computed = new.is_computed or self._computed_beside(chain, new.block_id)
                chain.put(new.position, new.block_id, new.block_hash, computed=computed)
                added.append(new.position)
        self._associate(chain, added, deadline)

    def _computed_beside(self, chain: Chain, block_id: int) -> bool:
        """Whether another lineage of the same session has computed a block. O(owners)."""
        if not self.index.is_held(block_id):
            return False
        logical = self.index.logical_index(block_id)
        return any(
            bool(other.computed[other.position_of(logical)])
            for other in self.index.owners(block_id)
            if other.lineage.session is chain.lineage.session
        )

    def _associate(self, chain: Chain, positions: Sequence[int], deadline: float) -> None:
        """Count the session on newly recorded blocks."""
        if not positions:
            return
        for i in positions:
            self.index.add(chain, chain.block_ids[i], chain.logical_index(i))
        tail_first = positions[::-1]
        self._mark(chain, tail_first, deadline, 0.0, session_ref_delta=1)

    def write_deadlines(self, lineage: Lineage) -> None:
        """Write the deadlines of a lineage's leases to its blocks."""
        if not lineage.leases and not lineage.latest_written:
            return
        # New records carry the deadline of the first lease already, wherever it ends.
        own_before = max(lineage.latest_written, lineage.deadline)
        lineage.latest_written = lineage.deadline
        for chain in lineage.chains:
            start = 0
            spans: list[tuple[int, int, float]] = []
            for lease in lineage.leases:
                end = len(chain)
                if lease.end_token is not None:
                    size = self.layouts[chain.group].block_size
                    end = min(end, chain.position_of(-(-lease.end_token // size)))
                spans.append((start, end, lease.deadline))
                start = max(start, end)
            spans.append((start, len(chain), 0.0))
            for first, last, deadline in reversed(spans):
                if first < last:
                    self._mark(chain, range(last - 1, first - 1, -1), deadline, own_before)

    def renew(self, chain: Chain, positions: Sequence[int], own_before: float) -> None:
        """Give some blocks of a chain the deadlines of its leases.

        Args:
            chain: Whose blocks.
            positions: Which, tail first.
            own_before: The latest deadline that they may carry and that nobody gives any more.
        """
        for deadline, of_one_lease in groupby(
            positions, key=lambda i: self._deadline_at(chain, chain.logical_index(i))
        ):
            self._mark(chain, list(of_one_lease), deadline, max(own_before, deadline))

    def _mark(
        self,
        chain: Chain,
        positions: Sequence[int],
        deadline: float,
        own_before: float,
        *,
        session_ref_delta: int = 0,
    ) -> None:
        """Give blocks of a chain a deadline, unless another owner gives them a later one.

        Args:
            chain: Whose blocks.
            positions: Which, tail first.
            deadline: The chain's new one.
            own_before: The latest that the chain may have given them so far. The other owners
                are asked only where a shared block's deadline may have been that one and falls:
                an ordinary turn of one session among a thousand asks nobody.
            session_ref_delta: 1 for new records.
        """
        if isinstance(positions, range):
            # Eight thousand blocks every turn: slices, not a loop.
            first, last = positions[-1], positions[0] + 1
            block_ids, hashes = chain.block_ids[first:last], chain.hashes[first:last]
            block_ids.reverse()
            hashes.reverse()
        else:
            block_ids = [chain.block_ids[i] for i in positions]
            hashes = [chain.hashes[i] for i in positions]
        if LOST in block_ids:
            held = [k for k, block_id in enumerate(block_ids) if block_id != LOST]
            block_ids = [block_ids[k] for k in held]
            hashes = [hashes[k] for k in held]
        deadlines: float | list[float] = deadline
        shared = self.index.not_held_alone(chain, block_ids) if chain.num_shared else []
        if shared:
            deadlines = [deadline] * len(block_ids)
            for k in shared:
                current = self.port.ttl_expire_at(block_ids[k])
                if current > max(deadline, own_before):
                    deadlines[k] = current
                elif current > deadline:
                    deadlines[k] = max(deadline, self.deadline_of_others(chain, block_ids[k]))
        done = self.port.update_blocks_meta(
            block_ids, hashes, session_ref_delta=session_ref_delta, ttl_expire_at=deadlines
        )
        self._forget_refused(done)

    # -- ending --------------------------------------------------------------------------------

    def release_all(self, lineage: Lineage, *, placement: Placement = Placement.BACK) -> int:
        """End every record of a lineage; see ``release_tail``."""
        gained = self.release_tail(lineage, len(lineage), placement=placement)
        lineage.latest_written = 0.0
        lineage.trim_to = None
        for chain in lineage.chains:
            chain.logical = None
        return gained

    def split(self, lineage: Lineage, from_token: int) -> Lineage:
        """Move the records that begin at or behind a token into a lineage of their own."""
        tail = Lineage(lineage.session, len(lineage.chains))
        for chain, moved, layout in zip(lineage.chains, tail.chains, self.layouts, strict=True):
            chain.cut_off(chain.position_of(-(-from_token // layout.block_size)), moved)
            for block_id in moved.block_ids:
                if block_id != LOST:
                    self.index.hand_over(block_id, chain, moved)
        return tail

    def release_tail(
        self,
        lineage: Lineage,
        num_records: int,
        *,
        floor_token: int = 0,
        placement: Placement = Placement.BACK,
        history: list[bytes] | None = None,
    ) -> int:
        """End the last records of a lineage.

        Args:
            lineage: To shorten.
            num_records: At most this many, across its chains.
            floor_token: Records that begin before this token stay.
            placement: Where a freed block enters, if nobody else has use for it; others enter at
                the back.
            history: Receives the hashes, tail first.

        Returns:
            Blocks that became ordinary and free.
        """
        chains = lineage.chains
        if len(chains) == 1:
            chain = chains[0]
            floor = chain.position_of(-(-floor_token // self.layouts[0].block_size))
            first = max(floor, len(chain) - num_records, 0)
            block_ids, hashes = chain.block_ids[first:][::-1], chain.hashes[first:][::-1]
            owners = [chain] * len(block_ids)
            lengths = [first]
        else:
            records = self.tail_first(lineage, floor_token=floor_token, limit=num_records)
            block_ids = [c.block_ids[i] for c, i in records]
            hashes = [c.hashes[i] for c, i in records]
            owners = [c for c, _ in records]
            taken = Counter(c.group for c in owners)
            lengths = [len(c) - taken[c.group] for c in chains]
        if history is not None:
            history += hashes
        gained = self._release(block_ids, hashes, owners, placement=placement)
        for chain, length in zip(chains, lengths, strict=True):
            chain.truncate(length)
        return gained

    def tail_first(
        self, lineage: Lineage, *, floor_token: int = 0, limit: int | None = None
    ) -> list[tuple[Chain, int]]:
        """The records of a lineage in the order in which they should be reused.

        Args:
            lineage: Whose records.
            floor_token: Leave out those that begin before this token.
            limit: At most so many. Attention chains are then looked at no further back.
        """
        starts: list[int] = []
        logical: list[list[int]] = []
        for chain, layout in zip(lineage.chains, self.layouts, strict=True):
            first = 0 if limit is None or layout.is_checkpoint else max(0, len(chain) - limit)
            starts.append(first)
            logical.append([chain.logical_index(i) for i in range(first, len(chain))])
        return [
            (lineage.chains[g], starts[g] + k)
            for g, k in eviction_order(self.layouts, logical)
            if logical[g][k] * self.layouts[g].block_size >= floor_token
        ][:limit]

    def _release_positions(
        self,
        chain: Chain,
        positions: Sequence[int],
        *,
        placement: Placement = Placement.BACK,
    ) -> None:
        if not positions:
            return
        tail_first = sorted(positions, reverse=True)
        self._release(
            [chain.block_ids[i] for i in tail_first],
            [chain.hashes[i] for i in tail_first],
            [chain] * len(tail_first),
            placement=placement,
        )

    def _release(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        chains: Sequence[Chain],
        *,
        placement: Placement = Placement.BACK,
    ) -> int:
        """End records, in the order given. Returns blocks that became ordinary and free."""
        exclusive: tuple[list[int], list[bytes]] = ([], [])
        alone: tuple[list[int], list[bytes]] = ([], [])
        shared: tuple[list[int], list[bytes]] = ([], [])
        deadlines: list[float] = []
        for block_id, block_hash, chain in zip(block_ids, hashes, chains, strict=True):
            if block_id == LOST:
                continue
            if placement is Placement.FRONT and self._is_exclusive_block(chain, block_id):
                self.index.discard(chain, block_id)
                exclusive[0].append(block_id)
                exclusive[1].append(block_hash)
            elif self.index.discard(chain, block_id):
                shared[0].append(block_id)
                shared[1].append(block_hash)
                deadlines.append(self._deadline_without(chain, block_id))
            else:
                alone[0].append(block_id)
                alone[1].append(block_hash)
        gained = 0
        for (ids, expected), deadline, entering in (
            (exclusive, 0.0, placement),
            (alone, 0.0, Placement.BACK),
            (shared, deadlines, Placement.BACK),
        ):
            if ids:
                done = self.port.update_blocks_meta(
                    ids, expected, session_ref_delta=-1, ttl_expire_at=deadline, placement=entering
                )
                self._forget_refused(done)
                gained += done.made_ordinary
        return gained

    def _deadline_without(self, chain: Chain, block_id: int) -> float:
        """A shared block's deadline once a chain has left it.

        Only a deadline that may be the chain's own makes the others be asked: leases that end by
        themselves end in the order of their deadlines, so the last owner is the only one to pay.
        """
        current = self.port.ttl_expire_at(block_id)
        lineage = chain.lineage
        if current > max(lineage.deadline, lineage.latest_written):
            return current
        return self.deadline_of_others(chain, block_id)

    # -- asking --------------------------------------------------------------------------------

    def deadline_of_others(self, chain: Chain, block_id: int) -> float:
        """The latest deadline that other lineages give a block; 0.0 if none does. O(owners)."""
        logical = self.index.logical_index(block_id)
        return max(
            (self._deadline_at(c, logical) for c in self.index.owners(block_id) if c is not chain),
            default=0.0,
        )

    def _deadline_at(self, chain: Chain, logical: int) -> float:
        """The deadline that a chain's lineage gives one of its blocks."""
        size = self.layouts[chain.group].block_size
        for lease in chain.lineage.leases:
            if lease.end_token is None or logical < -(-lease.end_token // size):
                return lease.deadline
        return 0.0

    def is_exclusive(self, chain: Chain, position: int) -> bool:
        """Whether the session alone computed a block and nobody outside was served from it."""
        block_id = chain.block_ids[position]
        return (
            block_id != LOST
            and bool(chain.computed[position])
            and self.index.is_held_only_by(chain, block_id)
            and self._outside_hits.get(block_id) is not chain.hashes[position]
        )

    def _is_exclusive_block(self, chain: Chain, block_id: int) -> bool:
        return self.is_exclusive(chain, chain.position_of(self.index.logical_index(block_id)))

    def is_used_without_claim(self, chain: Chain, position: int) -> bool:
        """Whether somebody uses a block, or has computed it, who holds no claim on it."""
        block_hash = self._unclaimed_use.get(chain.block_ids[position])
        return block_hash is chain.hashes[position]

    # -- what the pool reports -----------------------------------------------------------------

    def note_hits(
        self, session: Session | None, group: int, block_ids: list[int], hashes: Iterable[bytes]
    ) -> None:
        """A request was served from these blocks; remember which of them belong to others.

        O(blocks), at list speed where a session finds its own unshared context.

        Args:
            session: The request's own, or None if it is not hinted.
            group: KV cache group.
            block_ids: What it was served from, in token order.
            hashes: The blocks' own hash objects; not asked for where nothing is to be noted.
        """
        if session is None:
            hit = dict(zip(block_ids, hashes, strict=True))
            self._outside_hits.update(hit)
            self._unclaimed_use.update(hit)
            return
        not_own = self.index.not_held_alone(session.lineage.chains[group], block_ids)
        if not not_own:
            return
        hashes = list(hashes)
        for k in not_own:
            owners = self.index.owners(block_ids[k])
            if not owners:
                self._unclaimed_use[block_ids[k]] = hashes[k]
            if not owners or any(c.lineage.session is not session for c in owners):
                self._outside_hits[block_ids[k]] = hashes[k]

    def blocks_reused(self, block_ids: Iterable[int]) -> None:
        """The pool has given these blocks to other content; their scalars are already zero."""
        for block_id in block_ids:
            logical = self.index.logical_index(block_id) if self.index else 0
            for chain in self.index.forget(block_id):
                chain.mark_lost(chain.position_of(logical))
            self._outside_hits.pop(block_id, None)
            self._unclaimed_use.pop(block_id, None)

    def block_moved(self, old_id: int, new_id: int) -> None:
        """The pool has moved a block's content and its scalars to another block."""
        for chain in self.index.rename(old_id, new_id):
            chain.block_ids[chain.position_of(self.index.logical_index(new_id))] = new_id
        for marks in (self._outside_hits, self._unclaimed_use):
            if old_id in marks:
                marks[new_id] = marks.pop(old_id)

    def forget_hits(self) -> None:
        """Nobody holds anything any more, so nobody can be from outside."""
        self._outside_hits.clear()
        self._unclaimed_use.clear()

    def clear(self) -> None:
        """Forget every record, after a reset that has zeroed every scalar."""
        self.index.clear()
        self.forget_hits()

    def _forget_refused(self, done: BulkMetaUpdate) -> None:
        """A block lost its content unseen: drop its records, so that counts stay true."""
        if done.refused:
            self.blocks_reused([block_id for block_id, _ in done.refused])
