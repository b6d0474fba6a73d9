"""Real vLLM servers for tests: forked (2 to 3 s each) or in full (15 s), behind one face."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from vllm_agent_hint.cli.demo.metrics import Metrics
from vllm_agent_hint.cli.demo.server import (
    MODEL_NAME,
    Server,
    free_port,
    serve_arguments,
    wait_until_healthy,
)

MAX_MODEL_LEN: Final = 8192
FIRST_TEXT_TOKEN: Final = 3
TEXT_TOKENS: Final = 256

Serve = Callable[..., "TestServer"]


class TestServer:
    """A running server and a client for it.

    Args:
        server: Where it is.
        is_alive: Whether its process still runs.
        stop: Ends it before the test does.
    """

    __test__ = False

    def __init__(
        self, server: Server, is_alive: Callable[[], bool], stop: Callable[[], None]
    ) -> None:
        self.base_url = server.base_url
        self.start_seconds = server.start_seconds
        self.is_alive = is_alive
        self.stop = stop
        self.client = httpx.Client(base_url=server.base_url, timeout=120.0, trust_env=False)
        self._server = server

    def post(
        self, path: str, json: object = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        return self.client.post(path, json=json, headers=headers)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def complete(
        self,
        prompt: str | Sequence[int],
        agent_hint: object = None,
        max_tokens: int = 4,
        **more: Any,
    ) -> "Completion":
        """A greedy completion that has to succeed."""
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        if agent_hint is not None:
            body["agent_hint"] = agent_hint
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return Completion(response.json())

    def metrics(self) -> Metrics:
        return self._server.metrics()

    def log_text(self) -> str:
        return self._server.log_text()


class Completion:
    """What a test asks of an answer; ``body`` is the whole of it."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.prompt_tokens: int = body["usage"]["prompt_tokens"]
        self.cached_tokens: int = body["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
        self.token_ids: list[int] = body["choices"][0]["token_ids"]


class ForkLauncher:
    """The other end of ``fork_launcher.py``. Started by the first server that is asked for."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_launcher.py"))],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._read("importing vLLM")

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        order = {"start": list(arguments), "environment": dict(environment), "log": str(log)}
        pid: int = self._ask(order)["pid"]
        return pid

    def is_alive(self, pid: int) -> bool:
        return bool(self._ask({"poll": pid})["alive"])

    def stop(self, pid: int) -> None:
        self._ask({"stop": pid})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._log.close()

    def _ask(self, order: Mapping[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read(f"order {order}")

    def _read(self, doing: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            log = Path(self._log.name).read_text(errors="replace")
            raise RuntimeError(f"the fork launcher ended while {doing}:\n{log[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def forked_server(
    launcher: ForkLauncher,
    model: Path,
    log: Path,
    environment: Mapping[str, str],
    more_arguments: Sequence[str],
) -> Iterator[TestServer]:
    port = free_port()
    pid = launcher.start(serve_arguments(model, port, more_arguments), environment, log)
    try:
        server = wait_until_healthy(port, log, lambda: launcher.is_alive(pid), limit_seconds=60)
        yield TestServer(
            server, is_alive=lambda: launcher.is_alive(pid), stop=lambda: launcher.stop(pid)
        )
    finally:
        launcher.stop(pid)


def tokens(count: int, seed: int = 0) -> list[int]:
    """A prompt of ``count`` token ids; another seed shares no block with it."""
    state = seed * 2_654_435_761 % 2**32 | 1
    prompt = []
    for _ in range(count):
        state = (1_103_515_245 * state + 12_345) % 2**31
        prompt.append(FIRST_TEXT_TOKEN + (state >> 16) % TEXT_TOKENS)
    return prompt
