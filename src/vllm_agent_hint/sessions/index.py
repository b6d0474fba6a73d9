"""Which sessions hold a block: the block -> chains half of the index.

The session -> blocks half is the chains themselves.
"""

from array import array

from vllm_agent_hint.sessions.lineage import Chain

Owners = Chain | set[Chain] | None


class BlockIndex:
    """For each block id, the chains that record it and its logical index in them.

    A list slot and four bytes per block of the pool, made when the first session is; a set
    only where several chains share a block. All owners of a block agree on its logical index,
    because its hash stands for the whole prefix.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._owners: list[Owners] = []
        self._logical: array[int] = array("i")
        self.num_records = 0

    def __bool__(self) -> bool:
        return self.num_records > 0

    def owners(self, block_id: int) -> tuple[Chain, ...]:
        """The chains that record this block. O(owners)."""
        held = self._owners[block_id] if self._owners else None
        if held is None:
            return ()
        return (held,) if isinstance(held, Chain) else tuple(held)

    def is_held(self, block_id: int) -> bool:
        return bool(self._owners) and self._owners[block_id] is not None

    def is_held_only_by(self, chain: Chain, block_id: int) -> bool:
        return bool(self._owners) and self._owners[block_id] is chain

    def is_held_by_tenant(self, block_id: int, tenant: str) -> bool:
        return any(chain.lineage.session.tenant == tenant for chain in self.owners(block_id))

    def num_blocks_of(self, tenant: str) -> int:
        """Blocks that sessions of a tenant record, each once. O(blocks)."""
        return sum(self.is_held_by_tenant(i, tenant) for i in range(len(self._owners)))

    def not_held_alone(self, chain: Chain, block_ids: list[int]) -> list[int]:
        """Positions in ``block_ids`` of blocks that are not recorded by this chain only.

        On the path of each block of a hinted turn, 35 ns a block.
        """
        owners = self._owners
        if not owners:
            return list(range(len(block_ids)))
        return [k for k, block_id in enumerate(block_ids) if owners[block_id] is not chain]

    def logical_index(self, block_id: int) -> int:
        return self._logical[block_id]

    def add(self, chain: Chain, block_id: int, logical: int) -> bool:
        """Record a block for a chain. Returns whether another chain records it too."""
        if not self._owners:
            self._owners = [None] * self._num_blocks
            self._logical = array("i", bytes(4 * self._num_blocks))
        held = self._owners[block_id]
        self.num_records += 1
        if held is None:
            self._owners[block_id] = chain
            self._logical[block_id] = logical
            return False
        if isinstance(held, Chain):
            held.num_shared += 1
            self._owners[block_id] = {held, chain}
        else:
            held.add(chain)
        chain.num_shared += 1
        return True

    def discard(self, chain: Chain, block_id: int) -> bool:
        """Drop a chain's record. Returns whether other chains still record the block."""
        held = self._owners[block_id]
        self.num_records -= 1
        if held is chain:
            self._owners[block_id] = None
            return False
        assert isinstance(held, set)
        held.remove(chain)
        chain.num_shared -= 1
        if len(held) == 1:
            (last,) = held
            last.num_shared -= 1
            self._owners[block_id] = last
        return True

    def forget(self, block_id: int) -> tuple[Chain, ...]:
        """Drop a block whose content is gone. Returns the chains that recorded it."""
        owners = self.owners(block_id)
        if owners:
            self._owners[block_id] = None
            self.num_records -= len(owners)
            if len(owners) > 1:
                for chain in owners:
                    chain.num_shared -= 1
        return owners

    def hand_over(self, block_id: int, old: Chain, new: Chain) -> None:
        """Replace one owner of a block by another."""
        logical = self._logical[block_id]
        self.discard(old, block_id)
        self.add(new, block_id, logical)

    def rename(self, old_id: int, new_id: int) -> tuple[Chain, ...]:
        """The content of a block now lies in another. Returns the chains that record it."""
        owners = self.owners(old_id)
        if owners:
            self._owners[new_id], self._owners[old_id] = self._owners[old_id], None
            self._logical[new_id] = self._logical[old_id]
        return owners

    def clear(self) -> None:
        """Drop everything, as after a reset of the prefix cache."""
        self._owners = []
        self._logical = array("i")
        self.num_records = 0
