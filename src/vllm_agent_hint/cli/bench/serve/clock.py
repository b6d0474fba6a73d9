"""Runs inside a server: what its scheduler costs, for the bench to read from outside.

``--scheduler-cls`` takes these classes, so that stock vLLM and ours are measured by the same
code: the clock lies on the object, above whatever class the plugin makes of it. The figures go
through a file of fixed size, since a server has no other door that stock vLLM would open as well.
"""

import gc
import mmap
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_agent_hint.cli.bench.serve.clock_file import ENV_FILE, FORMAT, ROUND

TIMED: Final = ("schedule", "update_from_output", "add_request", "finish_requests")
STEP: Final = "schedule"
FEWER_BLOCKS: Final = 1_000
MORE_BLOCKS: Final = 11_000


class _Clocked:
    """Laid over a scheduler. Costs two readings of the thread's CPU clock per timed call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        file = os.environ.get(ENV_FILE)
        if file is None:
            return
        self._clock_face = _face(Path(file))
        self._clock_steps = 0
        self._clock_seconds = 0.0
        self._clock_peak = 0.0
        self._clock_round = 0
        self._clock_depth = 0
        self._clock_bytes = _bytes_per_block(type(self.kv_cache_manager.block_pool))  # type: ignore[attr-defined]
        for name in TIMED:
            # The object's own attribute hides the method of the class, also of a subclass.
            setattr(self, name, self._timed(name, getattr(self, name)))
        self._show()

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        is_step = name == STEP

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._clock_depth:
                return method(*args, **kwargs)  # Its caller's time holds it already.
            self._clock_depth = 1
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self._clock_seconds += time.thread_time() - began
                self._clock_depth = 0
                if is_step:
                    self._clock_steps += 1
                    self._note_usage()
                self._show()

        return timed

    def _note_usage(self) -> None:
        (number,) = ROUND.unpack_from(self._clock_face, FORMAT.size)
        if number != self._clock_round:
            self._clock_round, self._clock_peak = number, 0.0
        usage = self.kv_cache_manager.usage  # type: ignore[attr-defined]
        self._clock_peak = max(self._clock_peak, usage)

    def _show(self) -> None:
        FORMAT.pack_into(
            self._clock_face,
            0,
            self._clock_steps,
            self._clock_seconds,
            self._clock_bytes,
            self._clock_peak,
        )


class ClockedScheduler(_Clocked, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with a clock on it."""


class ClockedAsyncScheduler(_Clocked, AsyncScheduler):  # type: ignore[misc]
    """vLLM's async scheduler, its default on a GPU, with a clock on it."""


def _face(file: Path) -> mmap.mmap:
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), FORMAT.size + ROUND.size)


def _bytes_per_block(pool_cls: Any) -> float:
    """Python memory of one block, from the growth between two pools of the class in use.

    0.0 if this vLLM builds its pool in another way.
    """
    try:
        fewer, more = (_bytes_of_pool(pool_cls, size) for size in (FEWER_BLOCKS, MORE_BLOCKS))
    except Exception:
        return 0.0
    return (more - fewer) / (MORE_BLOCKS - FEWER_BLOCKS)


def _bytes_of_pool(pool_cls: Any, num_blocks: int) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        pool = pool_cls(num_blocks, True, 16)
        gc.collect()  # A pool replaces stock's blocks, which are tied in circles.
        taken = tracemalloc.get_traced_memory()[0]
        del pool
    finally:
        tracemalloc.stop()
    return taken
