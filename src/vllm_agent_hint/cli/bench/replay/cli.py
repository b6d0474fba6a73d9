"""The options of ``bench replay``. Imports no more than they need."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_agent_hint.cli.extra import imports_of_extra


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
            "of a session so late), hints@never, auto, identity, session-min, min. :lru, :deadline "
            "or :reuse behind a hinted one names who gives way first."
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
    with imports_of_extra("bench"):
        from vllm_agent_hint.cli.bench.replay.command import ReplayError, replay_command
        from vllm_agent_hint.traces.model import TraceError

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
