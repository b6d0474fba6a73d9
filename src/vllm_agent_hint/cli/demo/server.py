"""A real ``vllm serve`` in a process of its own, on loopback."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_agent_hint.cli.demo.metrics import Metrics

HOST: Final = "127.0.0.1"
MODEL_NAME: Final = "model"
POLL_SECONDS: Final = 0.1
STOP_SECONDS: Final = 20.0

OFFLINE_ENVIRONMENT: Final[Mapping[str, str]] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
CPU_ENVIRONMENT: Final[Mapping[str, str]] = {
    # More threads spin while they wait; one busy neighbour then makes a prefill 100 x slower.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The worker inside the engine core instead of a third process: starts 9 s sooner.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


class ServerError(RuntimeError):
    """A server did not start; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    Args:
        base_url: Such as ``http://127.0.0.1:40123``, without a slash at its end.
        log: What the server wrote to stdout and stderr.
        start_seconds: From the start of the process until it was healthy.
    """

    base_url: str
    log: Path
    start_seconds: float

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def metrics(self) -> Metrics:
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=30) as response:
            return Metrics.parse(response.read().decode())


def server_environment(cache: Path, on_gpu: bool) -> dict[str, str]:
    """The variables of every server, beside those of this process.

    Args:
        cache: vLLM's own cache (model information, compiled code). One per environment: two
            versions of vLLM that share one evict each other's entries.
        on_gpu: Whether vLLM runs on a GPU, with the device's own defaults.
    """
    platform = {} if on_gpu else CPU_ENVIRONMENT
    return {**OFFLINE_ENVIRONMENT, **platform, "VLLM_CACHE_ROOT": str(cache.resolve())}


def serve_arguments(model: Path, port: int, more: Sequence[str]) -> list[str]:
    """What follows ``vllm`` on the command line."""
    return [
        *("serve", str(model), "--served-model-name", MODEL_NAME),
        *("--host", HOST, "--port", str(port)),
        *("--enforce-eager", "--enable-prompt-tokens-details"),
        *more,
    ]


@contextmanager
def running_server(
    model: Path, log: Path, environment: Mapping[str, str], more_arguments: Sequence[str] = ()
) -> Iterator[Server]:
    """Starts ``vllm serve``, waits until it is healthy, and stops it at the end of the block.

    Raises:
        ServerError: It ended, or was not healthy within three minutes.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main"),
        *serve_arguments(model, port, more_arguments),
    ]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # A session of its own: Ctrl-C in the terminal reaches us alone, and we stop the server.
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield wait_until_healthy(port, log, lambda: process.poll() is None)
    finally:
        _stop(process)


def wait_until_healthy(
    port: int, log: Path, is_alive: Callable[[], bool], limit_seconds: float = 180.0
) -> Server:
    """Polls ``/health``.

    Raises:
        ServerError: The server died or took longer than the limit.
    """
    base_url = f"http://{HOST}:{port}"
    started = time.monotonic()
    while (waited := time.monotonic() - started) < limit_seconds:
        if not is_alive():
            raise ServerError(f"vllm serve ended before it was healthy.\n{_log_tail(log)}")
        try:
            with urllib.request.urlopen(f"{base_url}/health", timeout=5):
                return Server(base_url, log, start_seconds=waited)
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_SECONDS)
    raise ServerError(f"vllm serve was not healthy after {limit_seconds:g} s.\n{_log_tail(log)}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGINT lets vLLM shut its engine core down in order; the group is killed if it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _log_tail(log: Path, lines: int = 40) -> str:
    return f"{log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
