"""Writes a run down: ``demo.json``, ``demo.html``, and the main plot as ``demo.svg``, ``demo.png``.

``demo.json`` has stable keys::

    settings   the load's named settings (``DemoSettings``)
    machine    cores, gpu, python, vllm, plugin: what it ran on
    columns    off, on, ceiling, no_pressure, agents_only, each with
                 agents, one_shot   ``TrafficFigures`` (one_shot is null without such traffic)
                 server             ``ServerFigures``
                 hints_on, pool_blocks, meaning
                 requests           every request: name, turn, sent, ttft, tpot, prompt_tokens,
                                    cached_tokens, completion_tokens
    verdict    one object per finding: value, bound, met, interval, text

Shares are of 1, times are seconds.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from vllm_agent_hint.cli.demo import plots, table
from vllm_agent_hint.cli.demo.measure import ColumnResult
from vllm_agent_hint.cli.demo.settings import DemoSettings
from vllm_agent_hint.cli.demo.verdict import Finding


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    gpu: bool
    python: str
    vllm: str
    plugin: str


@dataclass(frozen=True, slots=True)
class DemoRun:
    settings: DemoSettings
    machine: Machine
    results: Sequence[ColumnResult]
    findings: Sequence[Finding]


def write_report(run: DemoRun, folder: Path) -> list[Path]:
    """Returns what was written, the page last."""
    folder.mkdir(parents=True, exist_ok=True)
    overview = plots.overview(run.results)
    json_file = folder / "demo.json"
    json_file.write_text(json.dumps(as_json(run), indent=2) + "\n")
    svg_file, png_file = folder / "demo.svg", folder / "demo.png"
    svg_file.write_text(_svg(overview))
    overview.savefig(png_file, dpi=150)
    page = folder / "demo.html"
    page.write_text(_page(run, overview))
    return [json_file, svg_file, png_file, page]


def as_json(run: DemoRun) -> dict[str, Any]:
    return {
        "settings": asdict(run.settings),
        "machine": asdict(run.machine),
        "columns": {
            result.column.name.value: _column_as_json(result, run.settings)
            for result in run.results
        },
        "verdict": {
            finding.key: {name: value for name, value in asdict(finding).items() if name != "key"}
            for finding in run.findings
        },
    }


def _column_as_json(result: ColumnResult, settings: DemoSettings) -> Mapping[str, Any]:
    return {
        "meaning": result.column.meaning,
        "hints_on": result.column.hints_on,
        "pool_blocks": result.column.pool_blocks(settings),
        "agents": asdict(result.agents),
        "one_shot": asdict(result.one_shot) if result.one_shot else None,
        "server": asdict(result.server),
        "requests": [
            {
                "name": record.name,
                "turn": record.turn,
                "sent": round(record.sent, 4),
                "ttft": round(record.ttft, 5),
                "tpot": round(record.tpot, 6),
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "completion_tokens": record.completion_tokens,
            }
            for record in result.records
        ],
    }


def _page(run: DemoRun, overview: Figure) -> str:
    source = files("vllm_agent_hint.cli.demo").joinpath("report.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    figures = [overview, plots.over_time(run.results), plots.waiting_times(run.results)]
    return environment.from_string(source).render(
        run=run,
        settings=asdict(run.settings),
        machine=asdict(run.machine),
        sections=table.sections(run.results),
        plots=[Markup(_svg(figure)) for figure in figures],
    )


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
