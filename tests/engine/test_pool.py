"""The pool: stock's own as long as nothing is marked, and never short of a block when it is."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    init_none_hash,
    make_block_hash_with_group_id,
)

from tests.engine.naive_pool import NULL, NaivePool
from tests.engine.rig import make_request
from vllm_agent_hint.kvcache.block import AgentKVCacheBlock, Zone
from vllm_agent_hint.kvcache.pool import AgentBlockPool
from vllm_agent_hint.kvcache.queue import AgentFreeKVCacheBlockQueue
from vllm_agent_hint.sessions.blockmeta import BlockMetaUpdateResult
from vllm_agent_hint.settings import Placement

NUM_BLOCKS = 9
BLOCK_SIZE = 16
ZONE_NAMES = {Zone.ORDINARY: "A", Zone.SESSION: "B", Zone.TTL: "C"}
CONTENTS = st.integers(0, 5)
DEADLINES = st.sampled_from([None, 0.0, 50.0, 70.5])


def content(number: int) -> Any:
    """A block hash; a new object each time, as another request would bring."""
    return make_block_hash_with_group_id(BlockHash(sha256(number)), 0)


def ids(blocks: Any) -> list[int]:
    return [block.block_id for block in blocks]


def build(pool_cls: type[BlockPool], num_blocks: int = NUM_BLOCKS, **kwargs: Any) -> Any:
    kwargs = {"enable_caching": True, **kwargs}
    return pool_cls(num_gpu_blocks=num_blocks, hash_block_size=BLOCK_SIZE, **kwargs)


class PoolMachine(RuleBasedStateMachine):
    """What vLLM does to a pool, on whatever ``both`` compares. Never marks a block."""

    enable_caching = True

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []
        """Block ids in use, once for each user."""

    def both(self, name: str, *args: Any) -> Any:
        raise NotImplementedError

    def _give_back(self, name: str, data: st.DataObject) -> None:
        """Some of the blocks that are held, in any order, by this method of the pools."""
        order = data.draw(st.permutations(range(len(self.held))), "order")
        given = [self.held[k] for k in order[: data.draw(st.integers(1, len(order)), "blocks")]]
        self.both(name, given)
        for i in given:
            self.held.remove(i)

    @rule(n=st.integers(0, NUM_BLOCKS + 1))
    def get_new_blocks(self, n: int) -> None:
        self._get_new_blocks(n)

    def _get_new_blocks(self, n: int) -> None:
        given = self.both("get_new_blocks", n)
        if isinstance(given, list):
            self.held += given

    @rule(contents=st.lists(CONTENTS, unique=True))
    def touch_what_is_cached(self, contents: list[int]) -> None:
        found = [self.both("cached_block_id", c) for c in contents]
        hit = list(dict.fromkeys(i for i in found if i is not None))
        self.both("touch", hit)
        self.held += hit

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_blocks(self, data: st.DataObject) -> None:
        self._give_back("free_blocks", data)

    @precondition(lambda self: self.held and self.enable_caching)
    @rule(number=CONTENTS, data=st.data())
    def cache(self, number: int, data: st.DataObject) -> None:
        """The first hash of a block is its own; later ones are partial entries beside it."""
        self.both("cache", data.draw(st.sampled_from(self.held), "block"), number)

    @rule(block_ids=st.sets(st.integers(1, NUM_BLOCKS - 1), max_size=4))
    def evict_blocks(self, block_ids: set[int]) -> None:
        self.both("evict_blocks", block_ids)

    @rule(data=st.data())
    def move_block_hashes(self, data: st.DataObject) -> None:
        source = data.draw(st.integers(1, NUM_BLOCKS - 1), "source")
        target = data.draw(st.integers(1, NUM_BLOCKS - 1), "target")
        if source != target and not self.both("has_hash", target):
            self.both("move_block_hashes", source, target)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.both("reset_prefix_cache")


class VllmPool:
    """The operations of ``PoolMachine`` on a real pool, in and out as plain data."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.woken: list[int] = []

    def run(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self, name)(*args)
        except (AssertionError, RuntimeError, ValueError) as error:
            return type(error)

    def _blocks(self, block_ids: Any) -> list[KVCacheBlock]:
        return [self.pool.blocks[i] for i in block_ids]

    def get_new_blocks(self, n: int) -> list[int]:
        return ids(self.pool.get_new_blocks(n))

    def touch(self, block_ids: list[int]) -> None:
        self.pool.touch(self._blocks(block_ids))

    def free_blocks(self, block_ids: list[int]) -> None:
        self.pool.free_blocks(self._blocks(block_ids))

    def unpin_blocks(self, block_ids: list[int]) -> None:
        self.pool.unpin_blocks(
            self._blocks(block_ids), lambda block: self.woken.append(block.block_id)
        )

    def cache(self, block_id: int, number: int) -> None:
        self.pool._insert_block_hash(content(number), self.pool.blocks[block_id], BLOCK_SIZE)

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.pool.evict_blocks(block_ids)

    def move_block_hashes(self, source: int, target: int) -> None:
        self.pool.move_block_hashes(*self._blocks([source, target]))

    def reset_prefix_cache(self) -> bool:
        return self.pool.reset_prefix_cache()

    def cached_block_id(self, number: int) -> int | None:
        block = self.pool.cached_block_hash_to_block.get_one_block(content(number))
        return None if block is None else block.block_id

    def has_hash(self, block_id: int) -> bool:
        return self.pool.blocks[block_id].block_hash is not None

    def picture(self) -> Any:
        """All that can be seen from outside."""
        return (
            ids(self.pool.free_block_queue.get_all_free_blocks()),
            self.pool.get_num_free_blocks(),
            self.pool.get_usage(),
            [(b.ref_cnt, b.block_hash, b.block_hash_num_tokens) for b in self.pool.blocks],
            [self.cached_block_id(number) for number in range(6)],
            self.pool.cached_block_hashes_by_block,
            self.pool.take_events(),
            self.woken,
        )


