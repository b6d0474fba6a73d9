"""The timer wheel keeps deadlines: never early, at most one tick late, exact when asked to be."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.naive_wheel import NaiveWheel
from vllm_agent_hint.sessions.ttl import HORIZON_SECONDS, TICK_SECONDS, TTLManager, WheelEntry

START = 1000.25


def quarters(limit: float) -> st.SearchStrategy[float]:
    """Multiples of a quarter second: exact in binary, on the boundary of a tick or off it."""
    return st.integers(0, int(4 * limit)).map(lambda quarter: quarter / 4)


DELAYS = st.one_of(quarters(4), quarters(HORIZON_SECONDS), st.just(HORIZON_SECONDS))
STEPS = st.one_of(
    quarters(3), quarters(HORIZON_SECONDS), st.sampled_from([HORIZON_SECONDS + 1, 5000.0, 1e5])
)
NUM_ENTRIES = 6
ENTRIES = st.integers(0, NUM_ENTRIES - 1)
WHICH = st.integers(0, 1)


class WheelsMachine(RuleBasedStateMachine):
    """Two wheels, between which entries may move, beside two dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.entries = [WheelEntry() for _ in range(NUM_ENTRIES)]
        self.wheels = [TTLManager(START), TTLManager(START)]
        self.naive = [NaiveWheel(), NaiveWheel()]

    @rule(which=WHICH, number=ENTRIES, delay=DELAYS)
    def register_or_refresh_or_move(self, which: int, number: int, delay: float) -> None:
        self._register(which, number, self.now + delay)

    @rule(which=WHICH, number=ENTRIES, ago=quarters(4000))
    def register_a_deadline_that_has_passed(self, which: int, number: int, ago: float) -> None:
        self._register(which, number, self.now - ago)

    @rule(which=WHICH, number=ENTRIES, beyond=quarters(10_000))
    def register_beyond_the_horizon(self, which: int, number: int, beyond: float) -> None:
        self._register(which, number, self.now + HORIZON_SECONDS + beyond)

    def _register(self, which: int, number: int, deadline: float) -> None:
        self.wheels[which].register(self.entries[number], deadline)
        self.naive[1 - which].remove(number)
        self.naive[which].register(number, deadline)

    @rule(which=WHICH, number=ENTRIES)
    def remove(self, which: int, number: int) -> None:
        self.wheels[which].remove(self.entries[number])
        for naive in self.naive:
            naive.remove(number)

    @rule(number=ENTRIES)
    def disarm(self, number: int) -> None:
        self.entries[number].disarm()
        for naive in self.naive:
            naive.remove(number)

    @rule(which=WHICH)
    def clear(self, which: int) -> None:
        self.wheels[which].clear()
        self.naive[which].deadlines.clear()

    @rule(step=STEPS)
    def time_passes_unseen(self, step: float) -> None:
        self.now += step

    @rule(which=WHICH, step=STEPS)
    def advance(self, which: int, step: float) -> None:
        self.now += step
        handed_out = self._handed_out(which, self.wheels[which].advance(self.now))
        assert handed_out <= self.naive[which].due(self.now), "before its deadline"
        for entry in handed_out:
            self.naive[which].remove(entry)

    @rule(which=WHICH, step=STEPS)
    def advance_twice_within_two_ticks_leaves_nothing_due(self, which: int, step: float) -> None:
        self.now += step
        first_due = self.naive[which].due(self.now)
        handed_out = self._handed_out(which, self.wheels[which].advance(self.now))
        self.now = math.floor(self.now) + TICK_SECONDS
        handed_out |= self._handed_out(which, self.wheels[which].advance(self.now))
        assert first_due <= handed_out <= self.naive[which].due(self.now)
        for entry in handed_out:
            self.naive[which].remove(entry)

    @rule(which=WHICH, step=STEPS)
    def take_due(self, which: int, step: float) -> None:
        self.now += step
        due = self.naive[which].due(self.now)
        assert self._handed_out(which, self.wheels[which].take_due(self.now)) == due
        for entry in due:
            self.naive[which].remove(entry)

    @rule(which=WHICH)
    def soonest(self, which: int) -> None:
        entry = self.wheels[which].soonest()
        if entry is not None:
            assert entry in self.entries
        assert (entry and entry.due_at) == self.naive[which].soonest

    def _handed_out(self, which: int, entries: list[WheelEntry]) -> set[int]:
        deadlines = [entry.due_at for entry in entries]
        assert deadlines == sorted(deadlines), "soonest first"
        assert not any(entry.is_armed for entry in entries)
        numbers = [self.entries.index(entry) for entry in entries]
        assert len(numbers) == len(set(numbers)), "handed out twice"
        return set(numbers)

    @invariant()
    def each_wheel_holds_what_was_registered_and_nothing_else(self) -> None:
        for wheel, naive in zip(self.wheels, self.naive, strict=True):
            assert len(wheel) == len(naive.deadlines)
        for number, entry in enumerate(self.entries):
            deadlines = [n.deadlines[number] for n in self.naive if number in n.deadlines]
            assert entry.is_armed == bool(deadlines)
            if deadlines:
                assert [entry.due_at] == deadlines

    @invariant()
    def the_next_tick_is_early_enough(self) -> None:
        for wheel, naive in zip(self.wheels, self.naive, strict=True):
            if naive.soonest is None:
                assert wheel.next_tick_at == math.inf
            else:
                assert wheel.next_tick_at <= math.floor(max(self.now, naive.soonest)) + 1

    @precondition(lambda self: not any(n.deadlines for n in self.naive))
    @rule()
    def an_empty_wheel_has_nothing_to_hand_out(self) -> None:
        for wheel in self.wheels:
            assert wheel.advance(self.now) == wheel.take_due(self.now) == []
            assert wheel.soonest() is None


