"""The one table, and the lines below it, for a terminal."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vllm_agent_hint.cli.demo.client import Traffic
from vllm_agent_hint.cli.demo.measure import ColumnResult, ServerFigures, TrafficFigures
from vllm_agent_hint.cli.demo.settings import DemoSettings
from vllm_agent_hint.cli.demo.verdict import Finding

TRAFFIC_TITLE: Final = {Traffic.AGENTS: "agents", Traffic.ONE_SHOT: "one-shot requests"}

TRAFFIC_ROWS: Final[Sequence[tuple[str, Callable[[TrafficFigures], str]]]] = (
    ("requests", lambda figures: f"{figures.requests}"),
    ("cached share of prompt", lambda figures: f"{figures.cached_share:.1%}"),
    ("recomputed prompt tokens", lambda figures: f"{figures.recomputed_tokens:,}"),
    ("TTFT mean, ms", lambda figures: f"{figures.ttft_mean * 1e3:,.0f}"),
    ("TTFT p50, ms", lambda figures: f"{figures.ttft_p50 * 1e3:,.0f}"),
    ("TTFT p95, ms", lambda figures: f"{figures.ttft_p95 * 1e3:,.0f}"),
    ("TPOT mean, ms", lambda figures: f"{figures.tpot_mean * 1e3:.1f}"),
    ("throughput, tokens/s", lambda figures: f"{figures.tokens_per_second:,.0f}"),
)
SERVER_ROWS: Final[Sequence[tuple[str, Callable[[ServerFigures], str]]]] = (
    ("queue time mean, ms", lambda figures: f"{figures.queue_mean * 1e3:.1f}"),
    ("time in prefill, s", lambda figures: f"{figures.prefill_seconds:.1f}"),
    ("preemptions", lambda figures: f"{figures.preemptions}"),
)


def sections(results: Sequence[ColumnResult]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Title of each section, and its rows: a label and one cell per column."""
    found = []
    for traffic in Traffic:
        rows = []
        for label, show in TRAFFIC_ROWS:
            figures = [result.figures(traffic) for result in results]
            rows.append((label, [show(column) if column else "-" for column in figures]))
        found.append((TRAFFIC_TITLE[traffic], rows))
    server_rows = [
        (label, [show(result.server) for result in results]) for label, show in SERVER_ROWS
    ]
    found.append(("server, all traffic", server_rows))
    return found


def result_table(results: Sequence[ColumnResult]) -> Table:
    table = Table(title="The same load on every server", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("", no_wrap=True)
    for result in results:
        table.add_column(result.column.title.replace(" ", "\n"), justify="right", no_wrap=True)
    for title, rows in sections(results):
        table.add_section()
        table.add_row(Text(title, style="bold"))
        for label, cells in rows:
            table.add_row(f"  {label}", *cells)
    return table


def verdict_lines(findings: Sequence[Finding]) -> Group:
    lines = []
    for finding in findings:
        mark = Text("met     ", "green") if finding.met else Text("NOT met ", "bold red")
        lines.append(mark.append(finding.text, "default"))
    return Group(*lines)


def settings_lines(settings: DemoSettings) -> Padding:
    named = "  ".join(f"{name}={value}" for name, value in asdict(settings).items())
    return Padding(Text(f"load: {named}", style="dim"), (0, 0, 1, 0))


def legend(results: Sequence[ColumnResult]) -> Group:
    return Group(
        *(Text(f"{result.column.title}: {result.column.meaning}", "dim") for result in results)
    )
