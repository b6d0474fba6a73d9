"""One run of the report: one workload, one cache size, one policy. Runs in a process of its own."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm_agent_hint.cli.bench.replay.bounds import replay_min, replay_session_min
from vllm_agent_hint.cli.bench.replay.caches import ChainHashes
from vllm_agent_hint.cli.bench.replay.closed_loop import ClosedLoop, TimeModel
from vllm_agent_hint.cli.bench.replay.driver import Replayed, build_cache, replay_open_loop
from vllm_agent_hint.cli.bench.replay.lru import replay_lru
from vllm_agent_hint.cli.bench.replay.report import figures_of
from vllm_agent_hint.cli.bench.replay.segments import Segmentation, segment
from vllm_agent_hint.cli.bench.replay.workload import Workload, compose
from vllm_agent_hint.traces.reading import read_trace

Progress = Callable[[int], object]
"""Called with the number of requests that are done since the last call."""


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """What ``compose`` wants, by name: workers put it together again.

    Args:
        traces: Files.
        users: See ``compose``.
        seed: See ``compose``.
        share: See ``compose``.
        block_size: See ``compose``.
        stagger: See ``compose``.
    """

    traces: tuple[Path, ...]
    users: int
    seed: int
    share: float = 1.0
    block_size: int | None = None
    stagger: float | None = None

    def compose(self) -> Workload:
        """Read the files and put the workload together."""
        return compose(
            [read_trace(path) for path in self.traces],
            users=self.users,
            seed=self.seed,
            share=self.share,
            block_size=self.block_size,
            stagger=self.stagger,
        )


@dataclass(frozen=True, slots=True)
class Task:
    """A run to make.

    Args:
        workload: Of what.
        cache_tokens: Tokens that the cache can hold.
        policy: Its name.
        time_model: For the closed loop; None for the open one.
    """

    workload: WorkloadSpec
    cache_tokens: int
    policy: str
    time_model: TimeModel | None = None


@lru_cache(maxsize=1)
def _workload(spec: WorkloadSpec) -> Workload:
    return spec.compose()


@lru_cache(maxsize=1)
def _segmentation(spec: WorkloadSpec) -> Segmentation:
    return segment(_workload(spec))


@lru_cache(maxsize=1)
def _hashes(spec: WorkloadSpec) -> ChainHashes:
    return ChainHashes(_workload(spec).num_ids)


def run_task(task: Task, on_progress: Progress = lambda _: None) -> dict[str, Any]:
    """Make a run.

    Returns:
        An entry of the report's ``runs``.
    """
    workload = _workload(task.workload)
    capacity = max(1, task.cache_tokens // workload.block_size)
    head: dict[str, Any] = {
        "traces": [path.name for path in task.workload.traces],
        "users": task.workload.users,
        "seed": task.workload.seed,
        "share": task.workload.share,
        "block_size": workload.block_size,
        "cache_tokens": task.cache_tokens,
        "policy": task.policy,
    }
    if task.time_model is not None:
        cache = build_cache(task.policy, workload, _hashes(task.workload), capacity)
        assert cache is not None, "bounds are refused before"
        with _quiet_collector():
            return head | ClosedLoop(workload, cache, task.time_model, on_progress).run()
    return head | _open_loop(task, workload, capacity, on_progress)


def _open_loop(
    task: Task, workload: Workload, capacity: int, on_progress: Progress
) -> dict[str, Any]:
    size = workload.block_size
    if task.policy in ("min", "session-min"):
        cut = _segmentation(task.workload)
        served = (
            replay_min(cut, capacity)
            if task.policy == "min"
            else replay_session_min(workload, cut, capacity)
        )
        on_progress(len(workload.arrivals))
        return figures_of(workload, capacity, Replayed([blocks * size for blocks in served]))
    cache = build_cache(task.policy, workload, _hashes(task.workload), capacity)
    assert cache is not None, "unknown names are refused before"
    with _quiet_collector():
        replayed = replay_open_loop(workload, cache, on_progress)
    figures = figures_of(workload, capacity, replayed)
    if task.policy == "stock":
        expected = replay_lru(_segmentation(task.workload), capacity)
        figures["lru_equal"] = replayed.hit_tokens == [blocks * size for blocks in expected]
    return figures


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """The garbage collector would walk millions of hashes and blocks that all stay."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
