"""The command: runs over all seeds, cache sizes and policies, several at once."""

import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from vllm_agent_hint.cli.bench.replay.arms import arm_named
from vllm_agent_hint.cli.bench.replay.report import gap_closed
from vllm_agent_hint.cli.bench.replay.task import Task, run_task
from vllm_agent_hint.seams import installed_vllm_version

BOUNDS: Final = ("session-min", "min")
PLAIN_POLICIES: Final = ("stock", "slru")
POLL_SECONDS: Final = 0.2


def is_policy(name: str) -> bool:
    """Whether there is such a policy."""
    return name in BOUNDS or name in PLAIN_POLICIES or arm_named(name) is not None


def run_replay(
    tasks: Sequence[Task],
    num_requests: Sequence[int],
    console: Console,
    *,
    jobs: int | None = None,
) -> list[dict[str, Any]]:
    """Make all runs, each single-threaded, as many at once as there are cores.

    Args:
        tasks: What to run.
        num_requests: Of each, for the progress bar.
        console: Where the bar is drawn.
        jobs: Processes at once; None for one per core.

    Returns:
        One entry each, in the order of the tasks.
    """
    jobs = min(len(tasks), jobs or len(os.sched_getaffinity(0)))
    with Progress(console=console, transient=True) as bar:
        shown = bar.add_task("replaying", total=sum(num_requests))
        if jobs <= 1:
            runs = [run_task(task, lambda n: bar.advance(shown, n)) for task in tasks]
        else:
            # vLLM has threads by then: a fork would inherit their locks.
            context = multiprocessing.get_context("spawn")
            done = context.Value("q", 0)
            with ProcessPoolExecutor(
                jobs, mp_context=context, initializer=_start_worker, initargs=(done,)
            ) as pool:
                futures = [pool.submit(_run_in_worker, task) for task in tasks]
                pending = set(futures)
                while pending:
                    _, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
                    bar.update(shown, completed=done.value)
                runs = [future.result() for future in futures]
    for run in runs:
        run["gap_closed"] = gap_closed(run, runs)
    return runs


_done: Any = None


def _start_worker(done: Any) -> None:
    global _done
    _done = done
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _run_in_worker(task: Task) -> dict[str, Any]:
    return run_task(task, _count)


def _count(requests: int) -> None:
    with _done.get_lock():
        _done.value += requests


def write_report(file: Path, runs: Sequence[dict[str, Any]], command: str) -> None:
    """Write the JSON file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    report = {"command": command, "vllm": installed_vllm_version(), "runs": list(runs)}
    file.write_text(json.dumps(report, indent=2) + "\n")


def check_runs(runs: Sequence[dict[str, Any]]) -> str | None:
    """What is wrong with the runs, in words; None if nothing is."""
    for run in runs:
        if not run.get("lru_equal", True):
            return (
                f"stock vLLM and an independent LRU differ (seed {run['seed']}, "
                f"{run['cache_tokens']} tokens): no figure of this report means anything. "
                "Please report it with the trace"
            )
    return None
