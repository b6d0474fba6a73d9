"""How soon a resting session comes back: bins, the reuse index, and how its classes learn."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_agent_hint.sessions import reuse
from vllm_agent_hint.sessions.reuse import (
    ANY,
    CONVERSATION,
    EDGES,
    FADES_AT,
    GAP_EDGES,
    LEANINGS,
    LEAST_BELIEF,
    NEVER,
    OUTPUT_EDGES,
    REFRESH_AT_PART,
    ReuseEstimator,
    TurnClass,
    bin_of,
    cold_start,
    reuse_index,
    turn_class,
)

ENDINGS = ("tool_call", "final_message", "cut", "unknown")


# -- bins and classes ------------------------------------------------------------------------------


@given(st.floats(0.0, 1e6))
def test_a_gap_lies_in_the_bin_that_begins_before_it_and_ends_after_it(seconds: float) -> None:
    where = bin_of(seconds)
    assert EDGES[where] <= seconds
    assert where == NEVER or seconds < EDGES[where + 1]


def test_bins_begin_at_zero_and_then_grow_by_the_square_root_of_two() -> None:
    assert EDGES[:2] == (0.0, 1.0)
    assert EDGES[NEVER] == 4096.0
    assert all(b / a == pytest.approx(2**0.5) for a, b in pairwise(EDGES[1:]))


def test_the_first_turn_of_a_session_is_of_another_class_than_one_after_no_pause() -> None:
    assert turn_class("", "tool_call", "", None, 0).gap == 0
    assert turn_class("", "tool_call", "", 0.0, 0).gap == 1


@pytest.mark.parametrize("edge", GAP_EDGES)
def test_a_class_of_gaps_begins_at_its_edge(edge: float) -> None:
    below, at = (turn_class("", "cut", "", gap, 0).gap for gap in (edge - 0.001, edge))
    assert (below, at) == (1 + GAP_EDGES.index(edge), 2 + GAP_EDGES.index(edge))


@pytest.mark.parametrize("edge", OUTPUT_EDGES)
def test_a_class_of_outputs_begins_at_its_edge(edge: int) -> None:
    below, at = (turn_class("", "cut", "", None, tokens).output for tokens in (edge - 1, edge))
    assert (below, at) == (OUTPUT_EDGES.index(edge), 1 + OUTPUT_EDGES.index(edge))


# -- the index -------------------------------------------------------------------------------------


def by_definition(chances: list[float], start: int) -> float:
    """The best ratio of returns to seconds held, over all horizons, outcome by outcome.

    A gap that ends within a bin ends in the middle of it.
    """
    best = 0.0
    for end in range(start + 1, NEVER + 1):
        returns = sum(chances[start:end])
        held = sum(
            chance * ((EDGES[k] + EDGES[k + 1]) / 2 - EDGES[start])
            for k, chance in enumerate(chances[:end])
            if k >= start
        )
        held += sum(chances[end:]) * (EDGES[end] - EDGES[start])
        if held > 1e-9:
            best = max(best, returns / held)
    return best


CHANCES = (
    st.lists(st.integers(0, 50), min_size=len(EDGES), max_size=len(EDGES))
    .filter(any)
    .map(lambda counts: [count / sum(counts) for count in counts])
)


@given(CHANCES)
def test_the_index_is_the_best_ratio_of_returns_to_seconds_held(chances: list[float]) -> None:
    found = reuse_index(chances)
    for start in range(NEVER):
        assert found[start] == pytest.approx(by_definition(chances, start), rel=1e-6, abs=1e-9)


def test_a_session_that_never_comes_back_is_worth_nothing() -> None:
    assert set(reuse_index([*[0.0] * NEVER, 1.0])) == {0.0}


def test_one_that_has_rested_longer_than_the_last_bin_is_worth_nothing() -> None:
    assert reuse_index([1 / len(EDGES)] * len(EDGES))[NEVER] == 0.0


def test_a_return_that_is_sure_and_late_is_worth_more_the_nearer_it_comes() -> None:
    sure = [float(k == bin_of(60.0)) for k in range(len(EDGES))]
    worth = reuse_index(sure)[: bin_of(60.0) + 1]
    assert list(worth) == sorted(worth)
    assert worth[0] < worth[-1]


# -- the cold-start table --------------------------------------------------------------------------


def test_the_table_holds_a_count_for_each_bin_of_each_cell() -> None:
    table = reuse._cold_start_table()
    assert set(table) == {*ENDINGS, CONVERSATION}
    cells = {f"{g}/{o}" for g in range(len(GAP_EDGES) + 2) for o in range(len(OUTPUT_EDGES) + 1)}
    for ended, of_kind in table.items():
        assert set(of_kind) <= {"all", *cells}, ended
        for counts in of_kind.values():
            assert len(counts) == len(EDGES)
            assert all(isinstance(count, int) and count >= 0 for count in counts)


def test_the_cells_of_an_ending_add_up_to_all_of_it() -> None:
    for of_kind in reuse._cold_start_table().values():
        cells = [counts for cell, counts in of_kind.items() if cell != "all"]
        assert [sum(column) for column in zip(*cells, strict=True)] == of_kind["all"]


def test_where_the_ending_is_unknown_all_turns_count() -> None:
    table = reuse._cold_start_table()
    apart = ("unknown", CONVERSATION)
    known = [of_kind for ended, of_kind in table.items() if ended not in apart]
    for cell, counts in table["unknown"].items():
        of_each = [of_kind[cell] for of_kind in known if cell in of_kind]
        assert [sum(column) for column in zip(*of_each, strict=True)] == counts, cell


@pytest.mark.parametrize("ended", [*ENDINGS, CONVERSATION, "disconnected", "of another version"])
def test_chances_of_a_cold_start_add_up_to_one_and_none_is_nought(ended: str) -> None:
    for gap in range(len(GAP_EDGES) + 2):
        for output in range(len(OUTPUT_EDGES) + 1):
            chances = cold_start(ended, gap, output)
            assert sum(chances) == pytest.approx(1.0)
            assert min(chances) > 0.0


def test_an_ending_that_the_table_does_not_know_counts_as_unknown() -> None:
    assert cold_start("disconnected", 1, 1) == cold_start("unknown", 1, 1)


def test_a_tool_call_is_worth_more_than_a_final_message_from_the_start() -> None:
    """Of equal turns, a moment after their end."""
    estimator = ReuseEstimator()
    call, message = (turn_class("", e, "", 3.0, 100) for e in ("tool_call", "final_message"))
    assert estimator.worth(call, 1.0) > 2 * estimator.worth(message, 1.0)


# -- learning --------------------------------------------------------------------------------------

BASH = turn_class("", "tool_call", "bash", 3.0, 100)
READ = BASH._replace(detail="read")
UNTOLD = BASH._replace(detail="")
"""Of the same turns, where nobody knows the tool."""


def chances_of(estimator: ReuseEstimator, turns: TurnClass) -> list[float]:
    return estimator._chances(turns, estimator._histogram(turns))


def test_without_an_observation_a_class_expects_what_the_table_says() -> None:
    expected = list(cold_start("tool_call", BASH.gap, BASH.output))
    assert chances_of(ReuseEstimator(), BASH) == pytest.approx(expected)


class NaiveClass:
    """What a class expects, worked out from all its gaps, one way of leaning after the other.

    Args:
        num_sources: What it may lean on.
    """

    def __init__(self, num_sources: int) -> None:
        self.gaps: list[int] = []
        ways = [(source, by) for source in range(num_sources) for by in LEANINGS]
        self.beliefs = dict.fromkeys(ways, 1 / len(ways))

    def chances(self, sources: list[list[float]]) -> list[float]:
        return [
            sum(
                belief * self._foretells(k, sources[source], by)
                for (source, by), belief in self.beliefs.items()
            )
            for k in range(len(EDGES))
        ]

    def add(self, where: int, sources: list[list[float]]) -> None:
        grown = {
            (source, by): belief * self._foretells(where, sources[source], by)
            for (source, by), belief in self.beliefs.items()
        }
        floored = {way: max(LEAST_BELIEF, v / sum(grown.values())) for way, v in grown.items()}
        self.beliefs = {way: v / sum(floored.values()) for way, v in floored.items()}
        self.gaps.append(where)

    def _foretells(self, where: int, source: list[float], by: float) -> float:
        return (self.gaps.count(where) + by * source[where]) / (len(self.gaps) + by)


class NaiveTenant:
    """One ending, every class of it, each leaning on those above."""

    def __init__(self, ended: str) -> None:
        self.ended = ended
        self.classes: dict[TurnClass, NaiveClass] = {}

    def sources(self, turns: TurnClass) -> list[list[float]]:
        if turns.detail:
            return [self.chances(turns._replace(detail=""))]
        whole = list(cold_start(self.ended, ANY, ANY))
        if turns.gap == ANY:
            return [whole]
        cell = list(cold_start(self.ended, turns.gap, turns.output))
        tenant = self.chances(turns._replace(gap=ANY, output=ANY))
        odds = [cell[k] / whole[k] * tenant[k] for k in range(len(EDGES))]
        return [cell, [each / sum(odds) for each in odds]]

    def chances(self, turns: TurnClass) -> list[float]:
        sources = self.sources(turns)
        return self.classes.setdefault(turns, NaiveClass(len(sources))).chances(sources)

    def add(self, turns: TurnClass, where: int) -> None:
        whose = {turns, turns._replace(detail=""), turns._replace(detail="", gap=ANY, output=ANY)}
        before = {each: self.sources(each) for each in whose}
        for each, sources in before.items():
            self.classes.setdefault(each, NaiveClass(len(sources))).add(where, sources)


GAPS = st.none() | st.floats(0.0, 10_000.0) | st.sampled_from([0.5, 2.0, 90.0])
OF_A_KIND = st.builds(
    turn_class,
    st.just(""),
    st.just("tool_call"),
    st.sampled_from(["bash", "read", ""]),
    st.sampled_from([None, 3.0, 100.0]),
    st.sampled_from([100, 2000]),
)


@given(st.lists(st.tuples(OF_A_KIND, GAPS), max_size=60))
def test_a_class_leans_on_those_above_it_and_they_on_the_table(
    observed: list[tuple[TurnClass, float | None]],
) -> None:
    """As far as doing so has foretold its gaps."""
    estimator, naive = ReuseEstimator(), NaiveTenant("tool_call")
    for turns, gap in observed:
        naive.add(turns, NEVER if gap is None else bin_of(gap))
        estimator.observe(turns, gap)
    for turns in {BASH, READ, BASH._replace(detail=""), *(turns for turns, _ in observed)}:
        found = chances_of(estimator, turns)
        assert found == pytest.approx(naive.chances(turns))
        assert sum(found) == pytest.approx(1.0)
        one_by_one = [estimator._expected_in(k, turns) for k in range(len(EDGES))]
        for found, expected in zip(
            zip(*one_by_one, strict=True), naive.sources(turns), strict=True
        ):
            assert list(found) == pytest.approx(expected)


def test_what_a_tenant_does_after_first_turns_is_expected_after_later_ones() -> None:
    estimator = ReuseEstimator()
    first, later = (turn_class("", "tool_call", "", gap, 100) for gap in (None, 3.0))
    before = chances_of(estimator, later)[bin_of(700.0)]
    for _ in range(10):
        estimator.observe(first, 700.0)
    assert chances_of(estimator, later)[bin_of(700.0)] > 0.4 > 10 * before


@given(st.lists(GAPS, max_size=20), st.floats(0.0, 8_000.0))
def test_between_two_bins_the_worth_goes_from_one_to_the_other(
    gaps: list[float | None], resting: float
) -> None:
    estimator = ReuseEstimator()
    for gap in gaps:
        estimator.observe(BASH, gap)
    where = bin_of(resting)
    ends = [estimator.worth(BASH, EDGES[k]) for k in (where, min(NEVER, where + 1))]
    assert min(ends) - 1e-12 <= estimator.worth(BASH, resting) <= max(ends) + 1e-12


def test_of_two_that_will_surely_come_the_one_that_has_rested_longer_is_worth_more() -> None:
    """Also within the first second: agents that take turns in a circle."""
    estimator = ReuseEstimator()
    for _ in range(20):
        estimator.observe(BASH, 2.0)
    worth = [estimator.worth(BASH, k / 10) for k in range(10)]
    assert worth == sorted(set(worth))


def test_a_class_that_is_unlike_the_table_soon_believes_itself() -> None:
    estimator = ReuseEstimator()
    for _ in range(8):
        estimator.observe(BASH, 700.0)
    assert chances_of(estimator, BASH)[bin_of(700.0)] > 0.6


def test_one_that_is_like_the_table_is_not_led_astray_by_chance() -> None:
    """Gaps as the table has them: a dozen of them change what it expects by little."""
    estimator = ReuseEstimator()
    table = cold_start("tool_call", BASH.gap, BASH.output)
    dice = random.Random(1)
    middles = [(a + b) / 2 for a, b in pairwise(EDGES)] + [None]
    for gap in dice.choices(middles, table, k=12):
        estimator.observe(UNTOLD, gap)
    found = chances_of(estimator, UNTOLD)
    assert sum(abs(a - b) for a, b in zip(found, table, strict=True)) / 2 < 0.25


def test_no_way_of_leaning_is_ruled_out_for_ever() -> None:
    """A tenant may be unlike the table for hours, and then as the table says."""
    estimator = ReuseEstimator()
    whole = UNTOLD._replace(gap=ANY, output=ANY)
    for _ in range(500):
        estimator.observe(whole, 700.0)
    beliefs = estimator._histogram(whole).beliefs
    assert beliefs[0] == max(beliefs)
    dice = random.Random(1)
    middles = [(a + b) / 2 for a, b in pairwise(EDGES)] + [None]
    for gap in dice.choices(middles, cold_start("tool_call", ANY, ANY), k=200):
        estimator.observe(whole, gap)
    beliefs = estimator._histogram(whole).beliefs
    assert beliefs[-1] == max(beliefs)


def test_a_class_believes_the_table_or_its_tenant_whoever_has_foretold_it() -> None:
    """Its tenant's other turns are slow; those of the class are as the table has them."""
    estimator = ReuseEstimator()
    first = turn_class("", "tool_call", "", None, 100)
    for _ in range(50):
        estimator.observe(first, 700.0)
    tenants = chances_of(estimator, UNTOLD)[bin_of(700.0)]
    dice = random.Random(1)
    middles = [(a + b) / 2 for a, b in pairwise(EDGES)] + [None]
    for gap in dice.choices(middles, cold_start("tool_call", BASH.gap, BASH.output), k=15):
        estimator.observe(UNTOLD, gap)
    assert chances_of(estimator, UNTOLD)[bin_of(700.0)] < tenants / 5


