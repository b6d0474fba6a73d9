"""The plots of a replay. Each function returns a figure."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_agent_hint.cli.bench.replay.workload import Traffic

Runs = Sequence[Mapping[str, Any]]

COLOURS: Final = {
    "stock": "#b0413e",
    "slru": "#c9a227",
    "hints": "#2a7f62",
    "auto": "#5b7db1",
    "session-min": "#b8c0cc",
    "min": "#8d99ae",
}
OTHER_COLOURS: Final = ("#7a5195", "#ef8354", "#4f5d75", "#40798c", "#9a031e")
TITLES: Final = {"agents": "agents", "one_shot": "one-shot"}


def overview(runs: Runs) -> Figure:
    """Hit share by cache size, of all traffic and of each class; in the closed loop TTFT, too."""
    classes = [str(each) for each in Traffic if any(each in run["classes"] for run in runs)]
    panels = ["all"] + (classes if len(classes) > 1 else [])
    is_closed = any("ttft_mean" in run for run in runs)
    figure = Figure(figsize=(5.2 * (len(panels) + is_closed), 3.8), layout="constrained")
    axes_of = figure.subplots(1, len(panels) + is_closed, squeeze=False)[0]
    for axes, panel in zip(axes_of, panels, strict=False):
        _lines(axes, runs, lambda run, panel=panel: _hit_share(run, panel))
        title = "all traffic" if panel == "all" else TITLES[panel]
        axes.set(title=f"{title}: hit share of prompt tokens", ylabel="%")
    if is_closed:
        _lines(axes_of[-1], runs, lambda run: run["ttft_mean"])
        axes_of[-1].set(title="mean TTFT", ylabel="s", ylim=(0, None))
    axes_of[0].legend(frameon=False)
    return figure


def _hit_share(run: Mapping[str, Any], panel: str) -> float | None:
    figures = run if panel == "all" else run["classes"].get(panel)
    return None if figures is None else 100 * figures["hit_share"]


def _lines(axes: Axes, runs: Runs, value: Any) -> None:
    """One line per policy, the mean over seeds; a band where seeds differ."""
    policies = list(dict.fromkeys(run["policy"] for run in runs))
    others = iter(OTHER_COLOURS * len(policies))
    for policy in policies:
        mine = [run for run in runs if run["policy"] == policy]
        sizes = sorted({run["cache_tokens"] for run in mine})
        found = [
            [
                each
                for run in mine
                if run["cache_tokens"] == size and (each := value(run)) is not None
            ]
            for size in sizes
        ]
        shown = [(size / 1e6, each) for size, each in zip(sizes, found, strict=True) if each]
        if not shown:
            continue
        xs = [size for size, _ in shown]
        colour = COLOURS.get(policy) or next(others)
        style = "--" if policy in ("min", "session-min") else "-"
        axes.plot(xs, [fmean(e) for _, e in shown], style, marker="o", color=colour, label=policy)
        lows, highs = [min(e) for _, e in shown], [max(e) for _, e in shown]
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("cache, million tokens")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
