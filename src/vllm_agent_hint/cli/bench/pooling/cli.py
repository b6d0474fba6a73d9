"""The command line of ``bench pooling``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_agent_hint.cli.extra import imports_of_extra


def pooling(
    agents: Annotated[int, typer.Option(min=1, help="Agents whose second turn is timed.")] = 10,
    pairs: Annotated[
        int, typer.Option(min=1, help="Pairs of windows, with prefetches and without.")
    ] = 10,
    hybrid_agents: Annotated[
        int, typer.Option(min=1, help="Sessions of the hybrid model that are parked and resumed.")
    ] = 5,
    load_rate: Annotated[
        float, typer.Option(min=0.01, help="Throttle of the tier: megabytes loaded per second.")
    ] = 12.0,
    model: Annotated[str, typer.Option(help="Kind of model; see the demo's.")] = "qwen3",
    folder: Annotated[Path, typer.Option(help="Where models, logs and vLLM's cache go.")] = Path(
        "out/bench-pooling"
    ),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Resume after offload, flood and prefetch, beside recomputing and stock offloading.

    Four servers run side by side, in about six minutes. Exits with 1 if a bound is missed.
    """
    with imports_of_extra("bench"):
        from vllm_agent_hint.cli.bench.pooling.command import run_pooling

    is_met = run_pooling(
        json_file,
        Console(),
        agents=agents,
        pairs=pairs,
        hybrid_agents=hybrid_agents,
        load_mb_per_second=load_rate,
        kind=model,
        folder=folder,
    )
    raise typer.Exit(0 if is_met else 1)
