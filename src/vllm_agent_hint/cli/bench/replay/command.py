"""From the command line's words to runs, and from runs to the table, the file and the plot."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vllm_agent_hint.cli.bench.replay.closed_loop import TimeModel
from vllm_agent_hint.cli.bench.replay.report import table_of
from vllm_agent_hint.cli.bench.replay.run import (
    BOUNDS,
    check_runs,
    is_policy,
    run_replay,
    write_report,
)
from vllm_agent_hint.cli.bench.replay.task import Task, WorkloadSpec


class ReplayError(ValueError):
    """What was asked for can't be run, or can't be believed; says why, and the cure."""


def replay_command(
    *,
    traces: Sequence[Path],
    cache_tokens: str,
    policies: str,
    users: int,
    share: float,
    seeds: str,
    block_size: int | None,
    stagger: float | None,
    time_rates: tuple[float, float, float, float | None] | None,
    json_file: Path | None,
    plot: Path | None,
    jobs: int | None,
    console: Console,
) -> None:
    """Make the runs and show them.

    Args:
        traces: Files.
        cache_tokens: Sizes, separated by commas.
        policies: Names, separated by commas.
        users: See ``compose``.
        share: See ``compose``.
        seeds: Separated by commas.
        block_size: See ``compose``.
        stagger: See ``compose``.
        time_rates: Prefill rate, decode rate, hours and transfer rate of the closed loop; None for
            the open one.
        json_file: Where to write the figures; None for nowhere.
        plot: Where to write the plot; None for nowhere.
        jobs: Processes at once; None for one per core.
        console: Where to print.

    Raises:
        ReplayError: See the class.
        TraceError: A trace can't be read.
    """
    names = [name.strip() for name in policies.split(",") if name.strip()]
    sizes = _whole_numbers(cache_tokens, "--cache-tokens")
    model = None if time_rates is None else TimeModel(*time_rates)
    _check_policies(names, is_closed=model is not None)
    tasks: list[Task] = []
    num_requests: list[int] = []
    for seed in _whole_numbers(seeds, "--seed"):
        spec = WorkloadSpec(tuple(traces), users, seed, share, block_size, stagger)
        # Read here as well, so that a trace with a fault is an error and not a dead worker.
        arrivals = len(spec.compose().arrivals)
        for size in sizes:
            tasks += [Task(spec, size, name, model) for name in names]
            num_requests += [arrivals] * len(names)
    runs = run_replay(tasks, num_requests, console, jobs=jobs)
    console.print(table_of(runs))
    if json_file is not None:
        write_report(json_file, runs, " ".join(["vllm-agent-hint", *sys.argv[1:]]))
    if plot is not None:
        from vllm_agent_hint.cli.bench.replay.plots import overview

        plot.parent.mkdir(parents=True, exist_ok=True)
        overview(runs).savefig(plot)
    if (problem := check_runs(runs)) is not None:
        raise ReplayError(problem)


def _check_policies(names: Sequence[str], *, is_closed: bool) -> None:
    for name in names:
        if not is_policy(name):
            raise ReplayError(
                f"--policy: there is no {name!r}; there are stock, slru, hints, hints@SECONDS, "
                "hints@never, auto, identity, session-min and min"
            )
        if is_closed and name in BOUNDS:
            raise ReplayError(
                f"--policy: {name} needs the order of all requests beforehand, which the closed "
                "loop does not have; leave it out, or --closed-loop"
            )
    if not names:
        raise ReplayError("--policy: names none; try stock,hints,auto,min")


def _whole_numbers(text: str, option: str) -> list[int]:
    """Whole numbers, separated by commas; ``1_000_000`` is one."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ReplayError(f"{option}: must be whole numbers, separated by commas") from None
    if min(numbers) < 1:
        raise ReplayError(f"{option}: must be 1 or more")
    return numbers
