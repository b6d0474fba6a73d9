"""From the command line's words to a run."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from vllm_agent_hint.cli.bench.serve.arms import STOCK, Arm, ArmError, parse_arm
from vllm_agent_hint.cli.bench.serve.loads.mixed import mixed_script
from vllm_agent_hint.cli.bench.serve.loads.rfc import rfc_script
from vllm_agent_hint.cli.bench.serve.report import ServeRun
from vllm_agent_hint.cli.bench.serve.run import (
    Stand,
    WriteScript,
    command_line,
    local_stages,
    run_load,
    show,
    write,
)
from vllm_agent_hint.cli.bench.serve.scale import Scale
from vllm_agent_hint.cli.demo.model import ensure_model
from vllm_agent_hint.cli.demo.run import describe_machine, end_in_order
from vllm_agent_hint.cli.demo.server import server_environment
from vllm_agent_hint.cli.demo.settings import DemoSettings

LOADS: Final[Mapping[str, WriteScript]] = {"mixed": mixed_script, "rfc": rfc_script}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for on the command line.

    Args:
        loads: Names; several run one after the other.
        arms: As ``parse_arm`` reads them; the first is what the others are compared with.
        json_file: The report.
        folder: For models and logs.
    """

    loads: Sequence[str]
    arms: Sequence[str]
    repetitions: int
    seed: int
    json_file: Path
    folder: Path


def run_serve(wishes: Wishes, console: Console) -> ServeRun:
    """
    Raises:
        ArmError: An arm or a load does not exist.
        ServerError: A server did not start.
        LoadError: A request failed.
    """
    signal.signal(signal.SIGTERM, end_in_order)
    arms = _reference_first([parse_arm(text) for text in wishes.arms])
    unknown = [load for load in wishes.loads if load not in LOADS]
    if unknown:
        raise ArmError(f"--load {unknown[0]}: there are {', '.join(LOADS)}")
    machine = describe_machine()
    settings = DemoSettings.for_gpu() if machine.gpu else DemoSettings.for_cpu()
    scale = Scale.for_gpu() if machine.gpu else Scale.for_cpu()
    with console.status(f"making the model {settings.model} (random weights)"):
        model = ensure_model(settings.model, wishes.folder / "models")
    stand = Stand(
        model,
        wishes.folder / "serve",
        server_environment(wishes.folder / "vllm-cache", machine.gpu),
        settings.dtype,
        settings.block_size,
        is_async=machine.gpu,
    )
    results = []
    for load in wishes.loads:
        result = run_load(
            load,
            lambda repetition, load=load: LOADS[load](scale, f"{wishes.seed}/{repetition}"),  # type: ignore[misc]
            arms,
            local_stages(stand),
            wishes.repetitions,
            console,
        )
        show(result, console)
        results.append(result)
    run = ServeRun(asdict(machine), command_line(), wishes.seed, wishes.repetitions, results)
    write(run, wishes.json_file, console)
    return run


def _reference_first(arms: Sequence[Arm]) -> list[Arm]:
    names = [arm.name for arm in arms]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ArmError(f"--arm: {', '.join(sorted(twice))} is there twice")
    return sorted(arms, key=lambda arm: arm.name != STOCK)
