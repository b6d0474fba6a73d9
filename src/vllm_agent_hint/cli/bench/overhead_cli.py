"""The options of ``bench overhead``. Imports no more than they need."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def overhead(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="A tenth of the repetitions; decides nothing.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Measure this row only; may be repeated. Default: all."),
    ] = None,
) -> None:
    """What the plugin costs an engine, per block, step, turn, tick and record. No model runs."""
    from vllm_agent_hint.cli.bench.overhead import run_overhead

    run_overhead(json_file, Console(), quick=quick, only=only or ())
