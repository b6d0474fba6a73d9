"""The zoned free queue: three lists in one, and stock's own queue as long as no session lives."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from tests.engine.naive_queue import NaiveQueue, zone_of
from vllm_agent_hint.kvcache.block import AgentKVCacheBlock, Zone
from vllm_agent_hint.kvcache.queue import (
    AgentFreeKVCacheBlockQueue,
    ShadowFreeKVCacheBlockQueue,
)
from vllm_agent_hint.settings import Placement

NUM_BLOCKS = 9
ZONE_NAMES = {Zone.ORDINARY: "A", Zone.SESSION: "B", Zone.TTL: "C"}
SCALARS = st.sampled_from([(0, 0.0), (1, 0.0), (3, 0.0), (1, 7.5), (2, 9.0), (0, 4.0)])


def ids(blocks: Any) -> list[int]:
    return [block.block_id for block in blocks]


class QueueMachine(RuleBasedStateMachine):
    """Blocks with random scalars go in and out; the queue keeps the order of three lists."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [AgentKVCacheBlock(i) for i in range(NUM_BLOCKS)]
        self.queue = AgentFreeKVCacheBlockQueue(self.blocks)
        self.naive = NaiveQueue(range(NUM_BLOCKS))
        self.out: list[int] = []
        """Block ids in use, which have left the queue."""
        self.shortages: list[int] = []
        self.expiring: list[int] = []
        """Free block ids that lose their scalars when zone A falls short."""
        self.queue.on_shortage = self._on_shortage
        self.naive.on_shortage = self._on_naive_shortage

    def _on_shortage(self, num_blocks: int) -> None:
        """What SAM does: ends leases, which makes blocks ordinary in the midst of a popleft."""
        assert self.naive.zones["B"] + self.naive.zones["C"] == [
            *ids(self.queue.iter_zone(Zone.SESSION)),
            *ids(self.queue.iter_zone(Zone.TTL)),
        ], "zones B and C were touched first"
        assert ids(self.queue.iter_zone(Zone.ORDINARY)) == []
        self.shortages.append(num_blocks)
        for i in self.expiring:
            self._write(i, 0, 0.0)
        self.queue.enter([self.blocks[i] for i in self.expiring], Placement.BACK)
        self._settle()

    def _on_naive_shortage(self, num_blocks: int) -> None:
        self.naive.enter(self.expiring, dict.fromkeys(self.expiring, "A"), Placement.BACK)

    def _write(self, block_id: int, count: int, deadline: float) -> None:
        self.blocks[block_id]._session_ref_cnt = count
        self.blocks[block_id]._ttl_expire_at = deadline

    def _settle(self) -> None:
        """The pool's part: say whether any block is retained, free or not."""
        self.queue.has_sessions = any(self._zone(i) != "A" for i in range(NUM_BLOCKS))

    def _zone(self, block_id: int) -> str:
        block = self.blocks[block_id]
        return zone_of(block._session_ref_cnt, block._ttl_expire_at)

    @property
    def _zones(self) -> dict[int, str]:
        return {i: self._zone(i) for i in range(NUM_BLOCKS)}

    def _some_out(self, data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.sampled_from(self.out), min_size=1, unique=True), "blocks")

    def _some_free(self, data: st.DataObject) -> list[int]:
        free = self.naive.order
        return data.draw(st.lists(st.sampled_from(free), min_size=1, unique=True), "blocks")

    # -- taking --------------------------------------------------------------------------------

    @rule(n=st.integers(0, NUM_BLOCKS + 1), data=st.data())
    def popleft_n(self, n: int, data: st.DataObject) -> None:
        self._choose_expiring(data)
        self._same(lambda: ids(self.queue.popleft_n(n)), lambda: self.naive.popleft_n(n))

    @rule(data=st.data())
    def popleft(self, data: st.DataObject) -> None:
        self._choose_expiring(data)
        self._same(lambda: [self.queue.popleft().block_id], lambda: [self.naive.popleft()])

    def _choose_expiring(self, data: st.DataObject) -> None:
        retained = self.naive.zones["B"] + self.naive.zones["C"]
        if retained:
            self.expiring = data.draw(st.lists(st.sampled_from(retained), unique=True), "expiring")

    def _same(self, ours: Callable[[], list[int]], naive: Callable[[], list[int]]) -> None:
        """Run both; ours first, so that it finds the naive queue as it was before."""
        zones = self._zones
        taken = outcome(ours)
        assert taken == outcome(naive)
        assert self.shortages == self.naive.shortages
        if isinstance(taken, list):
            expired = self.expiring if self.shortages else []
            reported = [i for i in taken if zones[i] != "A" and i not in expired]
            assert ids(self.queue.taken) == reported
            self.out += taken
            for i in taken:  # The pool's part: content goes, and the scalars with it.
                if zones[i] != "A":
                    self._write(i, 0, 0.0)
        self.queue.taken = []
        self.shortages, self.naive.shortages, self.expiring = [], [], []
        self._settle()

    @precondition(lambda self: self.naive.order)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.naive.order), "block")
        self.queue.remove(self.blocks[block_id])
        self.naive.remove(block_id)
        self.out.append(block_id)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def removing_a_block_that_is_not_free_is_refused(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.out), "block")
        with pytest.raises(RuntimeError):
            self.queue.remove(self.blocks[block_id])

    # -- giving back ---------------------------------------------------------------------------

    @precondition(lambda self: self.out)
    @rule(scalars=SCALARS, data=st.data())
    def a_block_in_use_is_marked(self, scalars: tuple[int, float], data: st.DataObject) -> None:
        self._write(data.draw(st.sampled_from(self.out), "block"), *scalars)
        self._settle()

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.out), "block")
        self.queue.append(self.blocks[block_id])
        self.naive.append_n([block_id], self._zones)
        self.out.remove(block_id)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def append_n(self, data: st.DataObject) -> None:
        given = self._some_out(data)
        self.queue.append_n([self.blocks[i] for i in given])
        self.naive.append_n(given, self._zones)
        self.out = [i for i in self.out if i not in given]

    @rule()
    def append_nothing(self) -> None:
        self.queue.append_n([])
        self.queue.prepend_n([])
        self.queue.enter([], Placement.FRONT)

    @precondition(lambda self: any(self._zone(i) == "A" for i in self.out))
    @rule(data=st.data())
    def prepend_n(self, data: st.DataObject) -> None:
        """Only blocks without a hash are prepended, and those are ordinary."""
        ordinary = [i for i in self.out if self._zone(i) == "A"]
        given = data.draw(st.lists(st.sampled_from(ordinary), min_size=1, unique=True), "blocks")
        self.queue.prepend_n([self.blocks[i] for i in given])
        self.naive.prepend_n(given)
        self.out = [i for i in self.out if i not in given]

    @precondition(lambda self: self.naive.order)
    @rule(placement=st.sampled_from(Placement), data=st.data())
    def free_blocks_are_marked_and_enter(self, placement: Placement, data: st.DataObject) -> None:
        given = self._some_free(data)
        for i in given:
            self._write(i, *data.draw(SCALARS, f"scalars of {i}"))
        self._settle()
        self.queue.enter([self.blocks[i] for i in given], placement)
        self.naive.enter(given, self._zones, placement)

    @rule()
    def fold(self) -> None:
        for i in range(NUM_BLOCKS):
            self._write(i, 0, 0.0)
        self.queue.fold()
        self.naive.fold()
        assert not self.queue.has_sessions

    # -- looking -------------------------------------------------------------------------------

    @precondition(lambda self: self.naive.order)
    @rule(data=st.data())
    def iter_blocks_after(self, data: st.DataObject) -> None:
        order = self.naive.order
        position = data.draw(st.integers(0, len(order) - 1), "position")
        after = self.queue.iter_blocks_after(self.blocks[order[position]])
        assert ids(after) == order[position + 1 :]

    @invariant()
    def the_order_is_that_of_the_three_lists(self) -> None:
        assert ids(self.queue.get_all_free_blocks()) == self.naive.order
        assert ids(self.queue.iter_blocks_after(None)) == self.naive.order

    @invariant()
    def each_free_block_lies_in_the_zone_of_its_scalars(self) -> None:
        for zone, name in ZONE_NAMES.items():
            found = ids(self.queue.iter_zone(zone))
            assert found == self.naive.zones[name]
            assert [self._zone(i) for i in found] == [name] * len(found)
            assert all(self.blocks[i].zone is zone for i in found)

    @invariant()
    def the_count_is_the_length_and_no_block_is_in_it_twice(self) -> None:
        found = ids(self.queue.get_all_free_blocks())
        assert self.queue.num_free_blocks == len(found) == len(set(found))
        assert set(found).isdisjoint(self.out)
        assert sorted(found + self.out) == list(range(NUM_BLOCKS))

    @invariant()
    def the_links_back_mirror_the_links_forth(self) -> None:
        forth: list[KVCacheBlock] = [self.queue.fake_free_list_head]
        while forth[-1].next_free_block is not None:
            forth.append(forth[-1].next_free_block)
        back = [forth[-1]]
        while back[-1].prev_free_block is not None:
            back.append(back[-1].prev_free_block)
        assert [id(b) for b in back[::-1]] == [id(b) for b in forth]
        for i in self.out:
            assert self.blocks[i].prev_free_block is self.blocks[i].next_free_block is None


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def outcome(operation: Callable[[], Any]) -> Any:
    """What an operation returns, or the kind of exception that it raises."""
    try:
        return operation()
    except (AssertionError, RuntimeError, ValueError) as error:
        return type(error)


