"""Waking an engine that idles: nothing of vLLM's own does what is due while no request is there."""

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm.agent_hint")


class Waker:
    """Calls back at a time, from a thread of its own that starts with the first wish for it.

    Args:
        wake: Makes the engine look whether there is work. Must be safe in any thread.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._at = math.inf
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def at(self) -> float:
        """When it calls next."""
        return self._at

    def set(self, at: float) -> None:
        """Call at this time, in monotonic seconds, and not before; never for infinity."""
        if at == self._at:
            return
        with self._changed:
            self._at = at
            self._changed.notify()
        if self._thread is None and at < math.inf:
            self._thread = threading.Thread(target=self._run, name="agent-hint-waker", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while (left := self._at - time.monotonic()) > 0:
                    self._changed.wait(None if left == math.inf else left)
                self._at = math.inf
            self._wake()


def init_engine_core(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """``EngineCoreProc.__init__(...)``, which builds scheduler and input queue.

    Stock: an engine without requests waits at its input queue. Ours: gives our part of the
    scheduler a way to make it look up, which is vLLM's own for its shutdown.
    If it moves: what is due while the engine idles is done with the next request.
    """
    wrapped(*args, **kwargs)
    try:
        hooks = getattr(instance.scheduler, "agent_hint", None)
        if hooks is None or hooks.remote is None:
            return
        from vllm.v1.engine import EngineCoreRequestType

        wakeup = (EngineCoreRequestType.WAKEUP, None)
        hooks.remote.waker = Waker(lambda: instance.input_queue.put_nowait(wakeup))
    except Exception as error:
        logger.warning(
            "vllm-agent-hint: an idle engine can't be woken, so keep-alive pauses with it (%r)",
            error,
        )
