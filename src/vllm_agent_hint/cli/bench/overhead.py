"""What the plugin costs: stock vLLM beside it, both sides in turn, no model behind them."""

import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_agent_hint.cli.bench.blocks import LIVE_SESSIONS, scale, unhinted_blocks
from vllm_agent_hint.cli.bench.figure import Figure, Measured
from vllm_agent_hint.cli.bench.memory import SESSIONS, bytes_per_block, bytes_per_record, gc_ratio
from vllm_agent_hint.cli.bench.pressure import pressure_allocation
from vllm_agent_hint.cli.bench.recognition import recognition
from vllm_agent_hint.cli.bench.sharing import shared_release_slice
from vllm_agent_hint.cli.bench.steps import unhinted_steps
from vllm_agent_hint.cli.bench.ticks import (
    EXPIRING_SESSIONS,
    expiry_allocation,
    expiry_slice,
    idle_tick,
)
from vllm_agent_hint.cli.bench.turns import hinted_turn
from vllm_agent_hint.seams import installed_vllm_version


class Row(NamedTuple):
    """A measurement to make, and the bound that it has to keep.

    Args:
        name: Key in the JSON file.
        limit: The most that the figure may be.
        unit: Of both; empty for a ratio.
        measure: Makes it.
    """

    name: str
    limit: float
    unit: str
    measure: Callable[[], Measured]


def rows(scale_down: int) -> list[Row]:
    """Every figure of the report.

    Args:
        scale_down: Divides repetitions and sizes; only 1 decides anything.
    """
    n, expiring, holding = scale_down, EXPIRING_SESSIONS // scale_down, SESSIONS // scale_down
    return [
        Row("unhinted_block_ratio", 1.03, "", lambda: unhinted_blocks(0, pairs=200 // n)),
        Row(
            "unhinted_block_ratio_live",
            1.06,
            "",
            lambda: unhinted_blocks(LIVE_SESSIONS, pairs=200 // n),
        ),
        Row("unhinted_step_ratio", 1.02, "", lambda: unhinted_steps(sections=60 // n)),
        Row("hinted_turn_ratio", 1.5, "", lambda: hinted_turn(pairs=40 // n)),
        Row("scale", 1.25, "", lambda: scale(rounds=100 // n)),
        Row("recognition_us", 100.0, "us", lambda: recognition(prompts=200 // n)),
        Row("idle_tick_us", 0.5, "us", idle_tick),
        Row("expiry_slice_ms", 1.0, "ms", lambda: expiry_slice(sessions=expiring)),
        Row("expiry_allocation_ratio", 2.0, "", lambda: expiry_allocation(sessions=expiring)),
        Row("pressure_allocation_ratio", 4.0, "", lambda: pressure_allocation(pairs=60 // n)),
        Row("shared_release_slice_ms", 1.0, "ms", lambda: shared_release_slice(rounds=200 // n)),
        Row("bytes_per_block", 16.0, "B", bytes_per_block),
        Row("bytes_per_record", 100.0, "B", lambda: bytes_per_record(sessions=holding)),
        Row("gc_ratio", 1.3, "", lambda: gc_ratio(sessions=holding, collections=20 // n)),
    ]


def run_overhead(
    json_file: Path | None,
    console: Console,
    *,
    quick: bool = False,
    only: Sequence[str] = (),
) -> None:
    """Measure, print the table, and write the figures.

    Args:
        json_file: Where to write them; None prints only.
        console: Where to print.
        quick: A tenth of the repetitions: shows that the bench runs, decides nothing.
        only: Names of rows to measure; all of them if empty.
    """
    figures: list[Figure] = []
    chosen = [row for row in rows(10 if quick else 1) if not only or row.name in only]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(chosen))
        for row in chosen:
            progress.update(task, description=row.name)
            figures.append(Figure(row.name, row.limit, row.unit, row.measure()))
            gc.collect()
            progress.advance(task)
    _show(figures, console)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(_report(figures), indent=2) + "\n")


def _report(figures: Sequence[Figure]) -> dict[str, object]:
    return {
        **{figure.name: figure.measured.value for figure in figures},
        "vllm": installed_vllm_version(),
        "limits": {figure.name: figure.limit for figure in figures},
        "met": {figure.name: figure.is_met for figure in figures},
        "intervals": {
            figure.name: figure.measured.ratio.as_dict()
            for figure in figures
            if figure.measured.ratio is not None
        },
        "parts": {
            figure.name: dict(figure.measured.parts) for figure in figures if figure.measured.parts
        },
    }


def _show(figures: Sequence[Figure], console: Console) -> None:
    table = Table(title=f"What vllm-agent-hint costs, vLLM {installed_vllm_version()} = 1")
    for heading in ("measure", "found", "95 % interval", "bound", "met", "stock, ours", "pairs"):
        table.add_column(heading, justify="left" if heading == "measure" else "right")
    for figure in figures:
        table.add_row(*figure.as_row())
    console.print(table)
    console.print(
        "stock, ours: microseconds per block (block ratios, scale, allocations), per step, turn "
        "and collection; medians."
    )
