"""The figures of a run, and the JSON and the table that hold them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from vllm_agent_hint.cli.bench.replay.driver import Replayed
from vllm_agent_hint.cli.bench.replay.workload import Traffic, Workload


def figures_of(workload: Workload, replayed: Replayed) -> dict[str, Any]:
    """What a policy has served.

    Args:
        workload: Of what.
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
    """The printed table: one line per workload and cache size and policy."""
    is_closed = any("ttft_mean" in run for run in runs)
    table = Table(title="bench replay: what each policy serves of the prompt tokens")
    headings = ["seed", "cache", "policy", "hit share", "agents", "one-shot", "gap closed"]
    if is_closed:
        headings += ["turns/h", "TTFT mean", "p95", "p99", "sessions"]
    else:
        headings += ["us/request"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for run in runs:
        classes = run["classes"]
        row = [
            str(run["seed"]),
            f"{run['cache_tokens']:,}",
            run["policy"],
            f"{100 * run['hit_share']:.2f} %",
            *(
                f"{100 * classes[each]['hit_share']:.2f} %" if each in classes else ""
                for each in Traffic
            ),
            "" if (closed := gap_closed(run, runs)) is None else f"{100 * closed:.0f} %",
        ]
        if is_closed:
            row += [
                f"{run['turns_per_hour']:.0f}",
                *(f"{run[name]:.2f} s" for name in ("ttft_mean", "ttft_p95", "ttft_p99")),
                str(run["sessions_done"]),
            ]
        else:
            row.append(f"{run['boundary_us']['median']:.0f}" if "boundary_us" in run else "")
        table.add_row(*row)
    return table


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
