"""A reading of vLLM's ``/metrics``, by name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

_SAMPLE: Final = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    samples: tuple[Sample, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the Prometheus text format; what is no sample is skipped."""
        found = filter(None, map(_SAMPLE.match, text.splitlines()))
        return cls(
            tuple(
                Sample(match[1], dict(_LABEL.findall(match[2] or "")), float(match[3]))
                for match in found
            )
        )

    def __contains__(self, name: str) -> bool:
        return any(sample.name == name for sample in self.samples)

    def __getitem__(self, name: str) -> float:
        """The sum of all samples of this name (``..._total``, ``..._sum``, ... spelled out).

        Raises:
            KeyError: There is none.
        """
        if name not in self:
            raise KeyError(name)
        return self.total(name)

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name whose labels include these; 0.0 if none do."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def names(self, prefix: str = "") -> set[str]:
        return {sample.name for sample in self.samples if sample.name.startswith(prefix)}
