"""From the command line's words to a run."""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from vllm_agent_hint.cli.bench.serve.arms import (
    DEFAULT_ARMS,
    SPOKEN_ARMS,
    STOCK,
    UNHINTED,
    Arm,
    WishError,
    parse_arm,
)
from vllm_agent_hint.cli.bench.serve.export import export
from vllm_agent_hint.cli.bench.serve.loads.mixed import mixed_script
from vllm_agent_hint.cli.bench.serve.loads.rfc import rfc_script
from vllm_agent_hint.cli.bench.serve.loads.traced import TracedLoads, TraceTooSmallError
from vllm_agent_hint.cli.bench.serve.local import Stand, local_stages
from vllm_agent_hint.cli.bench.serve.report import ServeRun
from vllm_agent_hint.cli.bench.serve.run import (
    WriteScript,
    command_line,
    run_load,
    show,
    write,
)
from vllm_agent_hint.cli.bench.serve.scale import Scale
from vllm_agent_hint.cli.bench.serve.script import Script
from vllm_agent_hint.cli.bench.serve.stage import OpenStage
from vllm_agent_hint.cli.bench.serve.standing import StandingServers, Urls
from vllm_agent_hint.cli.demo.model import ensure_model
from vllm_agent_hint.cli.demo.run import describe_machine, end_in_order
from vllm_agent_hint.cli.demo.server import server_environment
from vllm_agent_hint.cli.demo.settings import DemoSettings
from vllm_agent_hint.traces.model import TraceError
from vllm_agent_hint.traces.reading import read_trace

LOADS: Final[Mapping[str, WriteScript]] = {"mixed": mixed_script, "rfc": rfc_script}
TRACED: Final = ("fleet", "long-tail")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for on the command line.

    Args:
        loads: Names; several run one after the other. None: all that can be played.
        trace: Of the fleet.
        arms: As ``parse_arm`` reads them. None: a choice. Compared with stock, else with unhinted,
            else with the first.
        urls: Servers that stand already; None: the bench starts its own.
        json_file: The report.
        folder: For models and logs.
    """

    loads: Sequence[str]
    trace: Path | None
    arms: Sequence[str]
    urls: Urls | None
    repetitions: int
    seed: int
    json_file: Path
    folder: Path


def run_serve(wishes: Wishes, console: Console) -> ServeRun:
    """Plays what was wished for and writes the report.

    Raises:
        WishError: An arm or a load does not exist.
        ServerError: A server did not start.
        LoadError: A request failed.
    """
    signal.signal(signal.SIGTERM, end_in_order)
    arms = _reference_first([parse_arm(text) for text in wishes.arms or default_arms(wishes)])
    loads = _loads(wishes)
    machine = describe_machine()
    if wishes.urls is None:
        servers = _servers_of_our_own(wishes.folder, machine.gpu, console)
    else:
        servers = _standing_servers(wishes.urls, arms, console)
    results = []
    for load, write_script in loads.items():
        result = run_load(
            load,
            scripts(write_script, servers.scale, wishes.seed),
            arms,
            servers.open_stage_for(load),
            wishes.repetitions,
            console,
            servers.notes,
        )
        show(result, console)
        results.append(result)
    run = ServeRun(asdict(machine), command_line(), wishes.seed, wishes.repetitions, results)
    write(run, wishes.json_file, console)
    return run


def export_loads(wishes: Wishes, folder: Path, console: Console) -> None:
    """Plays nothing, and writes the first repetition of each load down.

    Raises:
        WishError: A load does not exist.
        LoadError: A standing server does not answer.
    """
    loads = _loads(wishes)
    if wishes.urls is None:
        scale = Scale.for_gpu() if describe_machine().gpu else Scale.for_cpu()
    else:
        scale = StandingServers(wishes.urls).scale()
    for load, write_script in loads.items():
        script = scripts(write_script, scale, wishes.seed)(0)
        export(script, scale, folder / load)
        console.print(f"{load}: {script.told}", f"written: {folder / load}", sep="\n")


@dataclass(frozen=True, slots=True)
class _Servers:
    """Where loads are played, and in which sizes."""

    scale: Scale
    notes: Sequence[str]
    open_stage_for: Callable[[str], OpenStage]


def _servers_of_our_own(folder: Path, gpu: bool, console: Console) -> _Servers:
    settings = DemoSettings.for_gpu() if gpu else DemoSettings.for_cpu()
    with console.status(f"making the model {settings.model} (random weights)"):
        model = ensure_model(settings.model, folder / "models")
    stand = Stand(
        model,
        folder / "serve",
        server_environment(folder / "vllm-cache", gpu),
        settings.dtype,
        settings.block_size,
        is_async=gpu,
    )
    scale = Scale.for_gpu() if gpu else Scale.for_cpu()
    return _Servers(scale, (), lambda load: local_stages(stand, load))


def _standing_servers(urls: Urls, arms: Sequence[Arm], console: Console) -> _Servers:
    with console.status("looking at the servers"):
        servers = StandingServers(urls)
    servers.check(arms)
    return _Servers(servers.scale(), servers.notes(), lambda _: servers.open_stage)


def default_arms(wishes: Wishes) -> Sequence[str]:
    """On standing servers, those that differ by what is said alone."""
    if wishes.urls is None:
        return DEFAULT_ARMS
    return (STOCK if wishes.urls.stock else UNHINTED, *SPOKEN_ARMS)


def scripts(write_script: WriteScript, scale: Scale, seed: int) -> Callable[[int], Script]:
    """The script of each repetition, whoever it is played to."""
    return lambda repetition: write_script(scale, f"{seed}/{repetition}")


def _loads(wishes: Wishes) -> dict[str, WriteScript]:
    known = dict(LOADS)
    if wishes.trace is not None:
        try:
            traced = TracedLoads(read_trace(wishes.trace))
        except (TraceError, TraceTooSmallError) as error:
            raise WishError(f"--trace: {error}") from None
        known |= {"fleet": traced.fleet, "long-tail": traced.long_tail}
    for load in wishes.loads:
        if load not in known and load in TRACED:
            raise WishError(f"--load {load}: is replayed from a trace; give one with --trace FILE")
        if load not in known:
            raise WishError(f"--load {load}: there are {', '.join((*LOADS, *TRACED))}")
    return {load: known[load] for load in wishes.loads or known}


def _reference_first(arms: Sequence[Arm]) -> list[Arm]:
    names = [arm.name for arm in arms]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise WishError(f"--arm: {', '.join(sorted(twice))} is there twice")
    reference = next((name for name in (STOCK, UNHINTED) if name in names), names[0])
    return sorted(arms, key=lambda arm: arm.name != reference)
