"""What the columns say about the plugin, line by line, each with the bound that it is held to."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_agent_hint.cli.demo.client import RequestRecord, Traffic
from vllm_agent_hint.cli.demo.columns import ColumnName
from vllm_agent_hint.cli.demo.measure import ColumnResult, of_traffic, quantile

SHARE_OF_CEILINGS_HITS: Final = 0.75
SHARE_OF_CEILINGS_TTFT: Final = 0.5
NOISE: Final = 1.05
RESAMPLES: Final = 2000

TRAFFIC_IN_WORDS: Final = {
    Traffic.AGENTS: "agents' requests",
    Traffic.ONE_SHOT: "one-shot requests",
}

Results = Mapping[ColumnName, ColumnResult]


@dataclass(frozen=True, slots=True)
class Finding:
    """
    Args:
        key: Its name in the JSON.
        text: The finding in words, value and bound included.
        value: A ratio, a share, or 0.0 / 1.0 for a yes-or-no finding.
        bound: What ``value`` is held to; for ratios, what the interval's low end is held to.
        interval: The 95 % interval of a ratio of means.
    """

    key: str
    text: str
    value: float
    bound: float
    met: bool
    interval: tuple[float, float] | None = None


def judge(results: Results) -> list[Finding]:
    """Every finding that the columns at hand allow."""
    findings: list[Finding] = []
    off, on = results.get(ColumnName.OFF), results.get(ColumnName.ON)
    ceiling = results.get(ColumnName.CEILING)
    no_pressure = results.get(ColumnName.NO_PRESSURE)
    findings.append(_hints_active(results))
    findings.append(_same_prompts(results))
    if off and on and ceiling:
        findings.append(_cached_share_won(off, on, ceiling))
        findings.append(_ttft_won(off, on, ceiling))
    if off and on:
        findings += _within_noise("on_vs_off", on, off, (Traffic.ONE_SHOT,))
    if no_pressure and ceiling:
        findings.append(_same_hits(no_pressure, ceiling))
        findings += _within_noise("no_pressure_vs_ceiling", no_pressure, ceiling, tuple(Traffic))
    return findings


def _hints_active(results: Results) -> Finding:
    right = all(result.server.hints_active == result.column.hints_on for result in results.values())
    answer = "yes" if right else "NO"
    return Finding(
        "hints_active",
        f"The plugin is active where hints are on, and nowhere else: {answer}",
        value=float(right),
        bound=1.0,
        met=right,
    )


def _same_prompts(results: Results) -> Finding:
    agents = {result.agents.prompts_digest for result in results.values()}
    one_shots = {result.one_shot.prompts_digest for result in results.values() if result.one_shot}
    same = len(agents) == 1 and len(one_shots) <= 1
    return Finding(
        "same_prompts",
        "Every column was asked the same prompts, so greedy answers were the same: "
        + ("yes" if same else "NO"),
        value=float(same),
        bound=1.0,
        met=same,
    )


def _cached_share_won(off: ColumnResult, on: ColumnResult, ceiling: ColumnResult) -> Finding:
    won = _share_won(off.agents.cached_share, on.agents.cached_share, ceiling.agents.cached_share)
    return Finding(
        "cached_share_won",
        f"Hints win {won:.0%} of what the ceiling gains in the agents' cached share "
        f"(at least {SHARE_OF_CEILINGS_HITS:.0%})",
        value=won,
        bound=SHARE_OF_CEILINGS_HITS,
        met=won >= SHARE_OF_CEILINGS_HITS,
    )


def _ttft_won(off: ColumnResult, on: ColumnResult, ceiling: ColumnResult) -> Finding:
    won = _share_won(off.agents.ttft_mean, on.agents.ttft_mean, ceiling.agents.ttft_mean)
    return Finding(
        "ttft_won",
        f"Hints win {won:.0%} of what the ceiling gains in the agents' mean TTFT "
        f"(at least {SHARE_OF_CEILINGS_TTFT:.0%})",
        value=won,
        bound=SHARE_OF_CEILINGS_TTFT,
        met=won >= SHARE_OF_CEILINGS_TTFT,
    )


def _share_won(off: float, on: float, ceiling: float) -> float:
    return (on - off) / (ceiling - off) if ceiling != off else 0.0


def _same_hits(no_pressure: ColumnResult, ceiling: ColumnResult) -> Finding:
    def hits(result: ColumnResult) -> dict[str, int]:
        return {record.name: record.cached_tokens for record in result.records}

    same = hits(no_pressure) == hits(ceiling)
    return Finding(
        "no_pressure_same_hits",
        "Without pressure every request hits exactly what it hits on stock vLLM: "
        + ("yes" if same else "NO"),
        value=float(same),
        bound=1.0,
        met=same,
    )


def _within_noise(
    key: str, tested: ColumnResult, reference: ColumnResult, traffics: Sequence[Traffic]
) -> list[Finding]:
    findings = []
    figures: dict[str, Callable[[RequestRecord], float]] = {
        "ttft": lambda record: record.ttft,
        "tpot": lambda record: record.tpot,
    }
    for traffic in traffics:
        for figure, read in figures.items():
            pairs = _pairs(tested, reference, traffic, read)
            ratio = _ratio_of_sums(pairs)
            low, high = bootstrap_interval(pairs)
            findings.append(
                Finding(
                    f"{key}_{traffic}_{figure}",
                    f"{figure.upper()} of the {TRAFFIC_IN_WORDS[traffic]}, "
                    f"{tested.column.title} / {reference.column.title}: {ratio:.2f} "
                    f"[{low:.2f}, {high:.2f}] (the 95 % interval starts at most at {NOISE:.2f})",
                    value=ratio,
                    bound=NOISE,
                    met=low <= NOISE,
                    interval=(low, high),
                )
            )
    return findings


def _pairs(
    tested: ColumnResult,
    reference: ColumnResult,
    traffic: Traffic,
    read: Callable[[RequestRecord], float],
) -> list[tuple[float, float]]:
    """The same request in both columns."""
    by_name = {record.name: record for record in of_traffic(reference.records, traffic)}
    return [
        (read(record), read(by_name[record.name]))
        for record in of_traffic(tested.records, traffic)
        if record.name in by_name
    ]


def bootstrap_interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The 95 % interval of the ratio of means, by resampling pairs with a fixed seed."""
    dice = random.Random(0)
    ratios = [_ratio_of_sums(dice.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES)]
    return quantile(ratios, 0.025), quantile(ratios, 0.975)


def _ratio_of_sums(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(tested for tested, _ in pairs) / sum(reference for _, reference in pairs)
