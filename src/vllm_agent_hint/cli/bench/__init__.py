"""``vllm-agent-hint bench``: what the plugin costs and what it brings, stock vLLM beside it.

One command per file; each registers itself on ``app`` with one line here.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure what the plugin costs and what it brings, stock vLLM beside it."""


@app.command()
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


@app.command()
def replay(
    trace: Annotated[
        list[Path],
        typer.Option(help="Trace file; a second one is traffic of its own class. docs/traces.md"),
    ],
    cache_tokens: Annotated[
        str, typer.Option(help="Sizes of the cache in tokens, separated by commas.")
    ] = "1000000",
    policy: Annotated[
        str,
        typer.Option(
            help="Policies, separated by commas: stock, slru, hints, hints@SECONDS (told the end "
            "of a session so late), hints@never, auto, session-min, min."
        ),
    ] = "stock,hints,auto,min",
    users: Annotated[
        int, typer.Option(min=1, help="Who play the sessions of traces without a common clock.")
    ] = 32,
    share: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Part of the second trace's sessions to take."),
    ] = 1.0,
    seed: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "1",
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a block. Default: that of the first trace."),
    ] = None,
    stagger: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Seconds within which users start. Default: 600, or 0 beside traffic with a "
            "clock of its own.",
        ),
    ] = None,
    closed_loop: Annotated[
        bool, typer.Option("--closed-loop", help="Let a miss take time and delay the next turn.")
    ] = False,
    prefill_rate: Annotated[
        float, typer.Option(min=1.0, help="Closed loop: prompt tokens computed per second.")
    ] = 8000.0,
    decode_rate: Annotated[
        float, typer.Option(min=0.1, help="Closed loop: tokens per second and request.")
    ] = 50.0,
    hours: Annotated[
        float, typer.Option(min=0.001, help="Closed loop: how long the fleet is watched.")
    ] = 4.0,
    transfer_rate: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Closed loop: tokens per second that come back from an unbounded host tier. "
            "Default: there is none.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot to this file (.svg or .png).")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at once. Default: one per core.")
    ] = None,
) -> None:
    """What a cache would have served of recorded traffic, per policy and size. No model runs.

    Exits with 1 if stock vLLM and an independent LRU differ.
    """
    try:
        from vllm_agent_hint.cli.bench.replay.command import ReplayError, replay_command
        from vllm_agent_hint.traces.model import TraceError
    except ModuleNotFoundError as missing:
        sys.exit(f"{missing.name} is missing. Cure: pip install 'vllm-agent-hint[bench]'")

    try:
        replay_command(
            traces=trace,
            cache_tokens=cache_tokens,
            policies=policy,
            users=users,
            share=share,
            seeds=seed,
            block_size=block_size,
            stagger=stagger,
            time_rates=(prefill_rate, decode_rate, hours, transfer_rate) if closed_loop else None,
            json_file=json_file,
            plot=plot,
            jobs=jobs,
            console=Console(),
        )
    except (TraceError, ReplayError) as error:
        sys.exit(str(error))


@app.command()
def pooling(
    agents: Annotated[int, typer.Option(min=1, help="Agents whose second turn is timed.")] = 10,
    windows: Annotated[
        int, typer.Option(min=1, help="Pairs of windows, with prefetches and without.")
    ] = 12,
    load_rate: Annotated[
        float, typer.Option(min=0.01, help="Throttle of the tier: megabytes loaded per second.")
    ] = 24.0,
    model: Annotated[str, typer.Option(help="Kind of model; see the demo's.")] = "qwen3",
    folder: Annotated[Path, typer.Option(help="Where models, logs and vLLM's cache go.")] = Path(
        "out/bench-pooling"
    ),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Resume after offload, flood and prefetch, beside recomputing and stock offloading.

    Three servers run side by side. Exits with 1 if a bound is missed.
    """
    try:
        from vllm_agent_hint.cli.bench.pooling.command import run_pooling
    except ModuleNotFoundError as missing:
        sys.exit(f"{missing.name} is missing. Cure: pip install 'vllm-agent-hint[bench]'")

    is_met = run_pooling(
        json_file,
        Console(),
        agents=agents,
        windows=windows,
        load_mb_per_second=load_rate,
        kind=model,
        folder=folder,
    )
    raise typer.Exit(0 if is_met else 1)
