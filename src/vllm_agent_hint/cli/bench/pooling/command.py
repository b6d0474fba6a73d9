"""All figures of ``bench pooling``, each beside its bound."""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from vllm_agent_hint.cli.bench.paired import bootstrap_interval
from vllm_agent_hint.cli.bench.pooling.arms import OURS, RECOMPUTE, STOCK, running_arms
from vllm_agent_hint.cli.bench.pooling.resumes import (
    Restored,
    Resumes,
    measure_hybrid,
    measure_resumes,
)
from vllm_agent_hint.cli.bench.pooling.throughput import Throughput, measure_throughput

RELOAD_OVER_HIT: Final = 5.0
WIDEST: Final = 0.03


@dataclass(frozen=True, slots=True)
class Bound:
    """A figure and what it may be at most, or at least.

    Args:
        name: Key in the JSON file.
        value: What was found.
        at_most: Upper bound, if any.
        at_least: Lower bound, if any.
        note: Beside it in the table.
    """

    name: str
    value: float
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def is_met(self) -> bool:
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    @property
    def limit(self) -> str:
        return f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"


@dataclass(frozen=True, slots=True)
class Measured:
    """All that was measured in one run."""

    resumes: Resumes
    throughput: Throughput
    hybrid: list[Restored]
    bounds: list[Bound]

    def as_plain(self) -> dict[str, Any]:
        return {
            "bounds": {
                bound.name: {**asdict(bound), "is_met": bound.is_met} for bound in self.bounds
            },
            "ttft_seconds": self.resumes.ttft,
            "cached_tokens": self.resumes.cached,
            "hit_seconds": self.resumes.hits,
            "throughput_ratios": self.throughput.ratios,
            "prefetched_megabytes": self.throughput.megabytes,
            "prefetches_under_way": self.throughput.under_way,
            "hybrid": [asdict(one) for one in self.hybrid],
        }


def run_pooling(
    json_file: Path | None,
    console: Console,
    *,
    agents: int,
    pairs: int,
    hybrid_agents: int,
    load_mb_per_second: float,
    kind: str,
    folder: Path,
) -> bool:
    """Measure, print and write. Returns whether every bound is met."""
    rate = load_mb_per_second * 1e6
    with running_arms(folder, rate, kind) as arms:
        throughput = measure_throughput(arms.ours, pairs, rate, console)
        resumes = measure_resumes(arms.of_resumes, agents, console)
        hybrid = measure_hybrid(arms.hybrid, hybrid_agents, console)
        found = Measured(resumes, throughput, hybrid, bounds(resumes, throughput, hybrid))
    _print(console, found)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(found.as_plain(), indent=1))
    return all(bound.is_met for bound in found.bounds)


def bounds(resumes: Resumes, throughput: Throughput, hybrid: list[Restored]) -> list[Bound]:
    """One per figure that pooling is held to.

    An interval must not lie on the wrong side of its bound, nor be too wide to tell, as in
    ``bench serve``.
    """
    hit = statistics.median(resumes.hits)
    low, high = bootstrap_interval(throughput.ratios)
    restored = sum(one.tokens for one in hybrid)
    usable = sum(one.hit for one in hybrid) / restored if restored else 0.0
    return [
        Bound(
            "resume / recompute, TTFT",
            resumes.median(OURS) / resumes.median(RECOMPUTE),
            at_most=0.25,
            note=_interval(resumes.ratios(OURS, RECOMPUTE)),
        ),
        Bound(
            "resume / stock reload, TTFT",
            resumes.median(OURS) / resumes.median(STOCK),
            at_most=0.4,
            note=_interval(resumes.ratios(OURS, STOCK)),
        ),
        Bound(
            "stock reload / hit, TTFT",
            resumes.median(STOCK) / hit,
            at_least=RELOAD_OVER_HIT,
            note="else the throttle is too weak: lower --load-rate",
        ),
        Bound(
            "prefetch done before the resume",
            statistics.mean(resumes.in_time),
            at_least=0.9,
            note=f"{sum(resumes.in_time)} of {len(resumes.in_time)} turns",
        ),
        Bound(
            "throughput while prefetching, upper end",
            high,
            at_least=0.97,
            note=f"median {statistics.median(throughput.ratios):.3f}, lower end {low:.3f}; "
            f"{throughput.under_way:.1f} prefetches were under way",
        ),
        Bound(
            "half the width of that interval",
            (high - low) / 2,
            at_most=WIDEST,
            note="a wider one counts as not measured",
        ),
        Bound(
            "hybrid: restored tokens that were hit",
            usable,
            at_least=0.95,
            note=f"of {restored} tokens in {len(hybrid)} sessions",
        ),
        Bound("greedy tokens are the same", float(resumes.are_told_the_same), at_least=1.0),
    ]


def _interval(ratios: list[float]) -> str:
    low, high = bootstrap_interval(ratios)
    return f"paired {low:.3f} .. {high:.3f}"


def _print(console: Console, found: Measured) -> None:
    table = Table("figure", "value", "bound", "met", "")
    for bound in found.bounds:
        verdict = "yes" if bound.is_met else "NO"
        table.add_row(bound.name, f"{bound.value:.3f}", bound.limit, verdict, bound.note)
    console.print(table)
    resumes = found.resumes
    for name, values in resumes.ttft.items():
        console.print(
            f"{name}: TTFT {statistics.median(values):.3f} s, "
            f"cached {statistics.median(resumes.cached[name]):.0f} tokens"
        )
    console.print(
        f"a hit: {statistics.median(resumes.hits):.3f} s; "
        f"prefetched beside others {found.throughput.megabytes:.1f} MB"
    )
    missed = [bound.name for bound in found.bounds if not bound.is_met]
    console.print(f"MISSED: {', '.join(missed)}" if missed else "every bound is met")
