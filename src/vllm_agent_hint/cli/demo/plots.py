"""The plots of the report. Each function returns a figure."""

from collections.abc import Sequence
from typing import Final

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_agent_hint.cli.demo.client import Traffic
from vllm_agent_hint.cli.demo.columns import ColumnName
from vllm_agent_hint.cli.demo.measure import ColumnResult, of_traffic
from vllm_agent_hint.cli.demo.table import TRAFFIC_TITLE

COLOURS: Final = {
    ColumnName.OFF: "#b0413e",
    ColumnName.ON: "#2a7f62",
    ColumnName.CEILING: "#8d99ae",
    ColumnName.NO_PRESSURE: "#5b7db1",
    ColumnName.AGENTS_ONLY: "#c9a227",
}


def overview(results: Sequence[ColumnResult]) -> Figure:
    """What the agents' prompts hit, and how long each traffic waits for its first token."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    hits, agents, one_shots = figure.subplots(1, 3)
    shares = [100 * result.agents.cached_share for result in results]
    _bars(hits, results, shares, "{:.0f} %")
    hits.set(title="agents: cached share of prompt tokens", ylabel="%", ylim=(0, 105))
    for axes, traffic in ((agents, Traffic.AGENTS), (one_shots, Traffic.ONE_SHOT)):
        there = [result for result in results if result.figures(traffic)]
        means = [
            1e3 * figures.ttft_mean for result in there if (figures := result.figures(traffic))
        ]
        _bars(axes, there, means, "{:.0f}")
        axes.set(title=f"{TRAFFIC_TITLE[traffic]}: mean TTFT", ylabel="ms")
    return figure


def over_time(results: Sequence[ColumnResult]) -> Figure:
    """Each agent request at the time when it was sent: what it had to recompute."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    axes = figure.subplots()
    for result in _first_three(results):
        records = of_traffic(result.records, Traffic.AGENTS)
        axes.plot(
            [record.sent for record in records],
            [record.prompt_tokens - record.cached_tokens for record in records],
            "o",
            color=COLOURS[result.column.name],
            label=result.column.title,
            alpha=0.8,
        )
    axes.set(
        title="agents: prompt tokens recomputed by each request",
        xlabel="seconds since the load began",
        ylabel="tokens",
    )
    _finish(axes)
    return figure


def waiting_times(results: Sequence[ColumnResult]) -> Figure:
    """Cumulative distributions of TTFT, for those who care about more than a mean."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, traffic in zip(figure.subplots(1, 2), Traffic, strict=True):
        for result in _first_three(results):
            ttfts = sorted(1e3 * record.ttft for record in of_traffic(result.records, traffic))
            shares = [(rank + 1) / len(ttfts) for rank in range(len(ttfts))]
            axes.step(
                ttfts,
                shares,
                where="post",
                color=COLOURS[result.column.name],
                label=result.column.title,
            )
        axes.set(title=f"{TRAFFIC_TITLE[traffic]}: TTFT", xlabel="ms", ylabel="share of requests")
        _finish(axes)
    return figure


def _first_three(results: Sequence[ColumnResult]) -> list[ColumnResult]:
    shown = (ColumnName.OFF, ColumnName.ON, ColumnName.CEILING)
    return [result for result in results if result.column.name in shown]


def _bars(axes: Axes, results: Sequence[ColumnResult], values: Sequence[float], label: str) -> None:
    bars = axes.bar(
        [result.column.title.replace(" ", "\n") for result in results],
        values,
        color=[COLOURS[result.column.name] for result in results],
    )
    axes.bar_label(bars, [label.format(value) for value in values], padding=2)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