class UnhintedQueueMachine(RuleBasedStateMachine):
    """Invariant 1: no block was ever marked, so stock's queue and ours can't be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.size = NUM_BLOCKS
        self.pairs = [
            (queue, blocks)
            for queue, blocks in (
                self._build(FreeKVCacheBlockQueue, KVCacheBlock),
                self._build(AgentFreeKVCacheBlockQueue, AgentKVCacheBlock),
            )
        ]
        self.out: list[int] = []

    def _build(self, queue_cls: Any, block_cls: Any) -> tuple[Any, list[Any]]:
        blocks = [block_cls(i) for i in range(self.size)]
        return queue_cls(blocks), blocks

    def _both(self, operation: Callable[[Any, list[Any]], Any]) -> Any:
        stock, ours = (outcome(lambda p=pair: operation(*p)) for pair in self.pairs)
        assert stock == ours
        return stock

    def _take(self, operation: Callable[[Any, list[Any]], list[int]]) -> None:
        taken = self._both(operation)
        if isinstance(taken, list):
            self.out += taken

    @rule()
    def popleft(self) -> None:
        self._take(lambda queue, _: [queue.popleft().block_id])

    @rule(n=st.integers(0, NUM_BLOCKS + 1))
    def popleft_n(self, n: int) -> None:
        self._take(lambda queue, _: ids(queue.popleft_n(n)))

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def remove(self, block_id: int) -> None:
        if self._both(lambda queue, blocks: queue.remove(blocks[block_id])) is None:
            self.out.append(block_id)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.out))
        self._both(lambda queue, blocks: queue.append(blocks[block_id]))
        self.out.remove(block_id)

    @precondition(lambda self: self.out)
    @rule(at_front=st.booleans(), data=st.data())
    def append_n_or_prepend_n(self, at_front: bool, data: st.DataObject) -> None:
        given = data.draw(st.lists(st.sampled_from(self.out), unique=True))
        name = "prepend_n" if at_front else "append_n"
        self._both(lambda queue, blocks: getattr(queue, name)([blocks[i] for i in given]))
        self.out = [i for i in self.out if i not in given]

    @rule(block_id=st.none() | st.integers(0, NUM_BLOCKS - 1))
    def iter_blocks_after(self, block_id: int | None) -> None:
        self._both(
            lambda queue, blocks: ids(
                queue.iter_blocks_after(None if block_id is None else blocks[block_id])
            )
        )

    @invariant()
    def both_queues_look_the_same(self) -> None:
        self._both(lambda queue, _: queue.num_free_blocks)
        self._both(lambda queue, _: ids(queue.get_all_free_blocks()))


TestUnhintedQueue = UnhintedQueueMachine.TestCase
TestUnhintedQueue.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


class ShadowQueueMachine(UnhintedQueueMachine):
    """In shadow mode the order is stock's whatever the scalars say; ``taken`` knows better."""

    def __init__(self) -> None:
        super().__init__()
        _, blocks = self.pairs.pop()
        self.queue = ShadowFreeKVCacheBlockQueue(blocks)
        self.blocks: list[Any] = blocks
        self.pairs.append((self.queue, blocks))

    @rule(
        block_id=st.integers(0, NUM_BLOCKS - 1),
        scalars=SCALARS,
        placement=st.sampled_from(Placement),
    )
    def mark(self, block_id: int, scalars: tuple[int, float], placement: Placement) -> None:
        block = self.blocks[block_id]
        block._session_ref_cnt, block._ttl_expire_at = scalars
        self.queue.has_sessions = any(b.zone is not Zone.ORDINARY for b in self.blocks)
        self.queue.enter([block], placement)

    def _take(self, operation: Callable[[Any, list[Any]], list[int]]) -> None:
        num_out = len(self.out)
        super()._take(operation)
        taken = [self.blocks[i] for i in self.out[num_out:]]
        assert self.queue.taken == [b for b in taken if b.zone is not Zone.ORDINARY]
        self.queue.taken = []


