"""What was measured: every play of every arm, and what the arms say about each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

from vllm_agent_hint.cli.bench.serve.arms import Arm
from vllm_agent_hint.cli.bench.serve.figures import FIGURES, Figure, Good, Sheet
from vllm_agent_hint.cli.bench.serve.interval import (
    Interval,
    difference_interval,
    ratio_interval,
)
from vllm_agent_hint.cli.demo.client import RequestRecord


@dataclass(frozen=True, slots=True)
class Play:
    """One arm's turn in one repetition.

    Args:
        sheet: Its figures.
        records: Its requests.
        prompts_digest: Equal where every prompt was the same, token for token.
        hints_active: Whether the plugin's own metrics were there.
        hint_metrics: Those that are not zero at the end.
    """

    sheet: Sheet
    records: tuple[RequestRecord, ...]
    prompts_digest: str
    hints_active: bool
    hint_metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ArmResult:
    arm: Arm
    cache_tokens: int
    plays: tuple[Play, ...]

    def values(self, key: str) -> list[float]:
        """Of each repetition; empty where the figure could not be read."""
        found = [play.sheet[key] for play in self.plays if key in play.sheet]
        return found if len(found) == len(self.plays) else []

    def mean(self, key: str) -> float | None:
        values = self.values(key)
        return fmean(values) if values else None

    def spread(self, key: str) -> float | None:
        """Standard deviation over the repetitions."""
        values = self.values(key)
        return stdev(values) if len(values) > 1 else None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """
    Args:
        told: Sizes in words.
        notes: What the reader has to know about this machine or this load.
        reference: Name of the arm that the others are compared with.
        arms: In the order in which they were asked for, the reference first.
    """

    load: str
    told: str
    notes: tuple[str, ...]
    reference: str
    arms: tuple[ArmResult, ...]

    def arm(self, name: str) -> ArmResult | None:
        return next((result for result in self.arms if result.arm.name == name), None)

    def compare(self, figure: Figure, arm: str, reference: str | None = None) -> Interval | None:
        """One arm by another; None where one of them lacks the figure, or a zero forbids it."""
        ours, theirs = self.arm(arm), self.arm(reference or self.reference)
        if ours is None or theirs is None:
            return None
        pairs = list(zip(ours.values(figure.key), theirs.values(figure.key), strict=False))
        return difference_interval(pairs) if figure.is_share else ratio_interval(pairs)

    @property
    def same_prompts(self) -> bool:
        """Whether every arm of each repetition was asked the same, answers fed back included."""
        return all(
            len({play.prompts_digest for play in plays}) == 1
            for plays in zip(*(result.plays for result in self.arms), strict=True)
        )


@dataclass(frozen=True, slots=True)
class Loss:
    """A figure whose whole interval lies on the bad side."""

    arm: str
    figure: Figure
    interval: Interval


def losses(result: LoadResult) -> list[Loss]:
    """Where the arms lose to the reference, beyond the spread of the repetitions."""
    found = []
    for arm in result.arms:
        if arm.arm.name == result.reference:
            continue
        for figure in FIGURES:
            interval = result.compare(figure, arm.arm.name)
            if interval is not None and _is_worse(figure, interval):
                found.append(Loss(arm.arm.name, figure, interval))
    return found


def _is_worse(figure: Figure, interval: Interval) -> bool:
    same = 0.0 if figure.is_share else 1.0
    if figure.good is Good.LOW:
        return interval.low > same
    return figure.good is Good.HIGH and interval.high < same
