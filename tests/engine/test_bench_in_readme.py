"""The README shows every row of the bench with the bound that it has to keep."""

import re
from pathlib import Path

import pytest

from vllm_agent_hint.cli.bench.overhead import Row, rows

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.parametrize("row", rows(1), ids=lambda row: row.name)
def test_a_row_is_in_the_readme_with_its_bound(row: Row) -> None:
    bound = f"{row.limit:g} {row.unit}".strip()
    pattern = rf"^\| `{row.name}` \|.*\| {re.escape(bound)} \|$"
    assert re.search(pattern, README.read_text(), re.MULTILINE)
