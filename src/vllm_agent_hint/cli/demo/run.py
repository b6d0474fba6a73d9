"""Runs the columns one after the other, each on a server of its own."""

import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import Progress, TaskID

from vllm_agent_hint.cli.demo.columns import Column
from vllm_agent_hint.cli.demo.load import Load, warm_up
from vllm_agent_hint.cli.demo.measure import ColumnResult, ServerFigures
from vllm_agent_hint.cli.demo.model import ensure_model
from vllm_agent_hint.cli.demo.report import DemoRun, Machine, write_report
from vllm_agent_hint.cli.demo.server import running_server, server_environment
from vllm_agent_hint.cli.demo.settings import DemoSettings
from vllm_agent_hint.cli.demo.table import legend, result_table, settings_lines, verdict_lines
from vllm_agent_hint.cli.demo.verdict import judge
from vllm_agent_hint.cli.progress import request_progress


@dataclass(frozen=True, slots=True)
class Bar:
    """One column's line of the progress display."""

    progress: Progress
    task: TaskID
    step: str

    def show(self, doing: str, total: int) -> None:
        self.progress.update(self.task, description=f"{self.step}: {doing}", total=total)

    def advance(self) -> None:
        self.progress.advance(self.task)


def run_demo(folder: Path, columns: Sequence[Column], console: Console) -> DemoRun:
    """
    Args:
        folder: Where models, logs and the report go.
        columns: In the order in which they run.

    Raises:
        ServerError: A server did not start.
        LoadError: A request failed.
    """
    signal.signal(signal.SIGTERM, end_in_order)
    machine = describe_machine()
    settings = DemoSettings.for_gpu() if machine.gpu else DemoSettings.for_cpu()
    console.print(settings_lines(settings))
    with console.status(f"making the model {settings.model} (random weights)"):
        model = ensure_model(settings.model, folder / "models")
    environment = server_environment(folder / "vllm-cache", machine.gpu)
    results: list[ColumnResult] = []
    with request_progress(console, refresh_per_second=4) as progress:
        for number, column in enumerate(columns, start=1):
            step = f"{number}/{len(columns)} {column.title}"
            with _bar(progress, step) as bar:
                result = run_column(column, settings, model, folder, environment, bar)
            results.append(result)
            console.print(
                f"{step}: agents' cached share {result.agents.cached_share:.1%}, "
                f"mean TTFT {result.agents.ttft_mean * 1e3:,.0f} ms",
                highlight=False,
            )
    findings = judge({result.column.name: result for result in results})
    run = DemoRun(settings, machine, results, findings)
    written = write_report(run, folder)
    console.print("", result_table(results), legend(results), "", verdict_lines(findings), "")
    console.print("written: " + "  ".join(str(path) for path in written), soft_wrap=True)
    return run


def run_column(
    column: Column,
    settings: DemoSettings,
    model: Path,
    folder: Path,
    environment: dict[str, str],
    bar: Bar,
) -> ColumnResult:
    log = folder / "logs" / f"{column.name}.log"
    arguments = [
        *("--dtype", settings.dtype),
        *("--max-model-len", str(settings.max_model_len)),
        *("--block-size", str(settings.block_size)),
        *("--num-gpu-blocks-override", str(column.pool_blocks(settings))),
    ]
    requests = settings.agents * settings.turns
    requests += settings.one_shots if column.with_one_shots else 0
    bar.show("vllm serve starts", total=requests)
    with running_server(model, log, environment | column.environment(), arguments) as server:
        warm_up(settings, server.base_url)
        bar.show("requests", total=requests)
        before = server.metrics()
        records = Load(settings, server.base_url, bar.advance).run(column.with_one_shots)
        figures = ServerFigures.between(before, server.metrics(), server.start_seconds)
    return ColumnResult.of(column, records, figures)


def describe_machine() -> Machine:
    vllm = importlib.metadata.version("vllm")
    return Machine(
        cores=os.cpu_count() or 1,
        gpu="cpu" not in vllm and _torch_sees_a_gpu(),
        python=platform.python_version(),
        vllm=vllm,
        plugin=importlib.metadata.version("vllm-agent-hint"),
    )


def _torch_sees_a_gpu() -> bool:
    """Asked in a process of its own: torch costs seconds and memory that the load needs."""
    program = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    return asked.returncode == 0


@contextmanager
def _bar(progress: Progress, step: str) -> Iterator[Bar]:
    task = progress.add_task(step, total=None)
    try:
        yield Bar(progress, task, step)
    finally:
        progress.remove_task(task)


def end_in_order(signum: int, _frame: FrameType | None) -> None:
    """SIGTERM unwinds like Ctrl-C, so that no server is left behind."""
    sys.exit(128 + signum)
