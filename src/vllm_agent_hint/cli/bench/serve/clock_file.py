"""The few bytes through which a clocked scheduler and the bench speak. Imports no vLLM."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

ENV_FILE: Final = "AGENT_HINT_BENCH_CLOCK"
FORMAT: Final = struct.Struct("<Qddd")
ROUND: Final = struct.Struct("<Q")
"""Behind it, written by the bench alone: a new number starts the peak anew."""


@dataclass(frozen=True, slots=True)
class Reading:
    """
    Args:
        steps: Calls of ``schedule`` since the server started.
        cpu_seconds: Thread CPU time of the scheduler's methods since then.
        bytes_per_block: Python memory of a KV cache block's record in the pool, empty.
        peak_usage: Of the KV cache by running requests, after each step of this round.
    """

    steps: int
    cpu_seconds: float
    bytes_per_block: float
    peak_usage: float

    @classmethod
    def of(cls, file: Path) -> Self:
        return cls(*FORMAT.unpack(file.read_bytes()[: FORMAT.size]))


def lay_out(file: Path) -> None:
    """Makes the file, all zero. A server that finds its name in the environment fills it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(FORMAT.size + ROUND.size))


def start_round(file: Path) -> None:
    """The peak counts from here on."""
    with file.open("r+b") as opened:
        opened.seek(FORMAT.size)
        (number,) = ROUND.unpack(opened.read(ROUND.size))
        opened.seek(FORMAT.size)
        opened.write(ROUND.pack(number + 1))


def seconds_per_step(before: Reading, after: Reading) -> float:
    """CPU seconds of the scheduler per step between two readings; 0.0 without a step."""
    steps = after.steps - before.steps
    return (after.cpu_seconds - before.cpu_seconds) / steps if steps else 0.0
