"""The bounds that the arms are held to, one line each."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vllm_agent_hint.cli.bench.serve.arms import CEILING, SPOKEN_ARMS, STOCK, UNHINTED
from vllm_agent_hint.cli.bench.serve.figures import FIGURES, SCOPE_TITLES, Figure
from vllm_agent_hint.cli.bench.serve.interval import Interval
from vllm_agent_hint.cli.bench.serve.result import LoadResult

TTFT_BOUND: Final = {"mixed": 0.45, "rfc": 0.75}
CEILING_BOUND: Final = 1.10
NOISE_BOUND: Final = 1.03
WIDEST: Final = 0.03
FEWEST_REPETITIONS: Final = 10

_BY_KEY: Final = {figure.key: figure for figure in FIGURES}
_AGENTS_TTFT: Final = _BY_KEY["agents.ttft_mean"]
_MUST_NOT_GROW: Final = tuple(
    _BY_KEY[key] for key in ("all.tpot_mean", "one_shot.tpot_mean", "one_shot.ttft_mean")
)


class Outcome(StrEnum):
    MET = "met"
    NOT_MET = "NOT met"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Finding:
    """
    Args:
        key: Its name in the JSON.
        text: In words, bound and interval included.
        interval: What was found; None for a yes-or-no finding.
    """

    key: str
    text: str
    outcome: Outcome
    interval: Interval | None = None


def judge(result: LoadResult) -> list[Finding]:
    """Every finding that the arms at hand allow."""
    findings = [_plugin_where_it_belongs(result)]
    if result.reference not in (STOCK, UNHINTED):
        return findings
    for arm in SPOKEN_ARMS:
        if result.arm(arm) is None:
            continue
        bound = TTFT_BOUND.get(result.load)
        if bound is not None:
            findings += _ttft_won(result, arm, bound)
        findings += [
            finding
            for figure in _MUST_NOT_GROW
            if (finding := _does_not_grow(result, arm, figure)) is not None
        ]
    return findings


def _plugin_where_it_belongs(result: LoadResult) -> Finding:
    wrong = [
        arm.arm.name
        for arm in result.arms
        if any(play.hints_active != arm.arm.keeps_sessions for play in arm.plays)
    ]
    return Finding(
        f"{result.load}.plugin",
        "sessions are kept in every arm that should keep them, and in no other"
        if not wrong
        else f"sessions are not kept, or kept against the plan, in {', '.join(wrong)}",
        Outcome.NOT_MET if wrong else Outcome.MET,
    )


def _ttft_won(result: LoadResult, arm: str, bound: float) -> list[Finding]:
    by_reference = result.compare(_AGENTS_TTFT, arm)
    if by_reference is None:
        return []
    met = by_reference.value <= bound
    text = (
        f"agents' mean TTFT, {arm} / {result.reference}: {in_words(by_reference)}, "
        f"at most {bound:g}"
    )
    by_ceiling = result.compare(_AGENTS_TTFT, arm, CEILING) if result.load == "mixed" else None
    if by_ceiling is not None:
        met = met or by_ceiling.value <= CEILING_BOUND
        text += f"; or / ceiling: {in_words(by_ceiling)}, at most {CEILING_BOUND:g}"
    key = f"{result.load}.{arm}.{_AGENTS_TTFT.key}"
    return [Finding(key, text, Outcome.MET if met else Outcome.NOT_MET, by_reference)]


def _does_not_grow(result: LoadResult, arm: str, figure: Figure) -> Finding | None:
    """The interval must not lie above the bound; too wide an interval decides nothing else."""
    interval = result.compare(figure, arm)
    if interval is None:
        return None
    if interval.low > NOISE_BOUND:
        outcome = Outcome.NOT_MET
    elif interval.half_width > WIDEST or interval.pairs < FEWEST_REPETITIONS:
        outcome = Outcome.NOT_MEASURED
    else:
        outcome = Outcome.MET
    name = figure.title.partition(",")[0]
    whose = "all requests" if figure.scope == "all" else SCOPE_TITLES[figure.scope]
    text = (
        f"{name} of {whose}, {arm} / {result.reference}: "
        f"{in_words(interval)}, must not lie above {NOISE_BOUND:g} (measured: at least "
        f"{FEWEST_REPETITIONS} repetitions, and within +-{WIDEST:.0%})"
    )
    return Finding(f"{result.load}.{arm}.{figure.key}", text, outcome, interval)


def in_words(interval: Interval) -> str:
    """A ratio with its interval, such as ``0.412 [0.401, 0.424]``."""
    if math.isinf(interval.half_width):
        return f"{interval.value:.3f} (one repetition, no interval)"
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
