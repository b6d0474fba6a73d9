"""Paired timing: both sides in one run, in turn, and an interval for their ratio."""

import gc
import random
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

RESAMPLES = 2000

clock = time.thread_time
"""CPU seconds of this thread: what a neighbour on the machine does counts for neither side."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How long ours takes for each second of stock's.

    Args:
        median: Of the ratios of all pairs.
        low: Lower end of its 95 % bootstrap interval.
        high: Upper end.
        pairs: How many were measured.
        stock_us: Stock's median time per unit, in microseconds.
        ours_us: Ours.
    """

    median: float
    low: float
    high: float
    pairs: int
    stock_us: float
    ours_us: float

    def as_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}


def compare_in_pairs(
    stock: Callable[[], float], ours: Callable[[], float], *, pairs: int, unit_count: int
) -> Ratio:
    """Run two timed sections in turn, each first in every other pair.

    Args:
        stock: Runs stock's section and returns the seconds that count.
        ours: The same for ours.
        pairs: Pairs to count; one more is run first and thrown away.
        unit_count: Units of work in a section, for the time per unit.
    """
    times: list[tuple[float, float]] = []
    with quiet_collector():
        for pair in range(pairs + 1):
            if pair % 2:
                second = ours()
                first = stock()
            else:
                first = stock()
                second = ours()
            if pair:
                times.append((first, second))
    return ratio_of(times, unit_count=unit_count)


def ratio_of(times: list[tuple[float, float]], *, unit_count: int) -> Ratio:
    """What pairs of ``(stock's seconds, ours)`` say."""
    ratios = [b / a for a, b in times]
    low, high = bootstrap_interval(ratios)
    return Ratio(
        statistics.median(ratios),
        low,
        high,
        len(ratios),
        statistics.median(a for a, _ in times) / unit_count * 1e6,
        statistics.median(b for _, b in times) / unit_count * 1e6,
    )


def bootstrap_interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median, by resampling with a fixed seed."""
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


@contextmanager
def quiet_collector() -> Any:
    """No garbage collection while something is timed; vLLM freezes its start-up heap as well."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def seconds(section: Callable[[], object]) -> float:
    start = clock()
    section()
    return clock() - start
