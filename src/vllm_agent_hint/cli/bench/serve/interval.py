"""What repetitions say about two arms: Student's t over pairs, one pair per repetition.

Repetition k of both arms played the same script, one after the other, so that what the script and
the hour brought falls out of their ratio. Ratios are taken as logarithms: twice as long and half as
long are equally far from the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

METHOD: Final = "Student's t over the repetitions' paired log ratios (shares: differences), 95 %"
NORMAL: Final = 1.959964

# fmt: off
_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Interval:
    """
    Args:
        value: A geometric mean of ratios, or a mean of differences.
        low: Lower end of its 95 % interval; minus infinity with a single pair.
        high: Upper end.
        pairs: Repetitions.
    """

    value: float
    low: float
    high: float
    pairs: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile; beyond the table to 1e-3 by Cornish and Fisher's first term."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    return NORMAL + (NORMAL**3 + NORMAL) / (4 * degrees)


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """Of ``(this arm, reference)``. None where a zero leaves no ratio."""
    if not pairs or any(value <= 0.0 for pair in pairs for value in pair):
        return None
    logs = _interval([math.log(ours / reference) for ours, reference in pairs])
    return Interval(
        math.exp(logs.value),
        math.exp(logs.low),
        math.exp(logs.high) if logs.high < math.inf else math.inf,
        logs.pairs,
    )


def difference_interval(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """The same for shares, which may be zero."""
    if not pairs:
        return None
    return _interval([ours - reference for ours, reference in pairs])


def _interval(values: Sequence[float]) -> Interval:
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf, len(values))
    reach = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - reach, mean + reach, len(values))