class UnhintedPoolMachine(PoolMachine):
    """Invariant 1: nothing was ever marked, so stock's pool and ours can't be told apart."""

    def __init__(self) -> None:
        super().__init__()
        options = {"enable_caching": self.enable_caching, "enable_kv_cache_events": True}
        self.stock = VllmPool(build(BlockPool, **options))
        self.ours = VllmPool(build(AgentBlockPool, **options))

    def both(self, name: str, *args: Any) -> Any:
        stock, ours = self.stock.run(name, *args), self.ours.run(name, *args)
        assert ours == stock
        return stock

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unpin_blocks(self, data: st.DataObject) -> None:
        self._give_back("unpin_blocks", data)

    @invariant()
    def both_pools_look_the_same(self) -> None:
        assert self.ours.picture() == self.stock.picture()


class UnhintedPoolWithoutCachingMachine(UnhintedPoolMachine):
    enable_caching = False


TestUnhintedPool = UnhintedPoolMachine.TestCase
TestUnhintedPool.settings = settings(max_examples=70, stateful_step_count=30, deadline=None)
TestUnhintedPoolWithoutCaching = UnhintedPoolWithoutCachingMachine.TestCase
TestUnhintedPoolWithoutCaching.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None
)


class ShadowPoolMachine(UnhintedPoolMachine):
    """In shadow mode blocks may be marked, too: the order is stock's, the counts are ours."""

    def __init__(self) -> None:
        super().__init__()
        self.ours.pool.keep_stock_order()

    @rule(
        block_id=st.integers(0, NUM_BLOCKS - 1),
        delta=st.integers(-1, 2),
        deadline=DEADLINES,
        placement=st.sampled_from(Placement),
    )
    def a_block_is_marked(
        self, block_id: int, delta: int, deadline: float | None, placement: Placement
    ) -> None:
        self._mark(block_id, delta, deadline, placement)

    @precondition(lambda self: self.ours.pool.get_num_free_blocks() >= 3)
    @rule(n=st.integers(1, 3), number=st.integers(0, 3), deadline=DEADLINES)
    def a_context_is_cached_marked_and_freed(
        self, n: int, number: int, deadline: float | None
    ) -> None:
        given = self.both("get_new_blocks", n)
        for k, block_id in enumerate(given):
            self.both("cache", block_id, number + k)
            self._mark(block_id, 1, deadline, Placement.BACK)
        self.both("free_blocks", given[::-1])

    @precondition(lambda self: self.ours.pool.num_retained_blocks)
    @rule(n=st.integers(1, NUM_BLOCKS - 1))
    def get_marked_blocks(self, n: int) -> None:
        pool = self.ours.pool
        coming = pool.free_block_queue.get_all_free_blocks()[:n]
        kept = sum(block.zone is not Zone.ORDINARY for block in coming)
        before = pool.pressure_overrides.total()
        if n <= pool.get_num_free_blocks():
            self._get_new_blocks(n)
            assert pool.pressure_overrides.total() == before + kept

    def _mark(
        self, block_id: int, delta: int, deadline: float | None, placement: Placement
    ) -> None:
        pool = self.ours.pool
        pool.update_blocks_meta(
            [block_id],
            [pool.blocks[block_id].block_hash],
            session_ref_delta=delta,
            ttl_expire_at=deadline,
            placement=placement,
        )

    @invariant()
    def marked_blocks_are_counted(self) -> None:
        zones = [block.zone for block in self.ours.pool.blocks]
        for zone in (Zone.SESSION, Zone.TTL):
            assert self.ours.pool.num_blocks_in[zone] == zones.count(zone)


