"""``bench pooling``: what it makes of what it has measured. No server here."""

from dataclasses import replace

from vllm_agent_hint.cli.bench.pooling.arms import OURS, RECOMPUTE, STOCK
from vllm_agent_hint.cli.bench.pooling.command import Bound, bounds
from vllm_agent_hint.cli.bench.pooling.resumes import Restored, Resumes
from vllm_agent_hint.cli.bench.pooling.throughput import Throughput

TEN = range(10)
GOOD = Resumes(
    ttft={RECOMPUTE: [1.0] * 10, STOCK: [0.5] * 10, OURS: [0.1] * 10},
    said={RECOMPUTE: [(1, 2)] * 10, STOCK: [(1, 2)] * 10, OURS: [(1, 2)] * 10},
    hits=[0.08] * 10,
    in_time=[True] * 9 + [False],
)
BUSY = Throughput(ratios=[0.98 + 0.01 * (k % 3) for k in TEN], under_way=1.0)
HYBRID = [Restored(2_432, 2_432)] * 3


def missed(
    resumes: Resumes = GOOD, throughput: Throughput = BUSY, hybrid: list[Restored] = HYBRID
) -> list[str]:
    return [bound.name for bound in bounds(resumes, throughput, hybrid) if not bound.is_met]


def with_ttft(arm: str, seconds: float) -> Resumes:
    return replace(GOOD, ttft={**GOOD.ttft, arm: [seconds] * 10})


def test_a_run_within_every_bound_misses_none() -> None:
    assert missed() == []


def test_a_resume_is_held_against_recomputing_and_against_stock_s_reload() -> None:
    assert missed(with_ttft(OURS, 0.24)) == ["resume / stock reload, TTFT"]
    assert missed(with_ttft(RECOMPUTE, 0.39)) == ["resume / recompute, TTFT"]


def test_a_throttle_that_hardly_slows_a_reload_down_proves_nothing() -> None:
    assert missed(with_ttft(STOCK, 0.39)) == ["stock reload / hit, TTFT"]


def test_one_late_prefetch_in_ten_is_allowed_and_two_are_not() -> None:
    late = replace(GOOD, in_time=[True] * 8 + [False] * 2)
    assert missed(late) == ["prefetch done before the resume"]


def test_a_throughput_whose_interval_lies_below_the_bound_is_a_miss() -> None:
    slow = Throughput(ratios=[0.94 + 0.002 * k for k in TEN], under_way=1.0)
    assert missed(throughput=slow) == ["throughput while prefetching, upper end"]


def test_a_throughput_with_a_wide_interval_has_not_been_measured() -> None:
    wide = Throughput(ratios=[0.8 + 0.04 * k for k in TEN], under_way=1.0)
    assert missed(throughput=wide) == ["half the width of that interval"]


def test_restored_tokens_that_no_resume_hits_count_against_a_hybrid() -> None:
    without_state = [Restored(2_432, 2_432), Restored(2_432, 36)]
    assert missed(hybrid=without_state) == ["hybrid: restored tokens that were hit"]
    assert missed(hybrid=[Restored(0, 0)]) == ["hybrid: restored tokens that were hit"]


def test_another_token_on_any_arm_is_a_miss() -> None:
    other = replace(GOOD, said={**GOOD.said, OURS: [(1, 3), *[(1, 2)] * 9]})
    assert missed(other) == ["greedy tokens are the same"]


def test_a_bound_says_which_side_it_is_on() -> None:
    assert Bound("a", 1.0, at_most=2).limit == "<= 2"
    assert Bound("a", 1.0, at_least=0.97).limit == ">= 0.97"
