"""``vllm-agent-hint check``: what the plugin would do with the vLLM of this environment."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from vllm_agent_hint.seams import Report


def show_report(report: "Report", console: Console) -> None:
    table = Table(title=f"vLLM {report.vllm_version or 'not installed'}")
    table.add_column("seam", overflow="fold")
    table.add_column("fits")
    table.add_column("found")
    for finding in report.findings:
        fits = "[green]yes[/]" if finding.ok else "[bold red]no[/]"
        table.add_row(finding.seam, fits, finding.detail)
    console.print(table)
    for flag, value in report.flags.items():
        console.print(f"{flag}={value}", highlight=False)
    state = "[green]active[/]" if report.active else "[bold red]not active[/]"
    because = f": {report.reason}" if report.reason else ""
    console.print(f"vllm-agent-hint would be {state}{because}", highlight=False)


def report_as_json(report: "Report") -> str:
    return json.dumps(asdict(report), indent=2)