TestShadowQueue = ShadowQueueMachine.TestCase
TestShadowQueue.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def queue_of(*scalars: tuple[int, float]) -> tuple[AgentFreeKVCacheBlockQueue, list[Any]]:
    """A queue of free blocks that carry these scalars, in this order within each zone."""
    blocks = [AgentKVCacheBlock(i) for i in range(len(scalars))]
    queue = AgentFreeKVCacheBlockQueue(blocks)
    for block, (count, deadline) in zip(blocks, scalars, strict=True):
        block._session_ref_cnt, block._ttl_expire_at = count, deadline
    queue.enter(blocks, Placement.BACK)
    queue.has_sessions = any(block.zone is not Zone.ORDINARY for block in blocks)
    return queue, blocks


ORDINARY, SESSION, PROTECTED = (0, 0.0), (1, 0.0), (1, 9.0)


def test_ordinary_blocks_go_before_session_blocks_and_those_before_protected_ones() -> None:
    queue, _ = queue_of(PROTECTED, SESSION, ORDINARY, PROTECTED, ORDINARY)
    assert ids(queue.popleft_n(5)) == [2, 4, 1, 0, 3]
    assert ids(queue.taken) == [1, 0, 3]


def test_the_last_protected_block_is_given_out_rather_than_failing_an_allocation() -> None:
    queue, _ = queue_of(PROTECTED)
    assert queue.popleft().block_id == 0
    with pytest.raises(ValueError, match="No free blocks"):
        queue.popleft()


