"""The open loop: each request at its time, whatever became of those before it."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from vllm_agent_hint.cli.bench.replay.arms import arm_named
from vllm_agent_hint.cli.bench.replay.caches import (
    ChainHashes,
    HintedCache,
    SegmentedCache,
    StockCache,
)
from vllm_agent_hint.cli.bench.replay.workload import Workload


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a policy has served.

    Args:
        hit_tokens: Of each arrival.
        boundary_ns: Nanoseconds spent on each request: look-up, allocation, the session core, and
            freeing; empty for bounds.
        figures: What the policy itself reports.
    """

    hit_tokens: list[int]
    boundary_ns: "array[int]" = field(default_factory=lambda: array("q"))
    figures: dict[str, Any] = field(default_factory=dict)


def build_cache(
    policy: str, workload: Workload, hashes: ChainHashes, capacity: int
) -> StockCache | None:
    """The cache of a policy that is no bound; None if there is none of that name."""
    if policy == "stock":
        return StockCache(workload, hashes, capacity)
    if policy == "slru":
        return SegmentedCache(workload, hashes, capacity)
    arm = arm_named(policy)
    return None if arm is None else HintedCache(workload, hashes, capacity, arm)


def replay_open_loop(
    workload: Workload, cache: StockCache, on_progress: Callable[[int], object]
) -> Replayed:
    """Play a workload: a request begins and ends at its arrival, one after another.

    Args:
        workload: What.
        cache: On what.
        on_progress: Called now and then with the number of requests since the last call.
    """
    hits: list[int] = []
    spent = array("q")
    for number, arrival in enumerate(workload.arrivals, start=1):
        if number % 256 == 0:
            on_progress(256)
        cache.advance(arrival.at)
        if not cache.can_ever_hold(arrival):
            hits.append(0)
            continue
        start = perf_counter_ns()
        running = cache.begin(arrival, arrival.at)
        assert running is not None, "nothing else runs, and it fits"
        cache.end(running, arrival.at + (arrival.request.service_seconds or 0.0))
        spent.append(perf_counter_ns() - start)
        hits.append(running.hit_tokens)
    on_progress(len(workload.arrivals) % 256)
    return Replayed(hits, spent, cache.figures())
