"""The figures of a run, and the JSON and the table that hold them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
from rich import box
from rich.table import Table

from vllm_agent_hint.cli.bench.replay.driver import Replayed
from vllm_agent_hint.cli.bench.replay.segments import slots_of
from vllm_agent_hint.cli.bench.replay.workload import Traffic, Workload

Cell = Callable[[Mapping[str, Any]], Any]
"""What a run shows in a column; None for nothing."""


def figures_of(workload: Workload, capacity: int, replayed: Replayed) -> dict[str, Any]:
    """What a policy has served.

    Args:
        workload: Of what.
        capacity: Blocks of the cache.
        replayed: Hits of each arrival.
    """
    traffic = np.array([arrival.session.traffic for arrival in workload.arrivals])
    prompts = np.array([a.request.prompt_tokens for a in workload.arrivals], dtype=np.int64)
    hits = np.array(replayed.hit_tokens, dtype=np.int64)
    figures = shares(prompts, hits)
    figures["classes"] = {
        str(each): shares(prompts[traffic == each], hits[traffic == each])
        for each in Traffic
        if (traffic == each).any()
    }
    requests = (arrival.request for arrival in workload.arrivals)
    slots = (slots_of(r.prompt_tokens, r.output_tokens, workload.block_size) for r in requests)
    figures["too_large"] = sum(1 for wanted in slots if wanted > capacity)
    if len(replayed.boundary_ns):
        figures["boundary_us"] = percentiles_us(replayed.boundary_ns)
    return figures | replayed.figures


def shares(prompt_tokens: Any, hit_tokens: Any) -> dict[str, Any]:
    """Hit share, and what it is made of.

    Args:
        prompt_tokens: Of each request.
        hit_tokens: Of each request.
    """
    asked, hit = int(np.sum(prompt_tokens)), int(np.sum(hit_tokens))
    return {
        "requests": len(prompt_tokens),
        "prompt_tokens": asked,
        "hit_tokens": hit,
        "recomputed_tokens": asked - hit,
        "hit_share": hit / asked if asked else 0.0,
    }


def percentiles_us(nanoseconds: Sequence[int]) -> dict[str, float]:
    """Time per request boundary."""
    median, high = np.percentile(np.array(nanoseconds) / 1e3, (50, 99))
    return {"median": float(median), "p99": float(high)}


def table_of(runs: Sequence[Mapping[str, Any]]) -> Table:
    """The printed table: one line per workload, cache size and policy."""
    is_closed = any("closed_loop" in run for run in runs)
    table = Table(
        title="bench replay: hit share of prompt tokens in %, times in seconds",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    is_mixed = any(len(run["classes"]) > 1 for run in runs)
    columns = _COLUMNS + (_CLASS_COLUMNS if is_mixed else ())
    columns += _CLOSED_COLUMNS if is_closed else _OPEN_COLUMNS
    for heading, _ in columns:
        justify: Literal["left", "right"] = "left" if heading == "policy" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for run in runs:
        table.add_row(*("" if (v := cell(run)) is None else str(v) for _, cell in columns))
    return table


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.2f}"


def _class_share(run: Mapping[str, Any], traffic: Traffic) -> str | None:
    return _percent(run["classes"].get(traffic, {}).get("hit_share"))


def _time(name: str) -> Cell:
    return lambda run: None if run[name] is None else f"{run[name]:.2f}"


_COLUMNS: Final[tuple[tuple[str, Cell], ...]] = (
    ("seed", lambda run: run["seed"]),
    ("cache", lambda run: f"{run['cache_tokens'] / 1e6:g}M"),
    ("policy", lambda run: run["policy"]),
    ("all", lambda run: _percent(run["hit_share"])),
)
_CLASS_COLUMNS: Final[tuple[tuple[str, Cell], ...]] = (
    ("agents", lambda run: _class_share(run, Traffic.AGENTS)),
    ("1-shot", lambda run: _class_share(run, Traffic.ONE_SHOT)),
)
_OPEN_COLUMNS: Final[tuple[tuple[str, Cell], ...]] = (
    ("gap", lambda run: _whole_percent(run.get("gap_closed"))),
    ("us/req", lambda run: f"{run['boundary_us']['median']:.0f}" if "boundary_us" in run else ""),
)
_CLOSED_COLUMNS: Final[tuple[tuple[str, Cell], ...]] = (
    ("turns/h", lambda run: f"{run['turns_per_hour']:.0f}"),
    ("TTFT", _time("ttft_mean")),
    ("p95", _time("ttft_p95")),
    ("p99", _time("ttft_p99")),
    ("done", lambda run: run["sessions_done"]),
)


def _whole_percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.0f} %"


def gap_closed(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> float | None:
    """The part of the gap between stock and Belady's optimum that a run closes; None if unknown."""

    def share_of(policy: str) -> float | None:
        for other in runs:
            same = all(other[key] == run[key] for key in ("seed", "cache_tokens", "traces"))
            if same and other["policy"] == policy:
                return float(other["hit_share"])
        return None

    stock, best = share_of("stock"), share_of("min")
    if stock is None or best is None or best - stock < 1e-9:
        return None
    return (float(run["hit_share"]) - stock) / (best - stock)
