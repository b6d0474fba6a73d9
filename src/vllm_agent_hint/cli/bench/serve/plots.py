"""One plot per load: what the arms hit, how long is waited, and what gets worse."""

from collections.abc import Sequence
from typing import Final

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_agent_hint.cli.bench.serve.figures import FIGURES
from vllm_agent_hint.cli.bench.serve.figures import Figure as Measured
from vllm_agent_hint.cli.bench.serve.result import ArmResult, LoadResult

COLOURS: Final = {
    "stock": "#b0413e",
    "hints": "#2a7f62",
    "hints-evict": "#1d5a45",
    "ceiling": "#8d99ae",
}
OTHER: Final = ("#5b7db1", "#c9a227", "#7a5195", "#ef7d57", "#4f8a8b", "#9b5de5")
BARS: Final = (
    ("agents.hit_share", 100.0, "agents: hit share, %"),
    ("agents.ttft_mean", 1e3, "agents: mean TTFT, ms"),
    ("one_shot.ttft_mean", 1e3, "one-shots: mean TTFT, ms"),
    ("all.tpot_mean", 1e3, "TPOT, ms"),
)
RATIOS: Final = (
    "agents.ttft_mean",
    "agents.tpot_mean",
    "one_shot.ttft_mean",
    "one_shot.tpot_mean",
    "all.queue_mean",
    "all.tokens_per_second",
    "all.scheduler_step",
)


def overview(result: LoadResult) -> Figure:
    """Bars with every repetition as a dot; on the right the ratios with their intervals."""
    bars = [bar for bar in BARS if any(arm.values(bar[0]) for arm in result.arms)]
    figure = Figure(figsize=(3.1 * len(bars) + 5, 4.2), layout="constrained")
    axes: Sequence[Axes] = figure.subplots(
        1, len(bars) + 1, width_ratios=[*(1 for _ in bars), 1.8], squeeze=False
    )[0]
    for (key, unit, title), place in zip(bars, axes, strict=False):
        _bars(place, result.arms, key, unit, title)
    _ratios(axes[-1], result)
    figure.suptitle(f"bench serve: {result.load}", x=0.01, ha="left")
    return figure


def _colour(place: int, arm: ArmResult) -> str:
    return COLOURS.get(arm.arm.name, OTHER[place % len(OTHER)])


def _bars(axes: Axes, arms: Sequence[ArmResult], key: str, unit: float, title: str) -> None:
    for place, arm in enumerate(arms):
        values = [unit * value for value in arm.values(key)]
        if not values:
            continue
        bar = axes.bar(place, sum(values) / len(values), color=_colour(place, arm), alpha=0.85)
        axes.bar_label(bar, fmt="%.3g", padding=2)
        axes.plot([place] * len(values), values, "o", color="black", ms=2.5, alpha=0.5)
    axes.set_xticks(range(len(arms)), [arm.arm.name for arm in arms], rotation=35, ha="right")
    axes.set_title(title, fontsize=10)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)


def _ratios(axes: Axes, result: LoadResult) -> None:
    figures = [figure for figure in FIGURES if figure.key in RATIOS]
    others = [
        (place, arm) for place, arm in enumerate(result.arms) if arm.arm.name != result.reference
    ]
    for row, figure in enumerate(figures):
        for number, (place, arm) in enumerate(others):
            interval = result.compare(figure, arm.arm.name)
            if interval is None:
                continue
            height = row + 0.7 * ((number + 0.5) / len(others) - 0.5)
            colour = _colour(place, arm)
            axes.plot(interval.value, height, "o", color=colour, ms=4)
            if interval.pairs > 1:
                axes.hlines(height, interval.low, interval.high, color=colour)
    axes.axvline(1.0, color="black", lw=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(figures)), [_name(figure) for figure in figures], fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"ratio to {result.reference}, 95 % interval", fontsize=10)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _name(figure: Measured) -> str:
    scope = {"agents": "agents", "one_shot": "one-shots", "all": "all"}[figure.scope]
    return f"{scope}: {figure.title.partition(',')[0]}"
