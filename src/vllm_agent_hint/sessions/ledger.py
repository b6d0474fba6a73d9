"""The accounts: which lineage holds which block. The only writer of block metadata."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress, groupby
from typing import NamedTuple

from vllm_agent_hint.sessions.blockmeta import BlockMetaPort, BulkMetaUpdate
from vllm_agent_hint.sessions.deadlines import DeadlinesOfOthers
from vllm_agent_hint.sessions.index import BlockIndex, Holders
from vllm_agent_hint.sessions.lineage import (
    LOST,
    Chain,
    ChainDiff,
    GroupLayout,
    Lineage,
    RecordedPrefix,
)
from vllm_agent_hint.sessions.tail import Record, tail_first
from vllm_agent_hint.sessions.usage import Usage
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
        self.usage = Usage(self.index)

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
        beside: dict[Holders, list[Chain]] = {}
        if chain.logical is not None:
            known = set(chain.logical)
            fresh = [new for new in newcomers if new.logical not in known]
            for new in fresh:
                computed = new.is_computed or self._computed_beside(chain, new.block_id, beside)
                chain.insert(new.logical, new.block_id, new.block_hash, computed=computed)
            added = [chain.position_of(new.logical) for new in fresh]
        else:
            for new in newcomers:
                if new.position > len(chain):
                    break
                computed = new.is_computed or self._computed_beside(chain, new.block_id, beside)
                chain.put(new.position, new.block_id, new.block_hash, computed=computed)
                added.append(new.position)
        self._associate(chain, added, deadline)

    def _computed_beside(
        self, chain: Chain, block_id: int, beside: dict[Holders, list[Chain]]
    ) -> bool:
        """Whether another lineage of the same session has computed a block.

        Args:
            chain: Whose session.
            block_id: Which block.
            beside: The session's chains among the holders that were met in this operation.
        """
        holders = self.index.holders(block_id)
        if holders not in beside:
            session = chain.lineage.session
            chains = self.index.chains_of(holders)
            beside[holders] = [c for c in chains if c.lineage.session is session]
        logical = self.index.logical_index(block_id) if beside[holders] else 0
        return any(other.computed[other.position_of(logical)] for other in beside[holders])

    def _associate(self, chain: Chain, positions: Sequence[int], deadline: float) -> None:
        """Count the session on newly recorded blocks."""
        if not positions:
            return
        self.index.add_all(
            chain, [chain.block_ids[i] for i in positions], map(chain.logical_index, positions)
        )
        self._mark(chain, positions[::-1], deadline, 0.0, session_ref_delta=1)

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
        block_ids, hashes = _without_lost(*_records(chain, positions))
        deadlines: float | list[float] = deadline
        shared = self.index.not_held_alone(chain, block_ids) if chain.num_shared else []
        if shared:
            deadlines = [deadline] * len(block_ids)
            current_of, settled = self.port.ttl_expire_at, max(deadline, own_before)
            uncertain: list[int] = []
            for k in shared:
                current = current_of(block_ids[k])
                if current > settled:
                    deadlines[k] = current
                elif current > deadline:
                    uncertain.append(k)
            others = self.deadlines_of_others(chain).of_all([block_ids[k] for k in uncertain])
            for k, latest in zip(uncertain, others, strict=True):
                if latest > deadline:
                    deadlines[k] = latest
        done = self.port.update_blocks_meta(
            block_ids, hashes, session_ref_delta=session_ref_delta, ttl_expire_at=deadlines
        )
        self._forget_refused(done)

    # -- ending --------------------------------------------------------------------------------

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
            floor = chains[0].position_of(-(-floor_token // self.layouts[0].block_size))
            first = max(floor, len(chains[0]) - num_records, 0)
            tails = [range(len(chains[0]) - 1, first - 1, -1)]
            block_ids, hashes = _records(chains[0], tails[0])
        else:
            records = tail_first(
                self.layouts, chains, limit=max(num_records, 0), floor_token=floor_token
            )
            block_ids = [chains[group].block_ids[i] for group, i in records]
            hashes = [chains[group].hashes[i] for group, i in records]
            taken = Counter(group for group, _ in records)
            tails = [range(len(c) - 1, len(c) - taken[c.group] - 1, -1) for c in chains]
        if history is not None:
            history += hashes
        gained = self._release(
            list(zip(chains, tails, strict=True)), block_ids, hashes, placement=placement
        )
        for chain, tail in zip(chains, tails, strict=True):
            chain.truncate(len(chain) - len(tail))
        return gained

    def release_range(self, lineage: Lineage, start_token: int, end_token: int) -> None:
        """End the records between two tokens and keep those behind; O(records in it)."""
        for chain in lineage.chains:
            size = self.layouts[chain.group].block_size
            inside = [
                position
                for position in range(len(chain))
                if start_token <= chain.logical_index(position) * size < end_token
                and chain.block_ids[position] != LOST
            ]
            self._release_positions(chain, inside)
            for position in inside:
                chain.mark_lost(position)

    def _release_positions(
        self,
        chain: Chain,
        positions: Sequence[int],
        *,
        placement: Placement = Placement.BACK,
    ) -> None:
        if positions:
            tail = sorted(positions, reverse=True)
            self._release([(chain, tail)], *_records(chain, tail), placement=placement)

    def _release(
        self,
        tails: Sequence[tuple[Chain, Sequence[int]]],
        block_ids: list[int],
        hashes: list[bytes],
        *,
        placement: Placement = Placement.BACK,
    ) -> int:
        """End records. A slice of expiry is one call: O(owners + blocks).

        Args:
            tails: Chains, and positions in each, tail first.
            block_ids: The same records in the order of reuse.
            hashes: Of the same.
            placement: See ``release_tail``.

        Returns:
            Blocks that became ordinary and free.
        """
        exclusive: set[int] = set()
        still_protected: dict[int, float] = {}
        for chain, positions in tails:
            if placement is Placement.FRONT:
                exclusive.update(self._exclusive(chain, positions))
            self._leave(chain, positions, still_protected)
        block_ids, hashes = _without_lost(block_ids, hashes)
        gained = 0
        if exclusive:
            expected = [h for i, h in zip(block_ids, hashes, strict=True) if i in exclusive]
            first = [i for i in block_ids if i in exclusive]
            gained = self._end_records(first, expected, 0.0, placement)
            hashes = [h for i, h in zip(block_ids, hashes, strict=True) if i not in exclusive]
            block_ids = [i for i in block_ids if i not in exclusive]
        deadlines: float | list[float] = 0.0
        if still_protected:
            deadlines = [still_protected.get(i, 0.0) for i in block_ids]
        return gained + self._end_records(block_ids, hashes, deadlines, Placement.BACK)

    def _end_records(
        self,
        block_ids: list[int],
        hashes: list[bytes],
        deadlines: float | list[float],
        placement: Placement,
    ) -> int:
        if not block_ids:
            return 0
        done = self.port.update_blocks_meta(
            block_ids, hashes, session_ref_delta=-1, ttl_expire_at=deadlines, placement=placement
        )
        self._forget_refused(done)
        return done.made_ordinary

    def _exclusive(self, chain: Chain, positions: Sequence[int]) -> list[int]:
        """Blocks that a chain's session alone computed and nobody outside was served from."""
        held = zip(*_records(chain, positions), positions, strict=True)
        hits, computed, index = self.usage.from_outside, chain.computed, self.index
        return [
            block_id
            for block_id, block_hash, i in held
            if computed[i]
            and block_id != LOST
            and hits.get(block_id) is not block_hash
            and index.is_held_only_by(chain, block_id)
        ]

    def _leave(
        self, chain: Chain, positions: Sequence[int], still_protected: dict[int, float]
    ) -> None:
        """Take a chain's records out of the index.

        Only a deadline that may be the chain's own makes the others be asked: leases that end by
        themselves end in the order of their deadlines, so the last owner is the only one to pay.

        Args:
            chain: Whose.
            positions: Of the records.
            still_protected: Receives the deadlines of blocks that others protect, by block id.
        """
        block_ids, _ = _without_lost(*_records(chain, positions))
        lineage = chain.lineage
        own = max(lineage.deadline, lineage.latest_written)
        uncertain: list[int] = []
        for k in self.index.discard_all(chain, block_ids):
            current = self.port.ttl_expire_at(block_ids[k])
            if current > own:
                still_protected[block_ids[k]] = current
            elif current:
                uncertain.append(block_ids[k])
        others = self.deadlines_of_others(chain).of_all(uncertain)
        still_protected.update(zip(uncertain, others, strict=True))

    # -- asking --------------------------------------------------------------------------------

    def free_alone(self, records: Sequence[Record], *, leased: bool) -> list[tuple[int, bytes]]:
        """The blocks of some records that nobody uses and no other session holds.

        What several lineages of the session hold is offered with the last of them, which is the
        one that was continued last.

        Args:
            records: They may have ended in the meantime.
            leased: Only blocks with a deadline, or only those without.

        Returns:
            Block ids and hashes. O(records), 0.5 us each.
        """
        holder_of = self.index.holder_of
        known: dict[Holders, bool] = {}

        def holds_alone(chain: Chain, block_id: int) -> bool:
            holders = holder_of(block_id)
            if holders is chain:
                return True
            if holders is None or chain.lineage is not chain.lineage.session.lineage:
                return False
            if holders not in known:
                session = chain.lineage.session
                chains = self.index.chains_of(holders)
                known[holders] = all(other.lineage.session is session for other in chains)
            return known[holders]

        alone = [
            (block_id, chain.hashes[position])
            for chain, position in records
            if position < len(chain.block_ids)
            and (block_id := chain.block_ids[position]) != LOST
            and holds_alone(chain, block_id)
        ]
        return list(compress(alone, self.port.are_free([i for i, _ in alone], leased=leased)))

    def deadlines_of_others(self, chain: Chain) -> DeadlinesOfOthers:
        """What other lineages give the blocks of a chain, for one operation."""
        return DeadlinesOfOthers(self.index, self.layouts[chain.group].block_size, chain)

    def _deadline_at(self, chain: Chain, logical: int) -> float:
        """The deadline that a chain's lineage gives one of its blocks."""
        size = self.layouts[chain.group].block_size
        for lease in chain.lineage.leases:
            if lease.end_token is None or logical < -(-lease.end_token // size):
                return lease.deadline
        return 0.0

    def is_exclusive(self, chain: Chain, position: int) -> bool:
        """Whether the session alone computed a block and nobody outside was served from it."""
        return bool(self._exclusive(chain, (position,)))

    # -- what the pool reports -----------------------------------------------------------------

    def blocks_reused(self, block_ids: Sequence[int]) -> None:
        """The pool has given these blocks to other content; their scalars are already zero."""
        for chain, logical in self.index.forget_all(block_ids):
            chain.mark_lost(chain.position_of(logical))
        self.usage.blocks_reused(block_ids)

    def block_moved(self, old_id: int, new_id: int) -> None:
        """The pool has moved a block's content and its scalars to another block."""
        for chain in self.index.rename(old_id, new_id):
            chain.block_ids[chain.position_of(self.index.logical_index(new_id))] = new_id
        self.usage.block_moved(old_id, new_id)

    def clear(self) -> None:
        """Forget every record, after a reset that has zeroed every scalar."""
        self.index.clear()
        self.usage.clear()

    def _forget_refused(self, done: BulkMetaUpdate) -> None:
        """A block lost its content unseen: drop its records, so that counts stay true."""
        if done.refused:
            self.blocks_reused([block_id for block_id, _ in done.refused])


def _records(chain: Chain, positions: Sequence[int]) -> tuple[list[int], list[bytes]]:
    """Block ids and hashes at some positions; a range falls."""
    if isinstance(positions, range):
        if not positions:
            return [], []
        # Eight thousand blocks every turn: slices, not a loop.
        first, last = positions[-1], positions[0] + 1
        block_ids, hashes = chain.block_ids[first:last], chain.hashes[first:last]
        block_ids.reverse()
        hashes.reverse()
        return block_ids, hashes
    return [chain.block_ids[i] for i in positions], [chain.hashes[i] for i in positions]


def _without_lost(block_ids: list[int], hashes: list[bytes]) -> tuple[list[int], list[bytes]]:
    if LOST not in block_ids:
        return block_ids, hashes
    held = [k for k, block_id in enumerate(block_ids) if block_id != LOST]
    return [block_ids[k] for k in held], [hashes[k] for k in held]