TestShadowPool = ShadowPoolMachine.TestCase
TestShadowPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


class HintedPoolMachine(PoolMachine):
    """Blocks are marked at random; the pool stays what the naive one says."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = build(AgentBlockPool)
        self.pool.observer = self
        self.vllm = VllmPool(self.pool)
        self.naive = NaivePool(NUM_BLOCKS)
        self.naive.queue.on_shortage = self._on_naive_shortage
        self.naive.queue.on_choice = self._on_naive_choice
        self.reported: list[tuple[Any, ...]] = []
        self.expiring: list[int] = []
        """Retained block ids whose marks go when zone A falls short, as due leases do."""
        self.chosen: list[int] = []
        """Block ids that are to go first, wherever they are."""
        self.expired: list[tuple[list[int], list[Any], int, list[float]]] = []

    # -- PoolObserver ----------------------------------------------------------------------------

    def blocks_reused(self, block_ids: list[int]) -> None:
        for i in block_ids:
            assert self.pool.blocks[i].zone is Zone.ORDINARY, "its marks are gone by now"
        self.reported.append(("reused", *block_ids))

    def block_moved(self, old_id: int, new_id: int) -> None:
        self.reported.append(("moved", old_id, new_id))

    def pool_reset(self) -> None:
        self.reported.append(("reset",))

    def pool_short(self, num_blocks: int) -> None:
        """Let leases run out in the midst of an allocation. The naive pool is yet to come."""
        self.reported.append(("short", num_blocks))
        due = [i for i in self.expiring if self.pool.blocks[i].prev_free_block is not None]
        expected = [self.pool.blocks[i].block_hash for i in due]
        for i, block_hash in zip(due, expected, strict=True):
            self.pool.update_blocks_meta(
                [i],
                [block_hash],
                session_ref_delta=-self.pool.blocks[i]._session_ref_cnt,
                ttl_expire_at=0.0,
            )

    def _on_naive_shortage(self, num_blocks: int) -> None:
        self.naive.reported.append(("short", num_blocks))
        for i in self.expiring:
            if i in self.naive.queue.order:
                self.naive.update_blocks_meta(
                    [i], self.naive.hashes[i][:1], -self.naive.count[i], [0.0]
                )

    def blocks_wanted(self, zone: Zone, num_blocks: int) -> int:
        """Free or not, of this zone or another, with the content that is expected or another."""
        self.reported.append(("wanted", "ABC"[zone], num_blocks))
        blocks = [self.pool.blocks[i] for i in self.chosen[:num_blocks]]
        self.pool.reuse_next([(b.block_id, b._block_hash) for b in blocks])
        self.pool.reuse_next([(b.block_id, b"of other content") for b in self.pool.blocks])
        free = self.pool.are_free([b.block_id for b in blocks], leased=zone is Zone.TTL)
        return sum(
            is_free and block.zone is zone for block, is_free in zip(blocks, free, strict=True)
        )

    def _on_naive_choice(self, zone: str, num_blocks: int) -> int:
        self.naive.reported.append(("wanted", zone, num_blocks))
        queue, zones = self.naive.queue, self.naive.zones
        first = [i for i in self.chosen[:num_blocks] if i in queue.order]
        queue.enter(first, zones, Placement.FRONT)
        return sum(zones[i] == zone for i in first)

    # -- both ------------------------------------------------------------------------------------

    def both(self, name: str, *args: Any) -> Any:
        ours = self.vllm.run(name, *args)
        if name == "cached_block_id":
            cached = self.naive.cached_block(content(*args))
            assert self.pool.cached_block(content(*args)) == cached
            naive = None if cached is None else cached[0]
        elif name == "has_hash":
            naive = bool(self.naive.hashes[args[0]])
        elif name == "cache":
            naive = self.naive.cache(args[0], content(args[1]))
        else:
            try:
                naive = getattr(self.naive, name)(*args)
            except ValueError:
                naive = ValueError
        assert ours == naive
        return ours

    @rule(data=st.data())
    def leases_will_run_out(self, data: st.DataObject) -> None:
        retained = [i for i, zone in self.naive.zones.items() if zone != "A"]
        if retained:
            self.expiring = data.draw(st.lists(st.sampled_from(retained), unique=True), "due")

    @rule(chosen=st.lists(st.integers(1, NUM_BLOCKS - 1), unique=True))
    def some_blocks_are_to_go_first(self, chosen: list[int]) -> None:
        self.chosen = chosen

    @invariant()
    def due_leases_are_those_of_retained_blocks(self) -> None:
        zones = self.naive.zones
        self.expiring = [i for i in self.expiring if zones[i] != "A"]

    # -- marking ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.naive.queue.order) >= 3)
    @rule(n=st.integers(1, 3), number=st.integers(0, 3), deadline=DEADLINES)
    def a_context_is_cached_marked_and_freed(
        self, n: int, number: int, deadline: float | None
    ) -> None:
        given = self.both("get_new_blocks", n)
        for k, block_id in enumerate(given):
            self.both("cache", block_id, number + k)
            self._mark(block_id, None, 1, deadline)
        self.both("free_blocks", given[::-1])

    @precondition(lambda self: self.pool.num_retained_blocks)
    @rule()
    def get_every_free_block(self) -> None:
        self._get_new_blocks(self.pool.get_num_free_blocks())

    @rule(
        block_id=st.integers(0, NUM_BLOCKS - 1),
        number=st.none() | CONTENTS,
        delta=st.integers(-2, 2),
        deadline=DEADLINES,
    )
    def update_block_meta(
        self, block_id: int, number: int | None, delta: int, deadline: float | None
    ) -> None:
        self._mark(block_id, number, delta, deadline)

    def _mark(self, block_id: int, number: int | None, delta: int, deadline: float | None) -> None:
        """``number`` None takes the block as it is, without a check of its hash."""
        own = self.naive.hashes[block_id][:1]
        expected = content(number) if number is not None else (own[0] if own else None)
        result = self.pool.update_block_meta(
            block_id=block_id,
            expected_block_hash=None if number is None else expected,
            session_ref_delta=delta,
            ttl_expire_at=deadline,
        )
        assert [result] == self.naive.update_blocks_meta([block_id], [expected], delta, [deadline])

    @precondition(lambda self: any(self.naive.hashes))
    @rule(
        delta=st.integers(-1, 1),
        one_for_all=st.booleans(),
        placement=st.sampled_from(Placement),
        data=st.data(),
    )
    def update_blocks_meta(
        self, delta: int, one_for_all: bool, placement: Placement, data: st.DataObject
    ) -> None:
        hashed = [i for i in self.naive.ids if self.naive.hashes[i]]
        chosen = st.sampled_from(hashed) | st.integers(0, NUM_BLOCKS - 1)
        block_ids = data.draw(st.lists(chosen, min_size=1, unique=True), "blocks")
        expected = []
        for i in block_ids:
            own = self.naive.hashes[i][:1]
            is_right = own and data.draw(st.integers(0, 5), f"right hash for {i}?")
            expected.append(own[0] if is_right else data.draw(st.sampled_from([content(0), None])))
        if one_for_all:
            deadline = data.draw(DEADLINES, "deadline")
            deadlines = [deadline] * len(block_ids)
        else:
            each = st.sampled_from([0.0, 50.0, 70.5])
            deadlines = [data.draw(each, f"deadline of {i}") for i in block_ids]
        zones, free = self.naive.zones, set(self.naive.queue.order)
        done = self.pool.update_blocks_meta(
            block_ids,
            expected,
            session_ref_delta=delta,
            ttl_expire_at=deadlines[0] if one_for_all else deadlines,
            placement=placement,
        )
        results = self.naive.update_blocks_meta(block_ids, expected, delta, deadlines, placement)
        refused = [
            (i, result)
            for i, result in zip(block_ids, results, strict=True)
            if result is not BlockMetaUpdateResult.UPDATED
        ]
        assert done.refused == refused
        assert done.updated == len(block_ids) - len(refused)
        assert done.made_ordinary == sum(
            zones[i] != "A" and self.naive.zones[i] == "A" and i in free for i in block_ids
        )

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def an_allocation_succeeds_exactly_when_stocks_would(self) -> None:
        """Stock refuses when more blocks are wanted than have no user; see get_new_blocks."""
        unused = sum(block.ref_cnt == 0 and not block.is_null for block in self.pool.blocks)
        assert self.pool.get_num_free_blocks() == unused

    @invariant()
    def reference_counts_and_hashes_are_untouched_by_marks(self) -> None:
        assert [b.ref_cnt for b in self.pool.blocks] == self.naive.ref_cnt
        assert [self.held.count(i) for i in self.naive.ids] == self.naive.ref_cnt
        own = [hashes[0] if hashes else None for hashes in self.naive.hashes]
        assert [b.block_hash for b in self.pool.blocks] == own

    @invariant()
    def marks_are_those_of_the_naive_pool(self) -> None:
        assert [b._session_ref_cnt for b in self.pool.blocks] == self.naive.count
        assert [b._ttl_expire_at for b in self.pool.blocks] == self.naive.deadline
        assert [self.pool.ttl_expire_at(i) for i in self.naive.ids] == self.naive.deadline
        assert all(self.naive.hashes[i] for i, zone in self.naive.zones.items() if zone != "A")

    @invariant()
    def free_blocks_lie_in_the_order_of_the_naive_queue(self) -> None:
        queue = self.pool.free_block_queue
        assert ids(queue.get_all_free_blocks()) == self.naive.queue.order
        for zone, name in ZONE_NAMES.items():
            assert ids(queue.iter_zone(zone)) == self.naive.queue.zones[name]

    @invariant()
    def blocks_in_each_zone_are_counted(self) -> None:
        zones = list(self.naive.zones.values())
        assert self.pool.num_blocks_in[Zone.SESSION] == zones.count("B")
        assert self.pool.num_blocks_in[Zone.TTL] == zones.count("C")
        assert self.pool.num_retained_blocks == zones.count("B") + zones.count("C")
        assert self.pool.free_block_queue.has_sessions == (set(zones) != {"A"})

    @invariant()
    def each_broken_reservation_is_counted_and_reported(self) -> None:
        assert self.reported == self.naive.reported
        overrides = {ZONE_NAMES[z]: n for z, n in self.pool.pressure_overrides.items() if n}
        assert overrides == self.naive.overrides
        assert self.pool.free_block_queue.taken == []


TestHintedPool = HintedPoolMachine.TestCase
TestHintedPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# -- one behaviour each --------------------------------------------------------------------------


@pytest.fixture
def pool() -> Any:
    return build(AgentBlockPool)


def cached(pool: Any, numbers: range) -> list[AgentKVCacheBlock]:
    """Free blocks with these contents, the first in the queue first."""
    blocks = pool.get_new_blocks(len(numbers))
    for number, block in zip(numbers, blocks, strict=True):
        pool._insert_block_hash(content(number), block, BLOCK_SIZE)
    pool.free_blocks(blocks)
    return blocks


def mark(pool: Any, block: Any, **kwargs: Any) -> BlockMetaUpdateResult:
    return pool.update_block_meta(
        block_id=block.block_id, expected_block_hash=block.block_hash, **kwargs
    )


def scalars(block: Any) -> tuple[int, float]:
    return block._session_ref_cnt, block._ttl_expire_at


def refusals() -> list[Any]:
    reasons = BlockMetaUpdateResult
    return [
        pytest.param(lambda p, b: (b.block_id, content(99)), reasons.STALE_HASH, id="stale hash"),
        pytest.param(lambda p, b: (NUM_BLOCKS - 1, None), reasons.STALE_HASH, id="hashless block"),
        pytest.param(lambda p, b: (NULL, None), reasons.NULL_BLOCK, id="null block"),
        pytest.param(lambda p, b: (NULL, content(0)), reasons.NULL_BLOCK, id="null block, hash"),
        pytest.param(lambda p, b: (NUM_BLOCKS, None), reasons.UNKNOWN_BLOCK, id="unknown block"),
        pytest.param(lambda p, b: (-1, content(0)), reasons.UNKNOWN_BLOCK, id="negative id"),
        pytest.param(lambda p, b: (b.block_id, None), reasons.NEGATIVE_COUNT, id="negative count"),
    ]


@pytest.mark.parametrize(("target", "reason"), refusals())
def test_a_refused_update_names_its_reason_and_changes_nothing(
    pool: Any, target: Callable[..., Any], reason: BlockMetaUpdateResult
) -> None:
    (block,) = cached(pool, range(1))
    mark(pool, block, session_ref_delta=1, ttl_expire_at=5.0)
    before = [(b.ref_cnt, b.block_hash, *scalars(b)) for b in pool.blocks]
    block_id, expected = target(pool, block)
    delta = -2 if reason is BlockMetaUpdateResult.NEGATIVE_COUNT else 1
    assert reason is pool.update_block_meta(
        block_id=block_id,
        expected_block_hash=expected,
        session_ref_delta=delta,
        ttl_expire_at=9.0,
    )
    assert [(b.ref_cnt, b.block_hash, *scalars(b)) for b in pool.blocks] == before


def test_a_marked_free_block_outlives_ordinary_ones(pool: Any) -> None:
    kept, *others = cached(pool, range(3))
    mark(pool, kept, session_ref_delta=1)
    given = pool.get_new_blocks(NUM_BLOCKS - 2)
    assert kept not in given
    assert kept.block_hash == content(0)
    assert all(block in given for block in others)


def test_an_allocation_that_needs_every_block_gets_protected_ones_too(pool: Any) -> None:
    blocks = cached(pool, range(NUM_BLOCKS - 1))
    for block in blocks[:3]:
        mark(pool, block, session_ref_delta=1)
    for block in blocks[3:]:
        mark(pool, block, session_ref_delta=1, ttl_expire_at=1e9)
    assert len(pool.get_new_blocks(NUM_BLOCKS - 1)) == NUM_BLOCKS - 1
    assert pool.pressure_overrides == {Zone.SESSION: 3, Zone.TTL: NUM_BLOCKS - 4}
    assert all(scalars(block) == (0, 0.0) for block in pool.blocks)


def test_a_deadline_ends_only_by_being_written_however_late_it_is(pool: Any) -> None:
    kept, other = cached(pool, range(2))
    mark(pool, kept, session_ref_delta=1, ttl_expire_at=1e-9)
    mark(pool, other, session_ref_delta=1)
    assert ids(pool.free_block_queue.iter_zone(Zone.TTL)) == [kept.block_id]
    mark(pool, kept, ttl_expire_at=0.0)
    assert ids(pool.free_block_queue.iter_zone(Zone.SESSION)) == [other.block_id, kept.block_id]


def test_marks_of_a_block_in_use_tell_where_it_is_freed_to(pool: Any) -> None:
    blocks = cached(pool, range(2))
    pool.touch(blocks)
    mark(pool, blocks[0], session_ref_delta=1, ttl_expire_at=5.0)
    assert [block.ref_cnt for block in blocks] == [1, 1]
    pool.free_blocks(blocks)
    assert ids(pool.free_block_queue.iter_zone(Zone.TTL)) == [blocks[0].block_id]


def test_an_evicted_block_is_the_next_to_be_reused(pool: Any) -> None:
    _, kept = cached(pool, range(2))
    mark(pool, kept, session_ref_delta=1, ttl_expire_at=5.0)
    pool.evict_blocks({kept.block_id})
    assert scalars(kept) == (0, 0.0)
    assert pool.get_new_blocks(1) == [kept]


def test_marks_follow_the_content_into_another_block(pool: Any) -> None:
    (source,) = cached(pool, range(1))
    mark(pool, source, session_ref_delta=2, ttl_expire_at=5.0)
    (target,) = pool.get_new_blocks(1)
    pool.move_block_hashes(source, target)
    assert scalars(source) == (0, 0.0)
    assert scalars(target) == (2, 5.0)
    assert pool.cached_block(content(0)) == (target.block_id, content(0))
    assert source in pool.free_block_queue.iter_zone(Zone.ORDINARY)


def test_a_reset_zeroes_every_mark_and_a_failed_one_none(pool: Any) -> None:
    blocks = cached(pool, range(2))
    for block in blocks:
        mark(pool, block, session_ref_delta=1, ttl_expire_at=5.0)
    pool.touch(blocks[:1])
    assert not pool.reset_prefix_cache()
    assert [scalars(block) for block in blocks] == [(1, 5.0), (1, 5.0)]
    pool.free_blocks(blocks[:1])
    assert pool.reset_prefix_cache()
    assert [scalars(block) for block in blocks] == [(0, 0.0), (0, 0.0)]
    assert len(list(pool.free_block_queue.iter_zone(Zone.ORDINARY))) == NUM_BLOCKS - 1
    assert pool.num_retained_blocks == 0


def test_dropping_all_marks_leaves_the_order_of_reuse(pool: Any) -> None:
    blocks = cached(pool, range(NUM_BLOCKS - 1))
    mark(pool, blocks[2], session_ref_delta=1)
    mark(pool, blocks[0], session_ref_delta=1, ttl_expire_at=5.0)
    order = ids(pool.free_block_queue.get_all_free_blocks())
    pool.drop_all_meta()
    assert ids(pool.get_new_blocks(NUM_BLOCKS - 1)) == order
    assert pool.pressure_overrides == {}


def test_pools_of_one_process_do_not_mix() -> None:
    one, other = build(AgentBlockPool), build(AgentBlockPool)
    kept, twin = cached(one, range(1))[0], cached(other, range(1))[0]
    mark(one, kept, session_ref_delta=1, ttl_expire_at=5.0)
    assert scalars(twin) == (0, 0.0)
    assert other.num_retained_blocks == 0
    assert not other.free_block_queue.has_sessions
    one.touch([kept])
    other.touch([twin])
    one.free_blocks([kept, twin])  # Deferred frees may hold blocks of several pools.
    assert kept in one.free_block_queue.iter_zone(Zone.TTL)
    assert twin in other.free_block_queue.iter_zone(Zone.ORDINARY)
    assert one.get_num_free_blocks() == other.get_num_free_blocks() == NUM_BLOCKS - 1


@pytest.fixture
def partly_full() -> tuple[Any, Any, Any]:
    """A pool, a request in it, and its first block: half full, cached as such, and marked."""
    init_none_hash(sha256)
    pool = build(AgentBlockPool)
    request = make_request("r", range(3 * BLOCK_SIZE))
    (block,) = pool.get_new_blocks(1)
    pool.cache_partial_block(request, block, BLOCK_SIZE, 0, 2 * BLOCK_SIZE)
    assert mark(pool, block, session_ref_delta=1, ttl_expire_at=5.0).name == "UPDATED"
    pool.observer = Mock(spec=HintedPoolMachine)
    return pool, request, block


def test_a_partial_block_that_becomes_full_loses_its_marks(partly_full: Any) -> None:
    pool, request, block = partly_full
    pool.cache_full_blocks(request, [block], 0, 1, 2 * BLOCK_SIZE, 0)
    assert scalars(block) == (0, 0.0)
    assert pool.num_retained_blocks == 0
    pool.observer.blocks_reused.assert_called_once_with([block.block_id])


def test_a_second_partial_entry_leaves_the_marks_alone(partly_full: Any) -> None:
    """The block keeps its own hash, under which it was recorded."""
    pool, request, block = partly_full
    own = block.block_hash
    pool.cache_partial_block(request, block, BLOCK_SIZE, 1, 2 * BLOCK_SIZE)
    assert block.block_hash == own
    assert scalars(block) == (1, 5.0)
    pool.observer.blocks_reused.assert_not_called()


def test_a_partial_entry_that_replaces_the_hash_takes_the_marks_away(partly_full: Any) -> None:
    pool, _, block = partly_full
    other = make_request("other", range(7, 7 + 3 * BLOCK_SIZE))
    pool.cache_partial_block(other, block, 2 * BLOCK_SIZE, 0, 3 * BLOCK_SIZE)
    assert scalars(block) == (0, 0.0)
    pool.observer.blocks_reused.assert_called_once_with([block.block_id])


def test_the_pool_is_built_of_our_own_blocks_and_queue(pool: Any) -> None:
    assert type(pool.free_block_queue) is AgentFreeKVCacheBlockQueue
    assert {type(block) for block in pool.blocks} == {AgentKVCacheBlock}
    assert pool.null_block is pool.blocks[NULL]
    assert pool.null_block.is_null
