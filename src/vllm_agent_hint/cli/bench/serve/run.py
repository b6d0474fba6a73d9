"""Starts the arms' servers, plays the repetitions in turn, and writes the report."""

import asyncio
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import httpx
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from vllm_agent_hint.cli.bench.serve.arms import Arm
from vllm_agent_hint.cli.bench.serve.clock_file import ENV_FILE, Reading, lay_out
from vllm_agent_hint.cli.bench.serve.figures import sheet_of
from vllm_agent_hint.cli.bench.serve.play import Player, Target
from vllm_agent_hint.cli.bench.serve.report import ServeRun, write_report
from vllm_agent_hint.cli.bench.serve.result import ArmResult, LoadResult, Play
from vllm_agent_hint.cli.bench.serve.scale import Scale
from vllm_agent_hint.cli.bench.serve.script import Piece, Script, Vocabulary
from vllm_agent_hint.cli.bench.serve.table import load_table, words_below
from vllm_agent_hint.cli.bench.serve.verdict import judge
from vllm_agent_hint.cli.demo.client import LoadError, Question, Traffic, ask, client_of
from vllm_agent_hint.cli.demo.measure import ServerFigures, TrafficFigures
from vllm_agent_hint.cli.demo.metrics import Metrics
from vllm_agent_hint.cli.demo.server import MODEL_NAME, running_server

WriteScript = Callable[[Scale, str], Script]

DEMO_VOCABULARY: Final = Vocabulary(3, 258)
ROOM_FOR_EVERYTHING: Final = 1.3
"""Whole blocks per request, and what runs."""
CLOCKED: Final = "vllm_agent_hint.cli.bench.serve.clock"


@dataclass(frozen=True, slots=True)
class Stand:
    """What every server that we start has in common.

    Args:
        folder: For logs.
        environment: Without what arms differ by.
        dtype: In float32 a greedy answer does not depend on how its prompt was batched, so every
            arm is asked the same prompts.
        is_async: Whether vLLM's async scheduler is the default here.
    """

    model: Path
    folder: Path
    environment: Mapping[str, str]
    dtype: str
    block_size: int
    is_async: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """A server that an arm is played to.

    Args:
        cache_tokens: Its KV cache; 0 if it doesn't tell.
        clock: Where its scheduler's clock shows; None if it has none.
    """

    arm: Arm
    target: Target
    cache_tokens: int
    clock: Path | None

    def metrics(self) -> Metrics:
        response = httpx.get(f"{self.target.base_url}/metrics", timeout=60, trust_env=False)
        return Metrics.parse(response.raise_for_status().text)


OpenStage = Callable[[Arm, Script], AbstractContextManager[Stage]]


def local_stages(stand: Stand) -> OpenStage:
    """Each arm on a ``vllm serve`` of its own, in the cache that the script was written for."""

    @contextmanager
    def open_stage(arm: Arm, script: Script) -> Iterator[Stage]:
        tokens = script.cache_tokens
        if arm.holds_everything:
            tokens = max(tokens, round(script.total_tokens * ROOM_FOR_EVERYTHING))
        blocks = max(tokens, script.longest_request + stand.block_size) // stand.block_size + 1
        clock = stand.folder / "clocks" / f"{script.load}-{arm.name}"
        lay_out(clock)
        scheduler = "ClockedAsyncScheduler" if stand.is_async else "ClockedScheduler"
        arguments = [
            *("--dtype", stand.dtype, "--block-size", str(stand.block_size)),
            *("--max-model-len", str(script.longest_request + stand.block_size)),
            *("--num-gpu-blocks-override", str(blocks)),
            *("--scheduler-cls", f"{CLOCKED}.{scheduler}"),
        ]
        # Dev mode opens /reset_prefix_cache, on loopback.
        environment = {
            **stand.environment,
            **arm.environment,
            ENV_FILE: str(clock.resolve()),
            "VLLM_SERVER_DEV_MODE": "1",
        }
        log = stand.folder / "logs" / f"{script.load}-{arm.name}.log"
        with running_server(stand.model, log, environment, arguments) as server:
            target = Target(server.base_url, MODEL_NAME, DEMO_VOCABULARY)
            yield Stage(arm, target, blocks * stand.block_size, clock)

    return open_stage