TestWheels = WheelsMachine.TestCase
TestWheels.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_a_lease_registered_after_a_long_idle_time_is_not_cut_short() -> None:
    """An empty wheel isn't advanced, so its own tick may be hours old."""
    wheel = TTLManager(0.0)
    lease = WheelEntry()
    wheel.register(lease, 7200.0 + 300.0)
    assert wheel.advance(7201.0) == []
    assert wheel.advance(7499.0) == []
    assert wheel.advance(7501.0) == [lease]


def test_the_soonest_is_found_after_a_long_idle_time() -> None:
    wheel = TTLManager(0.0)
    later, sooner = WheelEntry(), WheelEntry()
    wheel.register(later, 9000.0)
    wheel.advance(3000.0)
    wheel.register(sooner, 3700.0)
    assert wheel.soonest() is sooner


def test_advance_hands_out_whole_finished_ticks_only() -> None:
    wheel = TTLManager(0.0)
    lease = WheelEntry()
    wheel.register(lease, 10.5)
    assert wheel.advance(10.9) == []
    assert wheel.advance(11.0) == [lease]


def test_take_due_looks_into_the_unfinished_tick() -> None:
    wheel = TTLManager(0.0)
    lease, later = WheelEntry(), WheelEntry()
    wheel.register(lease, 10.5)
    wheel.register(later, 10.75)
    assert wheel.take_due(10.25) == []
    assert wheel.take_due(10.5) == [lease]
    assert later.is_armed


def test_a_refreshed_lease_leaves_nothing_at_its_old_deadline() -> None:
    wheel = TTLManager(0.0)
    lease = WheelEntry()
    wheel.register(lease, 10.0)
    wheel.register(lease, 20.0)
    assert len(wheel) == 1
    assert wheel.advance(15.0) == []
    assert wheel.advance(21.0) == [lease]


@pytest.mark.parametrize("ttl", [0.0, 0.5, HORIZON_SECONDS - 0.5, HORIZON_SECONDS])
@pytest.mark.parametrize("start", [0.0, 0.75, 123456.5])
def test_any_ttl_within_the_horizon_is_kept_from_any_moment(start: float, ttl: float) -> None:
    wheel = TTLManager(start)
    lease = WheelEntry()
    wheel.register(lease, start + ttl)
    assert wheel.take_due(start + ttl - 0.25) == []
    assert wheel.take_due(start + ttl) == [lease]
