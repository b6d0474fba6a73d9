"""Resume after offload, flood and prefetch; and what prefetches cost those who do not wait."""

import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from vllm_agent_hint.cli.bench.paired import bootstrap_interval
from vllm_agent_hint.cli.bench.pooling.arms import CONTEXT_TOKENS, Arm, running_arms, tokens

PAUSE_SECONDS: Final = 1.5
"""Between the end of the flood and the resume: a tool runs."""
RELOAD_OVER_HIT: Final = 5.0
WINDOW_SECONDS: Final = 5.0
ONE_SHOT_TOKENS: Final = 700


@dataclass(frozen=True, slots=True)
class Bound:
    """A figure and what it may be at most, or at least.

    Args:
        name: Key in the JSON file.
        value: What was found.
        at_most: Upper bound, if any.
        at_least: Lower bound, if any.
    """

    name: str
    value: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_met(self) -> bool:
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)


@dataclass(slots=True)
class Resumes:
    """What the second turns of all agents have shown, by arm."""

    ttft: dict[str, list[float]] = field(default_factory=dict)
    cached: dict[str, list[int]] = field(default_factory=dict)
    said: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    hits: list[float] = field(default_factory=list)
    in_time: list[bool] = field(default_factory=list)


def run_pooling(
    json_file: Path | None,
    console: Console,
    *,
    agents: int,
    windows: int,
    load_mb_per_second: float,
    kind: str,
    folder: Path,
) -> bool:
    """Measure, print and write. Returns whether every bound is met."""
    with running_arms(folder, load_mb_per_second * 1e6, kind) as arms:
        resumes = measure_resumes(arms, agents, console)
        ratios, loaded = measure_throughput(arms[-1], windows, console)
    bounds = _bounds(resumes, ratios)
    _print(console, bounds, resumes, loaded)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(_as_plain(bounds, resumes, ratios, loaded), indent=1))
    return all(bound.is_met for bound in bounds)


def measure_resumes(arms: list[Arm], agents: int, console: Console) -> Resumes:
    """Each agent's second turn on each arm, the arms in turn; the first agent warms up."""
    found = Resumes()
    for agent in range(agents + 1):
        for k in range(len(arms)):
            arm = arms[(agent + k) % len(arms)]
            _one_agent(arm, agent, found if agent else Resumes())
        if agent:
            last = {name: f"{values[-1]:.3f}" for name, values in found.ttft.items()}
            console.print(f"agent {agent}: TTFT {last}")
    return found


def _one_agent(arm: Arm, agent: int, found: Resumes) -> None:
    session = f"agent-{agent}"
    context = tokens(CONTEXT_TOKENS, agent + 1)
    first = arm.ask(context, session, max_tokens=8)
    if arm.parks:
        # By the session itself: what a stranger has used of it outlives it for a while.
        found.hits.append(arm.ask([*context, *tokens(40, 7_000 + agent)], session).ttft)
        arm.edit(session, "offload", wait_seconds=30)
    arm.flood(agent)
    operation = arm.edit(session, "prefetch")[1] if arm.parks else ""
    time.sleep(PAUSE_SECONDS)
    if arm.parks:
        found.in_time.append(arm.status_of(operation) == "applied")
    grown = [*context, *first.token_ids, *tokens(100, 5_000 + agent)]
    second = arm.ask(grown, session, max_tokens=8)
    if arm.parks:
        arm.free(session)
    found.ttft.setdefault(arm.name, []).append(second.ttft)
    found.cached.setdefault(arm.name, []).append(second.cached_tokens)
    found.said.setdefault(arm.name, []).append(second.token_ids)


