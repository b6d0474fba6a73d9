"""Which sessions hold a block: the block -> chains half of the index.

The session -> blocks half is the chains themselves.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from vllm_agent_hint.sessions.chainset import ChainBits, ChainSet
from vllm_agent_hint.sessions.lineage import Chain

Holders = Chain | ChainSet | None
"""Who records a block: nobody, one chain, or several. Equal if and only if the chains are."""


class _Step:
    """What becomes of the blocks that had the same holders, in one operation.

    Args:
        after: Their holders from now on.
        is_tenants: Whether the other holders include one of the tenant that comes or goes.
    """

    __slots__ = ("after", "is_tenants", "num_blocks")

    def __init__(self, after: Holders, *, is_tenants: bool) -> None:
        self.after = after
        self.is_tenants = is_tenants
        self.num_blocks = 0


class BlockIndex:
    """For each block id, the chains that record it and its logical index in them.

    A list slot and four bytes per block of the pool, made when the first session is; an integer
    besides where several chains share a block. All owners of a block agree on its logical index,
    because its hash stands for the whole prefix.

    Blocks of a shared prefix have equal holders. So an operation works out the change once for
    each distinct set that it meets, and each further block costs a look-up: O(owners + blocks).
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._holders: list[Holders] = []
        self._logical: array[int] = array("i")
        self._bits = ChainBits()
        self._blocks_of = Counter[str]()
        self.num_records = 0

    def __bool__(self) -> bool:
        return self.num_records > 0

    # -- asking --------------------------------------------------------------------------------

    def holders(self, block_id: int) -> Holders:
        """Who records a block, as a key: equal holders need to be looked at once only."""
        return self._holders[block_id] if self._holders else None

    @property
    def holder_of(self) -> Callable[[int], Holders]:
        """``holders``, to be asked about many blocks of which some are held."""
        return self._holders.__getitem__ if self._holders else self.holders

    def entries(self, block_ids: Sequence[int]) -> Iterator[tuple[Holders, int]]:
        """Who records each of some blocks, and its logical index."""
        if not self._holders:
            return iter([(None, 0)] * len(block_ids))
        holders, logical = self._holders.__getitem__, self._logical.__getitem__
        return zip(map(holders, block_ids), map(logical, block_ids), strict=True)

    def chains_of(self, holders: Holders) -> tuple[Chain, ...]:
        """The chains behind a key. O(owners)."""
        if holders is None:
            return ()
        return self._bits.members(holders) if isinstance(holders, int) else (holders,)

    def others(self, chain: Chain, holders: Holders) -> Holders:
        """Holders without a chain, if it is one of them."""
        if isinstance(holders, int):
            return self._without(holders, self._bits.bit_if_any(chain))
        return None if holders is chain else holders

    def owners(self, block_id: int) -> tuple[Chain, ...]:
        """The chains that record this block. O(owners)."""
        return self.chains_of(self.holders(block_id))

    def is_held(self, block_id: int) -> bool:
        return bool(self._holders) and self._holders[block_id] is not None

    def is_held_only_by(self, chain: Chain, block_id: int) -> bool:
        return bool(self._holders) and self._holders[block_id] is chain

    def is_held_by_tenant(self, block_id: int, tenant: str) -> bool:
        """Whether a session of a tenant records a block. O(1)."""
        held = self.holders(block_id)
        if isinstance(held, int):
            return bool(held & self._bits.of_tenant(tenant))
        return held is not None and held.lineage.session.tenant == tenant

    def not_held_alone(self, chain: Chain, block_ids: Sequence[int]) -> list[int]:
        """Positions in ``block_ids`` of blocks that are not recorded by this chain only.

        On the path of each block of a hinted turn, 35 ns a block.
        """
        holders = self._holders
        if not holders:
            return list(range(len(block_ids)))
        return [k for k, block_id in enumerate(block_ids) if holders[block_id] is not chain]

    def logical_index(self, block_id: int) -> int:
        return self._logical[block_id]

    def num_blocks_of(self, tenant: str) -> int:
        """Blocks that sessions of a tenant record, each once, however many do. O(1)."""
        return self._blocks_of[tenant]

    # -- changing ------------------------------------------------------------------------------

    def add_all(self, chain: Chain, block_ids: Sequence[int], logical: Iterable[int]) -> None:
        """Record blocks for a chain that does not record them yet.

        Args:
            chain: Their new owner.
            block_ids: Which.
            logical: The logical index of each.
        """
        if not self._holders:
            self._holders = [None] * self._num_blocks
            self._logical = array("i", bytes(4 * self._num_blocks))
        holders = self._holders
        steps: dict[Holders, _Step] = {}
        last: Holders = None
        step = None
        for block_id, place in zip(block_ids, logical, strict=True):
            held = holders[block_id]
            if held is None:
                holders[block_id] = chain
                self._logical[block_id] = place
                continue
            if held is not last or step is None:
                last = held
                step = steps.get(held) or self._joined_by(chain, held, steps)
            holders[block_id] = step.after
            step.num_blocks += 1
        self.num_records += len(block_ids)
        num_shared = num_tenants = 0
        for held, step in steps.items():
            num_shared += step.num_blocks
            num_tenants += step.num_blocks * step.is_tenants
            if isinstance(held, Chain):
                held.num_shared += step.num_blocks
        chain.num_shared += num_shared
        self._blocks_of[chain.lineage.session.tenant] += len(block_ids) - num_tenants

    def discard_all(self, chain: Chain, block_ids: Sequence[int]) -> list[int]:
        """Drop a chain's records.

        Returns:
            Positions in ``block_ids`` of those that other chains still record.
        """
        holders = self._holders
        steps: dict[Holders, _Step] = {}
        last: Holders = None
        step = None
        shared: list[int] = []
        for k, block_id in enumerate(block_ids):
            held = holders[block_id]
            if held is chain:
                holders[block_id] = None
                continue
            if held is not last or step is None:
                last = held
                step = steps.get(held) or self._left_by(chain, held, steps)
            holders[block_id] = step.after
            step.num_blocks += 1
            shared.append(k)
        self.num_records -= len(block_ids)
        num_tenants = 0
        for step in steps.values():
            num_tenants += step.num_blocks * step.is_tenants
            if isinstance(step.after, Chain):
                self._shares_less(step.after, step.num_blocks)
        self._uncount(chain.lineage.session.tenant, len(block_ids) - num_tenants)
        self._shares_less(chain, len(shared))
        return shared

    def forget(self, block_id: int) -> tuple[Chain, ...]:
        """Drop a block whose content is gone. Returns the chains that recorded it."""
        owners = self.owners(block_id)
        if owners:
            self._holders[block_id] = None
            self.num_records -= len(owners)
            for tenant in {chain.lineage.session.tenant for chain in owners}:
                self._uncount(tenant, 1)
            if len(owners) > 1:
                for chain in owners:
                    self._shares_less(chain, 1)
        return owners

    def forget_all(self, block_ids: Iterable[int]) -> list[tuple[Chain, int]]:
        """Drop blocks whose content is gone. On the path of each block that a session loses.

        Returns:
            Each chain that recorded one, with its logical index.
        """
        if not self._holders:
            return []
        holders, logical = self._holders, self._logical
        found: list[tuple[Chain, int]] = []
        alone: dict[Chain, int] = {}
        for block_id in block_ids:
            held = holders[block_id]
            if isinstance(held, Chain):
                holders[block_id] = None
                alone[held] = alone.get(held, 0) + 1
                found.append((held, logical[block_id]))
            elif held is not None:
                found += [(chain, logical[block_id]) for chain in self.forget(block_id)]
        for chain, number in alone.items():
            self.num_records -= number
            self._uncount(chain.lineage.session.tenant, number)
        return found

    def hand_over(self, block_id: int, old: Chain, new: Chain) -> None:
        """Replace one owner of a block by another."""
        self.discard_all(old, (block_id,))
        self.add_all(new, (block_id,), (self._logical[block_id],))

    def rename(self, old_id: int, new_id: int) -> tuple[Chain, ...]:
        """The content of a block now lies in another. Returns the chains that record it."""
        owners = self.owners(old_id)
        if owners:
            self._holders[new_id], self._holders[old_id] = self._holders[old_id], None
            self._logical[new_id] = self._logical[old_id]
        return owners

    def clear(self) -> None:
        """Drop everything, as after a reset of the prefix cache."""
        self._holders = []
        self._logical = array("i")
        self._bits = ChainBits()
        self._blocks_of.clear()
        self.num_records = 0

    # -- one distinct set of holders -----------------------------------------------------------

    def _joined_by(self, chain: Chain, held: Holders, steps: dict[Holders, _Step]) -> _Step:
        assert held is not None
        before = held if isinstance(held, int) else self._bits.bit(held)
        own = self._bits.bit(chain)
        assert not before & own, "a chain records a block once"
        tenants = self._bits.of_tenant(chain.lineage.session.tenant)
        step = _Step(before | own, is_tenants=bool(before & tenants))
        steps[held] = step
        return step

    def _left_by(self, chain: Chain, held: Holders, steps: dict[Holders, _Step]) -> _Step:
        assert isinstance(held, int), "the chain does not record the block"
        own = self._bits.bit(chain)
        assert held & own, "the chain does not record the block"
        tenants = self._bits.of_tenant(chain.lineage.session.tenant)
        step = _Step(self._without(held, own), is_tenants=bool((held ^ own) & tenants))
        steps[held] = step
        return step

    def _without(self, holders: ChainSet, bit: ChainSet) -> Holders:
        left = holders & ~bit
        last = self._bits.only_member(left)
        return left if last is None else last

    def _shares_less(self, chain: Chain, num_blocks: int) -> None:
        chain.num_shared -= num_blocks
        if not chain.num_shared:
            self._bits.vacate(chain)

    def _uncount(self, tenant: str, num_blocks: int) -> None:
        self._blocks_of[tenant] -= num_blocks
        if not self._blocks_of[tenant]:
            del self._blocks_of[tenant]
