"""The figures of a report: what each is, whose it is, and which way is good."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vllm_agent_hint.cli.bench.serve.clock_file import Reading, seconds_per_step
from vllm_agent_hint.cli.bench.serve.play import Played
from vllm_agent_hint.cli.demo.client import Traffic
from vllm_agent_hint.cli.demo.measure import ServerFigures, TrafficFigures, of_traffic

Sheet = Mapping[str, float]
"""The figures of one play, by key, such as ``agents.ttft_mean``."""


class Good(StrEnum):
    HIGH = "high"
    LOW = "low"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Figure:
    """
    Args:
        key: Whose, and which.
        title: For a table.
        good: The direction in which it improves.
        show: A value in words.
        is_share: Arms are compared by the difference of shares instead of a ratio.
    """

    key: str
    title: str
    good: Good
    show: Callable[[float], str]
    is_share: bool = False

    @property
    def scope(self) -> str:
        return self.key.partition(".")[0]


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:,.1f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


_TRAFFIC: Final = (
    ("hit_share", "hit share", Good.HIGH, _percent, True),
    ("recomputed_tokens", "recomputed tokens", Good.LOW, _count, False),
    ("ttft_mean", "TTFT mean, ms", Good.LOW, _milliseconds, False),
    ("ttft_p50", "TTFT p50, ms", Good.LOW, _milliseconds, False),
    ("ttft_p95", "TTFT p95, ms", Good.LOW, _milliseconds, False),
    ("tpot_mean", "TPOT mean, ms", Good.LOW, _milliseconds, False),
    ("tpot_p50", "TPOT p50, ms", Good.LOW, _milliseconds, False),
)
_SERVER: Final = (
    Figure("all.tpot_mean", "TPOT mean, ms", Good.LOW, _milliseconds),
    Figure("all.queue_mean", "queue time mean, ms", Good.LOW, lambda v: f"{v * 1e3:,.2f}"),
    Figure("all.prefill_seconds", "time in prefill, s", Good.LOW, lambda v: f"{v:.2f}"),
    Figure("all.tokens_per_second", "throughput, tokens/s", Good.HIGH, _count),
    Figure("all.requests_per_second", "throughput, requests/s", Good.HIGH, lambda v: f"{v:.2f}"),
    Figure("all.peak_usage", "peak cache usage", Good.LOW, _percent, is_share=True),
    Figure("all.preemptions", "preemptions", Good.LOW, _count),
    Figure("all.steps", "scheduler steps", Good.NEITHER, _count),
    Figure("all.scheduler_step", "scheduler CPU/step, us", Good.LOW, lambda v: f"{v * 1e6:,.0f}"),
    Figure("all.bytes_per_block", "bytes per block", Good.LOW, _count),
)
FIGURES: Final = (
    *(
        Figure(f"{traffic}.{key}", title, good, show, is_share)
        for traffic in Traffic
        for key, title, good, show, is_share in _TRAFFIC
    ),
    *_SERVER,
)
SCOPE_TITLES: Final = {
    "agents": "agents",
    "one_shot": "one-shot requests",
    "all": "server, all traffic",
}


def sheet_of(
    played: Played, server: ServerFigures, clock: tuple[Reading, Reading] | None
) -> dict[str, float]:
    """What one play says. Of traffic that there is none of, nothing.

    Args:
        clock: The scheduler's clock before and after; None where the server carries none. It knows
            the usage after each step, where polling may have missed the peak.
    """
    sheet: dict[str, float] = {}
    for traffic in Traffic:
        records = of_traffic(played.records, traffic)
        if records:
            figures = TrafficFigures.of(records)
            sheet |= {
                f"{traffic}.hit_share": figures.cached_share,
                f"{traffic}.recomputed_tokens": float(figures.recomputed_tokens),
                f"{traffic}.ttft_mean": figures.ttft_mean,
                f"{traffic}.ttft_p50": figures.ttft_p50,
                f"{traffic}.ttft_p95": figures.ttft_p95,
                f"{traffic}.tpot_mean": figures.tpot_mean,
                f"{traffic}.tpot_p50": figures.tpot_p50,
            }
    everything = TrafficFigures.of(played.records)
    sheet |= {
        "all.tpot_mean": everything.tpot_mean,
        "all.queue_mean": server.queue_mean,
        "all.prefill_seconds": server.prefill_seconds,
        "all.tokens_per_second": everything.tokens_per_second,
        "all.requests_per_second": everything.requests / played.seconds,
        "all.peak_usage": played.peak_usage,
        "all.preemptions": float(server.preemptions),
    }
    if clock is not None and clock[1].steps > clock[0].steps:
        before, after = clock
        sheet["all.steps"] = float(after.steps - before.steps)
        sheet["all.peak_usage"] = after.peak_usage
        sheet["all.scheduler_step"] = seconds_per_step(before, after)
        if after.bytes_per_block:
            sheet["all.bytes_per_block"] = after.bytes_per_block
    return sheet
