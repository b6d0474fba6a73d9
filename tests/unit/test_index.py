"""The index beside dictionaries that are searched from end to end."""

from array import array
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_agent_hint.sessions.chainset import ChainBits
from vllm_agent_hint.sessions.index import BlockIndex
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.sessions.lineage import Chain
from vllm_agent_hint.sessions.session import Session

NUM_BLOCKS = 8
TENANTS = ("", "acme", "umbrella")

CHAINS = st.integers(0, 5)
BLOCKS = st.integers(0, NUM_BLOCKS - 1)
SOME_BLOCKS = st.lists(BLOCKS, unique=True)


def make_chains(number: int) -> list[Chain]:
    """Chains of as many sessions, which belong to the tenants in turn."""
    keys = [SessionKey(TENANTS[n % len(TENANTS)], None, f"session-{n}") for n in range(number)]
    return [Session(key, 1).lineage.chains[0] for key in keys]


class IndexMachine(RuleBasedStateMachine):
    """``records`` has, for each block id, its owners and its logical index."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(NUM_BLOCKS)
        self.chains = make_chains(6)
        self.records: dict[int, tuple[set[Chain], int]] = {}

    def owners(self, block_id: int) -> set[Chain]:
        return self.records.get(block_id, (set(), 0))[0]

    def leave(self, chain: Chain, block_id: int) -> None:
        self.owners(block_id).remove(chain)
        if not self.owners(block_id):
            del self.records[block_id]

    @rule(which=CHAINS, blocks=SOME_BLOCKS, shift=st.integers(0, 9))
    def blocks_are_recorded(self, which: int, blocks: list[int], shift: int) -> None:
        chain = self.chains[which]
        fresh = [i for i in blocks if chain not in self.owners(i)]
        logical = [self.records[i][1] if i in self.records else i + shift for i in fresh]
        self.index.add_all(chain, fresh, logical)
        for block_id, place in zip(fresh, logical, strict=True):
            self.records.setdefault(block_id, (set(), place))[0].add(chain)

    @rule(which=CHAINS, blocks=SOME_BLOCKS)
    def records_end(self, which: int, blocks: list[int]) -> None:
        chain = self.chains[which]
        held = [i for i in blocks if chain in self.owners(i)]
        shared = self.index.discard_all(chain, held)
        for block_id in held:
            self.leave(chain, block_id)
        assert shared == [k for k, block_id in enumerate(held) if self.owners(block_id)]

    @rule(block_id=BLOCKS)
    def a_block_loses_its_content(self, block_id: int) -> None:
        assert set(self.index.forget(block_id)) == self.owners(block_id)
        self.records.pop(block_id, None)

    @rule(block_id=BLOCKS, old=CHAINS, new=CHAINS)
    def a_record_is_handed_over(self, block_id: int, old: int, new: int) -> None:
        giver, taker = self.chains[old], self.chains[new]
        if giver in self.owners(block_id) and taker not in self.owners(block_id):
            self.index.hand_over(block_id, giver, taker)
            self.owners(block_id).add(taker)
            self.owners(block_id).remove(giver)

    @rule(old_id=BLOCKS, new_id=BLOCKS)
    def content_moves_into_a_block_that_nobody_records(self, old_id: int, new_id: int) -> None:
        if new_id not in self.records:
            assert set(self.index.rename(old_id, new_id)) == self.owners(old_id)
            if old_id in self.records:
                self.records[new_id] = self.records.pop(old_id)

    @rule()
    def the_prefix_cache_is_reset(self) -> None:
        self.index.clear()
        self.records.clear()
        self.chains = make_chains(6)

    @invariant()
    def each_block_has_its_owners(self) -> None:
        for block_id in range(NUM_BLOCKS):
            owners = self.owners(block_id)
            assert set(self.index.owners(block_id)) == owners
            assert len(self.index.owners(block_id)) == len(owners)
            assert self.index.is_held(block_id) == bool(owners)
            if owners:
                assert self.index.logical_index(block_id) == self.records[block_id][1]
        assert self.index.num_records == sum(len(owners) for owners, _ in self.records.values())
        assert bool(self.index) == bool(self.records)

    @invariant()
    def each_chain_knows_what_it_holds_alone_and_what_it_shares(self) -> None:
        for chain in self.chains:
            alone = [i for i in range(NUM_BLOCKS) if self.owners(i) == {chain}]
            assert [i for i in range(NUM_BLOCKS) if self.index.is_held_only_by(chain, i)] == alone
            rest = [i for i in range(NUM_BLOCKS) if i not in alone]
            assert self.index.not_held_alone(chain, range(NUM_BLOCKS)) == rest
            held = [owners for owners, _ in self.records.values() if chain in owners]
            assert chain.num_shared == sum(len(owners) > 1 for owners in held)

    @invariant()
    def equal_owners_are_equal_keys(self) -> None:
        for one in range(NUM_BLOCKS):
            for other in range(NUM_BLOCKS):
                same = self.index.holders(one) == self.index.holders(other)
                assert same == (self.owners(one) == self.owners(other))
            for chain in self.chains:
                others = self.index.others(chain, self.index.holders(one))
                assert set(self.index.chains_of(others)) == self.owners(one) - {chain}

    @invariant()
    def each_block_counts_once_for_a_tenant(self) -> None:
        counts = Counter[str]()
        for owners, _ in self.records.values():
            counts.update({chain.lineage.session.tenant for chain in owners})
        assert {tenant: self.index.num_blocks_of(tenant) for tenant in TENANTS} == {
            tenant: counts[tenant] for tenant in TENANTS
        }

    @invariant()
    def only_chains_that_share_have_a_bit(self) -> None:
        sharing = {c for owners, _ in self.records.values() if len(owners) > 1 for c in owners}
        assert {c for c in self.chains if self.index._bits.bit_if_any(c)} == sharing


TestIndex = IndexMachine.TestCase


def test_blocks_of_one_shared_prefix_have_one_set_of_owners_in_memory() -> None:
    index = BlockIndex(NUM_BLOCKS)
    for chain in make_chains(40):
        index.add_all(chain, range(NUM_BLOCKS), range(NUM_BLOCKS))
    assert len({id(index.holders(i)) for i in range(NUM_BLOCKS)}) == 1


def test_slices_of_one_shared_prefix_grow_together_again() -> None:
    index = BlockIndex(NUM_BLOCKS)
    chains = make_chains(40)
    for chain in chains:
        index.add_all(chain, range(NUM_BLOCKS), range(NUM_BLOCKS))
    for tail in ((7, 6, 5, 4), (3, 2, 1, 0)):
        index.discard_all(chains[0], tail)
    index.discard_all(chains[1], range(NUM_BLOCKS))
    assert len({id(index.holders(i)) for i in range(NUM_BLOCKS)}) == 1


@pytest.mark.parametrize("block_ids", [(0,), range(NUM_BLOCKS)], ids=["one", "many"])
def test_a_chain_records_a_block_once(block_ids: Sequence[int]) -> None:
    index = BlockIndex(NUM_BLOCKS)
    one, other = make_chains(2)
    for chain in (one, other):
        index.add_all(chain, range(NUM_BLOCKS), array("i", range(NUM_BLOCKS)))
    with pytest.raises(AssertionError):
        index.add_all(one, block_ids, block_ids)


@given(st.lists(st.sets(st.integers(0, 70)), max_size=6))
def test_a_set_of_chains_holds_those_whose_bits_it_has(sets: list[set[int]]) -> None:
    bits, chains = ChainBits(), make_chains(71)
    for numbers in sets:
        together = sum(bits.bit(chains[n]) for n in numbers)
        assert set(bits.members(together)) == {chains[n] for n in numbers}
        if numbers:
            only = chains[min(numbers)] if len(numbers) == 1 else None
            assert bits.only_member(together) is only


def test_a_bit_is_given_out_again_the_lowest_first() -> None:
    bits, chains = ChainBits(), make_chains(6)
    given_out = [bits.bit(chain) for chain in chains[:4]]
    for number in (2, 0, 1):
        bits.vacate(chains[number])
    assert [bits.bit(chain) for chain in chains[4:]] == given_out[:2]
    assert bits.bit_if_any(chains[2]) == 0
    assert bits.members(given_out[0] | given_out[3]) == (chains[4], chains[3])
