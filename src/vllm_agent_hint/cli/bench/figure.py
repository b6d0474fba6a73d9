"""One row of the report: what was measured, and the bound that it keeps or misses."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_agent_hint.cli.bench.paired import Ratio


@dataclass(frozen=True, slots=True)
class Measured:
    """What a measurement found.

    Args:
        value: In the unit of its row.
        ratio: Where the value is one of timings, how sure it is.
        parts: What the value was made of, by name.
    """

    value: float
    ratio: Ratio | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, ratio: Ratio, **parts: float) -> "Measured":
        return cls(ratio.median, ratio, parts)


@dataclass(frozen=True, slots=True)
class Figure:
    """A measurement beside its bound.

    Args:
        name: Key in the JSON file.
        limit: The most that it may be.
        unit: Of both; empty for a ratio.
        measured: What was found.
    """

    name: str
    limit: float
    unit: str
    measured: Measured

    @property
    def is_met(self) -> bool:
        return self.measured.value <= self.limit

    def as_row(self) -> list[str]:
        """Cells of the printed table."""
        ratio, unit = self.measured.ratio, self.unit and f" {self.unit}"
        row = [
            self.name,
            f"{self.measured.value:.3f}{unit}",
            f"{ratio.low:.3f} - {ratio.high:.3f}" if ratio else "",
            f"{self.limit:g}{unit}",
            "yes" if self.is_met else "NO",
        ]
        if ratio:
            return [*row, f"{ratio.stock_us:.3f} us, {ratio.ours_us:.3f} us", str(ratio.pairs)]
        parts = ", ".join(f"{name} {value:.3f}" for name, value in self.measured.parts.items())
        return [*row, parts, ""]
