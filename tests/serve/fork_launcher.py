"""Imports vLLM once (7 s), then forks ``vllm serve`` from itself in 2 to 3 s each.

A program of its own, so that pytest never imports vLLM. It takes one JSON object a line on stdin
and answers each with one on stdout; at the end of its input it kills what it started.

    {"start": ["serve", MODEL, ...], "environment": {...}, "log": PATH}  ->  {"pid": 4711}
    {"poll": 4711}                                                       ->  {"alive": true}
    {"stop": 4711}                                                       ->  {"alive": false}

Plugins load once per process and are inherited by a fork, so this process must load none: each
server loads them itself, under its own environment. Its engine core is then forked from it, as
vLLM does by default on a GPU.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

STOP_SECONDS = 20.0


def import_vllm() -> None:
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.openai.api_server
    import vllm.plugins
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.executor.uniproc_executor
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker
    always_fork()
    if vllm.plugins.plugins_loaded:
        sys.exit("importing vLLM has loaded its general plugins: no server could load its own")


def always_fork() -> None:
    """vLLM's CPU platform asks for ``spawn``, which would import everything anew."""
    from vllm.utils import system_utils

    stock = system_utils.get_mp_context
    for module in list(sys.modules.values()):
        if vars(module).get("get_mp_context") is stock:
            vars(module)["get_mp_context"] = lambda: multiprocessing.get_context("fork")


def start(arguments: list[str], environment: dict[str, str], log: str) -> int:
    pid = os.fork()
    if pid == 0:
        become_server(arguments, environment, log)
    return pid


def become_server(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Never returns."""
    status = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        sys.argv = ["vllm", *arguments]
        from vllm.entrypoints.cli.main import main

        main()
        status = 0
    except SystemExit as exit_request:
        status = exit_request.code if isinstance(exit_request.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Children:
    def __init__(self) -> None:
        self._alive: set[int] = set()

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        match message:
            case {"start": arguments, "environment": environment, "log": log}:
                pid = start(arguments, environment, log)
                self._alive.add(pid)
                return {"pid": pid}
            case {"poll": pid}:
                return {"alive": self.is_alive(pid)}
            case {"stop": pid}:
                self.stop(pid)
                return {"alive": False}
        raise ValueError(f"no such order: {message}")

    def is_alive(self, pid: int) -> bool:
        if pid in self._alive and os.waitpid(pid, os.WNOHANG)[0] == pid:
            self._alive.discard(pid)
        return pid in self._alive

    def stop(self, pid: int) -> None:
        """SIGINT first, then SIGKILL to the group, engine core included."""
        deadline = time.monotonic() + STOP_SECONDS
        if self.is_alive(pid):
            os.kill(pid, signal.SIGINT)
        while self.is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if pid in self._alive:
            os.waitpid(pid, 0)
            self._alive.discard(pid)

    def stop_all(self) -> None:
        for pid in tuple(self._alive):
            self.stop(pid)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints while it is imported; stdout is for answers alone.
    import_vllm()
    children = Children()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    try:
        for line in sys.stdin:
            print(json.dumps(children.answer(json.loads(line))), file=answers, flush=True)
    finally:
        children.stop_all()


if __name__ == "__main__":
    main()
