"""``make test-faults``: plant each fault of ``table.py`` and see which test catches it.

Exits with 0 if every fault was caught, with 1 if one was not, or no longer applies.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.faults.fault import Fault
from tests.faults.scratch import check_is_imported, scratch_copy
from tests.faults.table import FAULTS
from tests.faults.trial import Outcome, Trial, end_all, run_tests, try_fault

CHECKOUT: Final = Path(__file__).resolve().parents[2]
REPORT: Final = CHECKOUT / "out" / "faults.json"
CLEAN_SECONDS: Final = 900

_COLOURS: Final = {
    Outcome.CAUGHT: "green",
    Outcome.SURVIVED: "bold red",
    Outcome.DOES_NOT_APPLY: "bold yellow",
    Outcome.NO_VERDICT: "bold yellow",
}

console = Console()


def main(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Plant this fault only; may be repeated, and a part of a name will do."),
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Show the faults and plant none.")
    ] = False,
    clean: Annotated[
        bool, typer.Option(help="First run the tests without a fault; they have to pass.")
    ] = True,
    jobs: Annotated[int, typer.Option(min=1, help="Faults tried at a time.")] = min(
        2, os.cpu_count() or 1
    ),
) -> None:
    """Plant faults in copies of the checkout, and show which test catches each."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    faults = _chosen(only)
    if list_only:
        console.print(_list(faults))
        return
    if clean:
        _run_clean(faults, jobs)
    trials = _try_all(faults, jobs)
    console.print(_table(trials))
    _report(trials)
    missed = [trial for trial in trials if trial.outcome is not Outcome.CAUGHT]
    console.print(
        f"{len(trials) - len(missed)} of {len(trials)} faults were caught ({REPORT.name} in out/)"
    )
    sys.exit(1 if missed else 0)


def _chosen(only: Sequence[str] | None) -> list[Fault]:
    if not only:
        return list(FAULTS)
    chosen = [fault for fault in FAULTS if any(part in fault.name for part in only)]
    if not chosen:
        sys.exit("there is no such fault; --list shows them")
    return chosen


def _run_clean(faults: Sequence[Fault], jobs: int) -> None:
    """Run every named test without a fault: one that is red anyway would catch everything."""
    tests = sorted({test for fault in faults for test in fault.tests})
    groups = [
        [t for t in tests if t.startswith(f"{room}/")] for room in ("serve", "engine", "unit")
    ]
    with scratch_copy(CHECKOUT) as copy, _workers(jobs) as pool:
        check_is_imported(copy)
        console.print(f"{len(tests)} tests without a fault ...")
        runs = [
            pool.submit(run_tests, copy, group, CLEAN_SECONDS, log=f"clean-{k}.log")
            for k, group in enumerate(groups)
            if group
        ]
        for run in runs:
            verdict = run.result()
            if not verdict.passed:
                said = f"{verdict.failed} {verdict.detail}"
                console.print(f"[bold red]red without a fault:[/] {escape(said)}", soft_wrap=True)
                sys.exit(1)


def _try_all(faults: Sequence[Fault], jobs: int) -> list[Trial]:
    """Try faults, some at a time. Returns their trials in the order of the faults."""
    trials: dict[str, Trial] = {}
    with _workers(jobs) as pool:
        for done in as_completed([pool.submit(try_fault, CHECKOUT, fault) for fault in faults]):
            trial = done.result()
            trials[trial.fault.name] = trial
            colour = _COLOURS[trial.outcome]
            console.print(
                f"[{colour}]{trial.outcome.value}[/] {escape(trial.fault.name)} "
                f"({trial.seconds:.0f} s) {escape(trial.caught_by or trial.detail)}",
                soft_wrap=True,
            )
    return [trials[fault.name] for fault in faults]


@contextmanager
def _workers(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that wait for tests, and that end them where this program is to end."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise


def _rule(fault: Fault) -> str:
    number = f"invariant {fault.invariant}: " if fault.invariant else ""
    return number + fault.breaks


def _list(faults: Sequence[Fault]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for title in ("fault", "in", "breaks"):
        table.add_column(title, overflow="fold")
    for fault in faults:
        table.add_row(escape(fault.name), fault.file, escape(_rule(fault)))
    return table


def _table(trials: Sequence[Trial]) -> Table:
    table = Table(title="Planted faults", box=box.SIMPLE_HEAD, padding=(0, 1))
    for title in ("fault", "breaks", "outcome", "caught by"):
        table.add_column(title, overflow="fold")
    table.add_column("s", justify="right")
    for trial in trials:
        table.add_row(
            escape(trial.fault.name),
            escape(_rule(trial.fault)),
            f"[{_COLOURS[trial.outcome]}]{trial.outcome.value}[/]",
            escape(trial.caught_by),
            f"{trial.seconds:.0f}",
        )
    return table


def _report(trials: Sequence[Trial]) -> None:
    rows = [
        {
            "name": trial.fault.name,
            "breaks": trial.fault.breaks,
            "invariant": trial.fault.invariant,
            "file": trial.fault.file,
            "outcome": trial.outcome.value,
            "caught_by": trial.caught_by,
            "detail": trial.detail,
            "seconds": round(trial.seconds, 1),
        }
        for trial in trials
    ]
    missed = sum(trial.outcome is not Outcome.CAUGHT for trial in trials)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps({"faults": rows, "missed": missed}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