def run_load(
    load: str,
    script_of: Callable[[int], Script],
    arms: Sequence[Arm],
    open_stage: OpenStage,
    repetitions: int,
    console: Console,
    notes: Sequence[str] = (),
) -> LoadResult:
    """Plays every repetition to every arm, one arm at a time, each first in its turn.

    Args:
        script_of: The script of a repetition, the same for every arm.
        arms: The reference first.

    Raises:
        ServerError: A server did not start.
        LoadError: A request failed.
    """
    first = script_of(0)
    plays: dict[str, list[Play]] = {arm.name: [] for arm in arms}
    with ExitStack() as running, _progress(console) as progress:
        bar = progress.add_task(load, total=first.num_requests)
        stages = []
        for arm in arms:
            progress.update(bar, description=f"{load}: {arm.name} starts")
            stages.append(running.enter_context(open_stage(arm, first)))
            warm_up(stages[-1].target, first)
        for repetition in range(repetitions):
            script = script_of(repetition)
            turn = repetition % len(stages)
            for stage in (*stages[turn:], *stages[:turn]):
                progress.reset(
                    bar,
                    total=script.num_requests,
                    description=f"{load} {repetition + 1}/{repetitions}: {stage.arm.name}",
                )
                play = play_once(stage, script, repetition, lambda: progress.advance(bar))
                plays[stage.arm.name].append(play)
    results = [
        ArmResult(stage.arm, stage.cache_tokens, tuple(plays[stage.arm.name])) for stage in stages
    ]
    return LoadResult(load, first.told, tuple(notes), arms[0].name, tuple(results))


def play_once(
    stage: Stage, script: Script, repetition: int, on_request_done: Callable[[], None]
) -> Play:
    """One arm's turn, on an empty prefix cache, with nothing left behind."""
    prefix = f"bench/{script.load}/{repetition}/{stage.arm.name}"
    player = Player(script, stage.target, stage.arm.voice, prefix, on_request_done)
    forget_everything(stage, script, prefix=None)
    before, clock_before = stage.metrics(), _read(stage.clock)
    played = player.play()
    after, clock_after = stage.metrics(), _read(stage.clock)
    forget_everything(stage, script, prefix)
    server = ServerFigures.between(before, after, 0.0)
    clock = (clock_before, clock_after) if clock_before and clock_after else None
    return Play(
        sheet_of(played, server, clock),
        played.records,
        TrafficFigures.of(played.records).prompts_digest,
        server.hints_active,
        server.hint_metrics,
    )


def _read(clock: Path | None) -> Reading | None:
    return Reading.of(clock) if clock else None


def forget_everything(stage: Stage, script: Script, prefix: str | None) -> None:
    """Empties the prefix cache where the server lets us, and frees the play's sessions."""
    with httpx.Client(base_url=stage.target.base_url, timeout=60, trust_env=False) as client:
        if prefix is not None and stage.arm.has_plugin:
            for actor in script.of(Traffic.AGENTS):
                client.delete(f"/v1/agent_hint/sessions/{prefix}/{actor.name}")
        client.post("/reset_prefix_cache")


def warm_up(target: Target, script: Script) -> None:
    """The first requests of a server pay for things that are not ours to measure.

    Raises:
        LoadError: One failed.
    """

    async def send() -> None:
        length = script.longest_request - 8
        prompts = [
            tuple(target.vocabulary.text_of(Piece(f"warm-up-{number}", length // (number + 1))))
            for number in range(3)
        ]
        async with client_of(target.base_url) as client:
            for number, prompt in enumerate(prompts):
                question = Question(
                    Traffic.ONE_SHOT, f"warm-up-{number}", 0, prompt, 8, model=target.model
                )
                await ask(client, question, 0.0)

    try:
        asyncio.run(send())
    except httpx.HTTPError as error:
        raise LoadError(f"{target.base_url}: {error or type(error).__name__}") from error


def command_line() -> str:
    return shlex.join(["vllm-agent-hint", *sys.argv[1:]])


def show(result: LoadResult, console: Console) -> None:
    console.print("", load_table(result), words_below(result, judge(result)))


def write(run: ServeRun, json_file: Path, console: Console) -> None:
    written = write_report(run, json_file)
    console.print("", "written: " + "  ".join(map(str, written)), soft_wrap=True)


def with_cache(scale: Scale, tokens: int) -> Scale:
    return replace(scale, cache_tokens=tokens)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=2,
    )