def test_a_turn_whose_tool_nobody_knows_is_observed_once() -> None:
    estimator = ReuseEstimator()
    estimator.observe(UNTOLD, 1.0)
    assert estimator._histogram(UNTOLD).total == 1.0


def test_enough_news_changes_what_a_class_is_worth() -> None:
    estimator = ReuseEstimator()
    before = estimator.worth(BASH, 1.0)
    for _ in range(4):
        estimator.observe(BASH, None)
    assert estimator.worth(BASH, 1.0) < before / 1.5


def test_news_of_other_tools_reaches_a_class_that_has_none_of_its_own() -> None:
    estimator = ReuseEstimator()
    before = estimator.worth(BASH, 1.0)
    for _ in range(100):
        estimator.observe(READ, None)
    estimator.note(BASH)
    assert estimator.worth(BASH, 1.0) < before / 2


def test_a_class_is_worked_out_anew_when_a_part_of_what_it_has_seen_is_new() -> None:
    """The more it has seen, the more it takes; so it is rare."""
    estimator = ReuseEstimator()
    editions = []
    for _ in range(1500):
        estimator.observe(BASH, 1.0)
        editions.append(estimator._histogram(BASH).edition)
    few = round(1 / REFRESH_AT_PART)
    assert editions[:few] == list(range(1, few + 1)), "all of them, while they are few"
    assert editions[-1] < 60


