"""Writes a run down as JSON and as one plot per load.

Stable keys::

    machine, command, method, seed, repetitions
    loads.LOAD   told, notes, reference, same_prompts, verdict, losses
      arms.ARM   meaning, environment, cache_tokens, hints_active, hint_metrics,
                 figures.KEY   mean, spread, each (one value per repetition), and against the
                               reference ``by_reference``: value, low, high, pairs
                 requests      per repetition: name, sent, ttft, tpot, prompt, cached, answered

Shares are of 1, times are seconds. ``by_reference`` is a ratio; of shares, a difference.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_agent_hint.cli.bench.serve.figures import FIGURES, Figure
from vllm_agent_hint.cli.bench.serve.interval import METHOD, Interval
from vllm_agent_hint.cli.bench.serve.plots import overview
from vllm_agent_hint.cli.bench.serve.result import ArmResult, LoadResult, losses
from vllm_agent_hint.cli.bench.serve.table import loss_in_words
from vllm_agent_hint.cli.bench.serve.verdict import judge


@dataclass(frozen=True, slots=True)
class ServeRun:
    """
    Args:
        machine: What it ran on, by name.
        command: As it was typed.
    """

    machine: Mapping[str, Any]
    command: str
    seed: int
    repetitions: int
    loads: Sequence[LoadResult]


def write_report(run: ServeRun, json_file: Path) -> list[Path]:
    """Returns what was written: the JSON file, and beside it a plot per load."""
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(as_json(run), indent=1) + "\n")
    written = [json_file]
    for result in run.loads:
        plot = json_file.with_name(f"{json_file.stem}-{result.load}.svg")
        overview(result).savefig(plot, metadata={"Date": None})
        written.append(plot)
    return written


def as_json(run: ServeRun) -> dict[str, Any]:
    return {
        "machine": dict(run.machine),
        "command": run.command,
        "method": METHOD,
        "seed": run.seed,
        "repetitions": run.repetitions,
        "loads": {result.load: _load_as_json(result) for result in run.loads},
    }


def _load_as_json(result: LoadResult) -> dict[str, Any]:
    return {
        "told": result.told,
        "notes": list(result.notes),
        "reference": result.reference,
        "same_prompts": result.same_prompts,
        "arms": {arm.arm.name: _arm_as_json(result, arm) for arm in result.arms},
        "verdict": [
            {
                "key": finding.key,
                "outcome": finding.outcome.value,
                "text": finding.text,
                "interval": _interval_as_json(finding.interval),
            }
            for finding in judge(result)
        ],
        "losses": [loss_in_words(result, loss) for loss in losses(result)],
    }


def _arm_as_json(result: LoadResult, arm: ArmResult) -> dict[str, Any]:
    return {
        "meaning": arm.arm.meaning,
        "environment": dict(arm.arm.environment),
        "cache_tokens": arm.cache_tokens,
        "hints_active": all(play.hints_active for play in arm.plays),
        "hint_metrics": [dict(play.hint_metrics) for play in arm.plays],
        "figures": {
            figure.key: _figure_as_json(result, arm, figure)
            for figure in FIGURES
            if arm.values(figure.key)
        },
        "requests": [
            [
                [
                    record.name,
                    round(record.sent, 4),
                    round(record.ttft, 5),
                    round(record.tpot, 6),
                    record.prompt_tokens,
                    record.cached_tokens,
                    record.completion_tokens,
                ]
                for record in play.records
            ]
            for play in arm.plays
        ],
    }


def _figure_as_json(result: LoadResult, arm: ArmResult, figure: Figure) -> dict[str, Any]:
    is_reference = arm.arm.name == result.reference
    compared = None if is_reference else result.compare(figure, arm.arm.name)
    return {
        "mean": arm.mean(figure.key),
        "spread": arm.spread(figure.key),
        "each": arm.values(figure.key),
        "by_reference": _interval_as_json(compared),
    }


def _interval_as_json(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    ends = {"low": interval.low, "high": interval.high}
    if math.isinf(interval.half_width):  # JSON has no infinity.
        ends = dict.fromkeys(ends)  # type: ignore[assignment]
    return {"value": interval.value, **ends, "pairs": interval.pairs}
