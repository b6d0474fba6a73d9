"""The options of ``bench serve``. Imports no more than they need."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_agent_hint.cli.extra import imports_of_extra


def serve(
    load: Annotated[
        list[str] | None,
        typer.Option(
            help="mixed, rfc, fleet or long-tail; may be repeated. Default: all that can be played."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="The recorded traffic of fleet and long-tail (docs/traces.md)."),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="Play this arm; may be repeated. NAME=ARM,FLAG=VALUE makes one with other flags. "
            "Default: stock, hints, hints-evict, ceiling."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="A server that stands already, with the plugin; its prefix cache is emptied."
        ),
    ] = None,
    url_stock: Annotated[
        str | None,
        typer.Option(help="One without the plugin; else what says nothing is the reference."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="As the standing servers call it. Default: their first.")
    ] = None,
    cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Their KV cache, if they don't tell or it's shared.")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Pairs per figure.")] = 5,
    seed: Annotated[int, typer.Option(help="Of every prompt, gap and arrival.")] = 52113,
    json_file: Annotated[
        Path, typer.Option("--json", help="The report; a plot per load is written beside it.")
    ] = Path("out/serve.json"),
    out: Annotated[Path, typer.Option(help="Folder for the model and the servers' logs.")] = Path(
        "out"
    ),
    export: Annotated[
        Path | None,
        typer.Option(
            help="Play nothing; write the loads to this folder as traces for other load generators "
            "(docs/load-generators.md)."
        ),
    ] = None,
) -> None:
    """What hints win and lose on real servers: each arm its own, the same loads, in pairs."""
    with imports_of_extra("bench"):
        from vllm_agent_hint.cli.bench.serve.arms import WishError
        from vllm_agent_hint.cli.bench.serve.command import Wishes, export_loads, run_serve
        from vllm_agent_hint.cli.bench.serve.standing import Urls
        from vllm_agent_hint.cli.demo.client import LoadError
        from vllm_agent_hint.cli.demo.server import ServerError

    if url is None and (url_stock or model or cache_tokens):
        raise typer.BadParameter("goes with --url, the server with the plugin", param_hint="--url")
    urls = None if url is None else Urls(url, url_stock, model, cache_tokens)
    wishes = Wishes(load or (), trace, arm or (), urls, repetitions, seed, json_file, out)
    try:
        if export is None:
            run_serve(wishes, _wide_console())
        else:
            export_loads(wishes, export, _wide_console())
    except WishError as error:
        raise typer.BadParameter(str(error)) from error
    except (ServerError, LoadError) as error:
        sys.exit(f"the bench could not run: {error}")


def _wide_console() -> Console:
    """A file has room for every column; a terminal has what it has."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
