"""Every fault of ``make test-faults`` still applies, and names tests that exist."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.fault import TESTS, DoesNotApplyError, Fault
from tests.faults.table import FAULTS

CHECKOUT = Path(__file__).resolve().parents[2]
EACH = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


@EACH
def test_a_fault_applies_to_the_source_once_and_leaves_it_python(fault: Fault) -> None:
    ast.parse(fault.planted(CHECKOUT))


@EACH
def test_the_tests_that_ought_to_see_a_fault_exist(fault: Fault) -> None:
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        text = (CHECKOUT / TESTS / file).read_text()
        function = name.partition("[")[0]
        assert re.search(rf"^(def )?{function}\b", text, re.MULTILINE), test


def test_no_fault_uses_a_name_that_is_not_there(tmp_path: Path) -> None:
    """Any test would see a ``NameError``, and prove nothing."""
    for k, fault in enumerate(FAULTS):
        (tmp_path / f"fault_{k}.py").write_text(fault.planted(CHECKOUT))
    order = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", tmp_path]
    said = subprocess.run(order, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout


def test_each_invariant_has_a_fault_and_each_fault_a_name_of_its_own() -> None:
    assert {fault.invariant for fault in FAULTS} == {None, *range(1, 10)}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("old", ["there is no such text", "import"], ids=["never", "often"])
def test_a_fault_whose_old_text_is_not_there_once_is_refused(old: str) -> None:
    fault = Fault("f", "rule", "hints.py", old, "x", ("unit/test_faults.py",))
    with pytest.raises(DoesNotApplyError, match=r"hints\.py holds the old text \d+ times"):
        fault.planted(CHECKOUT)