def measure_throughput(arm: Arm, windows: int, console: Console) -> tuple[list[float], float]:
    """Requests per second with prefetches running over those without, window by window.

    Returns:
        The ratios, and the megabytes that prefetches have loaded in all windows.
    """
    # Together four times the cache, so that each has been driven out when its turn comes again.
    parked = [f"parked-{k}" for k in range(16)]
    for k, session in enumerate(parked):
        arm.ask(tokens(2_500, 9_000 + k), session)
        arm.edit(session, "offload", wait_seconds=30)
    counter = iter(range(10_000_000))
    ratios: list[float] = []
    before = _loaded(arm)
    for window in range(windows):
        rates = {}
        for prefetching in (window % 2 == 0, window % 2 == 1):
            rates[prefetching] = _requests_per_second(
                arm, lambda: next(counter), parked if prefetching else []
            )
        ratios.append(rates[True] / rates[False])
        console.print(f"window {window}: {ratios[-1]:.3f}")
    return ratios, (_loaded(arm) - before) / 1e6


def _loaded(arm: Arm) -> float:
    return arm.total("vllm:agent_hint_transfer_bytes_total", operation="prefetch")


def _requests_per_second(arm: Arm, seed: Callable[[], int], parked: list[str]) -> float:
    """One client asks, one after the other, while another one has sessions brought and parked."""
    is_over = threading.Event()

    def bring_and_park() -> None:
        while parked and not is_over.is_set():
            for session in parked:
                arm.edit(session, "prefetch", wait_seconds=5)
                arm.edit(session, "offload", wait_seconds=5)
                if is_over.is_set():
                    return

    other = threading.Thread(target=bring_and_park)
    other.start()
    began, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < WINDOW_SECONDS:
        arm.ask(tokens(ONE_SHOT_TOKENS, 20_000 + seed()), max_tokens=8)
        done += 1
    is_over.set()
    other.join()
    return done / spent


def _bounds(found: Resumes, ratios: list[float]) -> list[Bound]:
    ttft = {name: statistics.median(values) for name, values in found.ttft.items()}
    hit = statistics.median(found.hits)
    low, _ = bootstrap_interval(ratios)
    same = all(len({*answers}) == 1 for answers in zip(*found.said.values(), strict=True))
    return [
        Bound("resume / recompute, TTFT", ttft["ours"] / ttft["recompute"], at_most=0.25),
        Bound("resume / stock reload, TTFT", ttft["ours"] / ttft["stock-offloading"], at_most=0.4),
        Bound("stock reload / hit, TTFT", ttft["stock-offloading"] / hit, at_least=RELOAD_OVER_HIT),
        Bound("prefetch done before the resume", statistics.mean(found.in_time), at_least=0.9),
        Bound("throughput while prefetching, lower end", low, at_least=0.97),
        Bound("greedy tokens are the same", float(same), at_least=1.0),
    ]


def _print(console: Console, bounds: list[Bound], found: Resumes, loaded: float) -> None:
    table = Table("figure", "value", "bound", "met")
    for bound in bounds:
        limit = f"<= {bound.at_most:g}" if bound.at_most is not None else f">= {bound.at_least:g}"
        table.add_row(bound.name, f"{bound.value:.3f}", limit, "yes" if bound.is_met else "NO")
    console.print(table)
    for name, values in found.ttft.items():
        console.print(
            f"{name}: TTFT {statistics.median(values):.3f} s, "
            f"cached {statistics.median(found.cached[name]):.0f} tokens"
        )
    console.print(f"a hit: {statistics.median(found.hits):.3f} s; prefetched {loaded:.1f} MB")


def _as_plain(
    bounds: list[Bound], found: Resumes, ratios: list[float], loaded: float
) -> dict[str, Any]:
    return {
        "bounds": {
            bound.name: {
                "value": bound.value,
                "at_most": bound.at_most,
                "at_least": bound.at_least,
                "is_met": bound.is_met,
            }
            for bound in bounds
        },
        "ttft_seconds": found.ttft,
        "cached_tokens": found.cached,
        "hit_seconds": found.hits,
        "throughput_ratios": ratios,
        "prefetched_megabytes": loaded,
    }