def test_a_class_that_changes_its_ways_is_believed_after_a_while() -> None:
    """Old observations fade: as many new ones weigh more than they did."""
    estimator = ReuseEstimator()
    for _ in range(int(FADES_AT)):
        estimator.observe(BASH, 2.0)
    for _ in range(int(FADES_AT)):
        estimator.observe(BASH, None)
    histogram = estimator._histogram(BASH)
    assert histogram.total < FADES_AT
    assert histogram.total == pytest.approx(sum(histogram.counts))
    assert histogram.counts[NEVER] > 2 * histogram.counts[bin_of(2.0)]


def test_no_tenant_learns_from_another() -> None:
    estimator = ReuseEstimator()
    other = BASH._replace(tenant="other")
    before = estimator.worth(other, 1.0)
    for _ in range(1000):
        estimator.observe(BASH, None)
    assert estimator.worth(other, 1.0) == before
    assert chances_of(estimator, other) == chances_of(ReuseEstimator(), other)


def test_classes_are_bounded_and_the_one_used_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reuse, "MAX_CLASSES", 8)
    estimator = ReuseEstimator()
    for _ in range(50):
        estimator.observe(BASH, 700.0)
    for number in range(20):
        estimator.observe(BASH._replace(detail=f"made up {number}"), 1.0)
        estimator.note(BASH)
        assert len(estimator._seen) <= 8
    assert estimator._histogram(BASH).total == 50.0, "it was used all the time"
    assert BASH._replace(detail="made up 0") not in estimator._seen


@pytest.mark.parametrize("gap", [-1.0, 0.0, 1e12])
def test_a_gap_of_any_length_is_an_observation(gap: float) -> None:
    estimator = ReuseEstimator()
    estimator.observe(BASH, gap)
    assert estimator._histogram(BASH).total == 1.0
