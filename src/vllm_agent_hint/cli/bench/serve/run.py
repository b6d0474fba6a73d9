"""Plays the repetitions to the arms in turn, and shows and writes what came of it."""

import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, TypeAlias

from rich.console import Console

from vllm_agent_hint.cli.bench.serve.arms import Arm
from vllm_agent_hint.cli.bench.serve.figures import sheet_of
from vllm_agent_hint.cli.bench.serve.play import Player
from vllm_agent_hint.cli.bench.serve.report import ServeRun, write_report
from vllm_agent_hint.cli.bench.serve.result import ArmResult, LoadResult, Play
from vllm_agent_hint.cli.bench.serve.scale import Scale
from vllm_agent_hint.cli.bench.serve.script import Extent, Script
from vllm_agent_hint.cli.bench.serve.stage import OpenStage, Stage, warm_up
from vllm_agent_hint.cli.bench.serve.table import load_table, words_below
from vllm_agent_hint.cli.bench.serve.verdict import judge
from vllm_agent_hint.cli.demo.client import Traffic
from vllm_agent_hint.cli.demo.measure import ServerFigures, TrafficFigures
from vllm_agent_hint.cli.progress import request_progress

WriteScript: TypeAlias = Callable[[Scale, str], Script]
"""A load: what is played at this scale, under this seed."""

_RUN: Final = secrets.token_hex(4)
"""A standing server may remember the sessions and salts of an earlier run."""


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
    extent = Extent.of(script_of(repetition) for repetition in range(repetitions))
    plays: dict[str, list[Play]] = {arm.name: [] for arm in arms}
    with ExitStack() as running, request_progress(console, refresh_per_second=2) as progress:
        bar = progress.add_task(load, total=first.num_requests)
        stages = []
        for arm in arms:
            progress.update(bar, description=f"{load}: {arm.name} starts")
            stages.append(running.enter_context(open_stage(arm, extent)))
            warm_up(stages[-1].target, extent.longest_request)
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
    return LoadResult(
        load, first.told, (*notes, *_no_pressure(first)), arms[0].name, tuple(results)
    )


def _no_pressure(script: Script) -> list[str]:
    """A cache that holds everything leaves nothing to win, which the reader should know."""
    if script.pressure > 1.0 or script.of(Traffic.ONE_SHOT):
        return []
    return [
        f"NO PRESSURE: the contexts fill {script.pressure:.0%} of the cache. Start the servers "
        "with a smaller one (--num-gpu-blocks-override)."
    ]


def play_once(
    stage: Stage, script: Script, repetition: int, on_request_done: Callable[[], None]
) -> Play:
    """One arm's turn, on an empty prefix cache, with nothing left behind."""
    prefix = f"bench-{_RUN}/{script.load}/{repetition}/{stage.arm.name}"
    player = Player(
        script, stage.target, stage.arm.voice, prefix, on_request_done, polls=stage.clock is None
    )
    stage.empty_cache()
    stage.start_round()
    before, clock_before = stage.metrics(), stage.reading()
    played = player.play()
    after, clock_after = stage.metrics(), stage.reading()
    stage.free_sessions(player.session_ids, player.cache_salt)
    server = ServerFigures.between(before, after, 0.0)
    clock = (clock_before, clock_after) if clock_before and clock_after else None
    return Play(
        sheet_of(played, server, clock),
        played.records,
        TrafficFigures.of(played.records).prompts_digest,
        server.hints_active,
        server.hint_metrics,
    )


def command_line() -> str:
    return shlex.join(["vllm-agent-hint", *sys.argv[1:]])


def show(result: LoadResult, console: Console) -> None:
    console.print("", load_table(result), words_below(result, judge(result)))


def write(run: ServeRun, json_file: Path, console: Console) -> None:
    written = write_report(run, json_file)
    console.print("", "written: " + "  ".join(map(str, written)), soft_wrap=True)
