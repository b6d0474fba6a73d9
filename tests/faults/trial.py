"""Running tests in a copy of the checkout, and what they say of the fault in it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from tests.faults.fault import TESTS, DoesNotApplyError, Fault
from tests.faults.scratch import environment_of, scratch_copy

TRIAL_SECONDS: Final = 240
"""For all tests of one fault."""

TEST_SECONDS: Final = 180
"""For one test: a fault may make it wait for ever."""

_ALL_PASSED: Final = 0
_SOME_FAILED: Final = 1


_running: Final[set["subprocess.Popen[bytes]"]] = set()


class Outcome(StrEnum):
    """What became of a fault."""

    CAUGHT = "caught"
    SURVIVED = "survived"
    DOES_NOT_APPLY = "does not apply"
    NO_VERDICT = "no verdict"
    """The tests could not run: that says nothing of what they would see."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A fault, and who noticed.

    Args:
        fault: Which.
        outcome: What became of it.
        caught_by: The first test that failed, as pytest names it; empty if none did.
        seconds: How long that took.
        detail: How it failed, or why there is no verdict; a line or the end of pytest's output.
    """

    fault: Fault
    outcome: Outcome
    caught_by: str = ""
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run of pytest ended.

    Args:
        code: Its exit code; None if it ran out of time.
        failed: The first test that failed, if any.
        detail: How it failed, or the end of the output where no test did.
    """

    code: int | None
    failed: str = ""
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.code == _ALL_PASSED


def try_fault(checkout: Path, fault: Fault) -> Trial:
    """Plant a fault in a copy of its own, and run the tests that ought to see it."""
    started = time.monotonic()
    with scratch_copy(checkout) as copy:
        try:
            fault.plant(copy)
        except DoesNotApplyError as error:
            return Trial(fault, Outcome.DOES_NOT_APPLY, detail=str(error))
        verdict = run_tests(copy, fault.tests)
    outcome = Outcome.NO_VERDICT
    if verdict.passed:
        outcome = Outcome.SURVIVED
        verdict = Verdict(verdict.code)
    elif verdict.code == _SOME_FAILED and verdict.failed:
        outcome = Outcome.CAUGHT
    seconds = time.monotonic() - started
    return Trial(fault, outcome, verdict.failed, seconds, verdict.detail)


def run_tests(
    copy: Path, tests: Sequence[str], limit_s: float = TRIAL_SECONDS, *, log: str = "pytest.log"
) -> Verdict:
    """Run tests in a copy of the checkout up to the first failure.

    Args:
        copy: As ``scratch_copy`` makes it.
        tests: Their names below ``tests/``.
        limit_s: Seconds for all of them.
        log: Where in the copy pytest's output goes.
    """
    order = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "--tb=short"]
    order += ["-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
    order += [str(TESTS / test) for test in tests]
    with (copy / log).open("w+", errors="replace") as written:
        process = subprocess.Popen(
            order,
            cwd=copy,
            env={**environment_of(copy), "COLUMNS": "1000"},
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
            _running.discard(process)
        written.seek(0)
        output = written.read()
    found = re.search(r"^FAILED (.+?)(?: - (.*))?$", output, re.MULTILINE)
    if found is not None:
        return Verdict(code, found[1].removeprefix(f"{TESTS}/"), found[2] or "")
    reason = f"not done after {limit_s:.0f} s\n" if code is None else ""
    return Verdict(code, detail=reason + output[-2_000:])


def end_all() -> None:
    """End the tests that run now, as when the user has had enough. Their servers go with them."""
    for process in list(_running):
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
