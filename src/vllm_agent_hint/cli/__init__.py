"""The command ``vllm-agent-hint``. Nothing here imports vLLM until a command needs it."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_agent_hint.cli import bench
from vllm_agent_hint.cli.extra import imports_of_extra

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Agent sessions for vLLM: check the environment, see what hints do, measure their cost.",
)
app.add_typer(bench.app, name="bench")


@app.command()
def check(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what the plugin would replace in this environment's vLLM, and whether it fits.

    Exits with 1 if nothing would be active.
    """
    from vllm_agent_hint.cli.check import report_as_json, show_report
    from vllm_agent_hint.seams import probe_environment

    report = probe_environment()
    if as_json:
        print(report_as_json(report))
    else:
        show_report(report, Console())
    raise typer.Exit(0 if report.active else 1)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the report, the model and the servers' logs.")
    ] = Path("out"),
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run this column only; may be repeated. Default: all five."),
    ] = None,
) -> None:
    """Run one seeded load on vLLM with hints off and with hints on, and compare.

    Exits with 0 if it ran; the verdict is printed, and stands in OUT/demo.json.
    """
    with imports_of_extra("bench"):
        from vllm_agent_hint.cli.demo.client import LoadError
        from vllm_agent_hint.cli.demo.columns import COLUMNS
        from vllm_agent_hint.cli.demo.run import run_demo
        from vllm_agent_hint.cli.demo.server import ServerError

    chosen = [column for column in COLUMNS if not only or column.name in only]
    if not chosen:
        names = ", ".join(column.name for column in COLUMNS)
        raise typer.BadParameter(f"no such column; there are {names}", param_hint="--only")
    try:
        run_demo(out, chosen, Console())
    except (ServerError, LoadError) as error:
        sys.exit(f"the demo could not run: {error}")


@app.command()
def demo_server(
    out: Annotated[Path, typer.Option(help="Folder for the model and vLLM's cache.")] = Path("out"),
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 8000,
) -> None:
    """Leave the demo's server standing, hints on, for the examples and for curl."""
    from vllm_agent_hint.cli.demo.standing import become_demo_server

    become_demo_server(out, port)


@app.command()
def capture(
    out: Annotated[Path, typer.Option(help="The trace; compressed if it ends with .gz.")],
    url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8000",
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="For how long. Default: until Ctrl-C.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="VLLM_API_KEY", show_envvar=True, help="Where the server has one."),
    ] = None,
) -> None:
    """Record a running server's traffic for `bench replay`: hashes and times, never text.

    The server has to run with VLLM_AGENT_HINT_CAPTURE=1. Requests need no hint to be recorded.
    """
    from vllm_agent_hint.cli.capture.reader import CaptureError
    from vllm_agent_hint.cli.capture.run import record, summary

    try:
        totals = record(url, out, seconds, api_key)
    except (CaptureError, OSError) as error:
        sys.exit(f"the capture ended: {error}")
    print(f"{out}: {summary(totals)}")


@app.command()
def flags() -> None:
    """Print every environment variable as a Markdown table."""
    from vllm_agent_hint.cli.flags import flags_table

    print(flags_table())
