"""``vllm-agent-hint bench``: what the plugin costs and what it brings, stock vLLM beside it."""

import typer

from vllm_agent_hint.cli.bench.overhead_cli import overhead
from vllm_agent_hint.cli.bench.pooling.cli import pooling
from vllm_agent_hint.cli.bench.replay.cli import replay
from vllm_agent_hint.cli.bench.serve.cli import serve

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure what the plugin costs and what it brings, stock vLLM beside it."""


for command in (overhead, pooling, replay, serve):
    app.command()(command)