def test_a_shortage_is_reported_once_and_only_when_ordinary_blocks_do_not_do() -> None:
    queue, _ = queue_of(ORDINARY, ORDINARY, SESSION, PROTECTED)
    reported: list[int] = []
    queue.on_shortage = reported.append
    queue.popleft_n(2)
    assert reported == []
    queue.popleft_n(2)
    assert reported == [2]


def test_what_expires_on_a_shortage_is_taken_before_what_is_still_held() -> None:
    queue, blocks = queue_of(ORDINARY, SESSION, PROTECTED)

    def expire(num_blocks: int) -> None:
        blocks[2]._session_ref_cnt, blocks[2]._ttl_expire_at = ORDINARY
        queue.enter([blocks[2]], Placement.BACK)

    queue.on_shortage = expire
    assert ids(queue.popleft_n(2)) == [0, 2]
    assert queue.taken == []


def test_blocks_that_leave_a_zone_for_the_front_of_another_keep_their_own_order() -> None:
    queue, blocks = queue_of(ORDINARY, PROTECTED, PROTECTED, ORDINARY)
    for block in blocks[1:3]:
        block._session_ref_cnt, block._ttl_expire_at = ORDINARY
    queue.enter(blocks[1:3], Placement.FRONT)
    assert ids(queue.get_all_free_blocks()) == [1, 2, 0, 3]


def test_folding_keeps_the_order_and_makes_everything_ordinary() -> None:
    queue, _ = queue_of(PROTECTED, SESSION, ORDINARY)
    queue.fold()
    assert ids(queue.iter_zone(Zone.ORDINARY)) == [2, 1, 0]
    assert ids(queue.popleft_n(3)) == [2, 1, 0]
    assert queue.taken == []


@pytest.mark.parametrize(
    ("num_blocks", "wanted", "chosen"),
    [(40, 1, 1), (640, 1, 10), (640, 30, 30), (20_000, 1, 128), (20_000, 500, 500)],
)
def test_a_choice_is_for_a_few_blocks_more_and_for_no_large_part_of_the_pool(
    num_blocks: int, wanted: int, chosen: int
) -> None:
    """What is chosen is not weighed again; of a small pool it must not be half."""
    blocks = [AgentKVCacheBlock(i) for i in range(num_blocks)]
    queue = AgentFreeKVCacheBlockQueue(blocks)
    queue.has_sessions = True
    taken = queue.popleft_n(num_blocks)
    for block in taken:
        block._session_ref_cnt = 1
    queue.append_n(taken)
    asked: list[int] = []

    def choose(_: Zone, num_blocks: int) -> int:
        asked.append(num_blocks)
        return 0

    queue.on_choice = choose
    queue.popleft_n(wanted)
    assert asked == [chosen]
