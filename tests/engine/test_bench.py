"""The report of ``bench overhead``."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from vllm_agent_hint.cli.bench.figure import Measured
from vllm_agent_hint.cli.bench.overhead import Row, rows, run_overhead
from vllm_agent_hint.cli.bench.paired import ratio_of
from vllm_agent_hint.cli.bench.sharing import shared_release_slice

README = Path(__file__).parents[2] / "benchmarks" / "README.md"


def test_every_row_is_explained() -> None:
    text = README.read_text()
    for row in rows(1):
        name = "..._live" if row.name.endswith("_live") else row.name
        assert f"`{name}`" in text, row.name


def test_a_report_says_of_each_row_whether_its_bound_is_met(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ratio = ratio_of([(1.0, 1.5), (1.0, 1.4), (1.0, 1.6)], unit_count=1)
    made = [
        Row("kept", 2.0, "", lambda: Measured.of(ratio)),
        Row("missed", 1.0, "ms", lambda: Measured(1.25, parts={"max": 3.0})),
        Row("not asked for", 1.0, "", lambda: Measured(1 / 0)),
    ]
    # The command of the same name hides the module.
    monkeypatch.setattr(sys.modules[run_overhead.__module__], "rows", lambda scale_down: made)
    console = Console(record=True, width=160)
    run_overhead(tmp_path / "o.json", console, only=["kept", "missed"])
    report = json.loads((tmp_path / "o.json").read_text())
    assert (report["kept"], report["missed"]) == (1.5, 1.25)
    assert report["limits"] == {"kept": 2.0, "missed": 1.0}
    assert report["met"] == {"kept": True, "missed": False}
    assert list(report["intervals"]) == ["kept"]
    assert report["parts"] == {"missed": {"max": 3.0}}
    lines = {line.split()[1]: line for line in console.export_text().splitlines() if "│" in line}
    assert " yes " in lines["kept"]
    assert " NO " in lines["missed"]


def test_a_thousand_sessions_share_a_prefix_and_each_step_of_one_is_timed() -> None:
    found = shared_release_slice(rounds=2)
    assert set(found.parts) == {"free", "longer_ttl", "shorter_ttl"}
    assert found.value == max(found.parts.values()) > 0.0
