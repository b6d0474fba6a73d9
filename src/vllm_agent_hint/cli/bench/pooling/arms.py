"""Servers side by side: recompute, stock offloading on demand, ours with prefetch, a hybrid."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from vllm_agent_hint.cli.demo.model import ensure_model
from vllm_agent_hint.cli.demo.server import (
    MODEL_NAME,
    Server,
    running_server,
    server_environment,
)

BLOCKS: Final = 80
"""Of 128 tokens: a context, a flood that drives it out, and no more."""
HYBRID_KIND: Final = "qwen3next"
HYBRID_BLOCKS: Final = 60
"""The same for a model whose contexts take blocks of two groups."""
FLOOD_TOKENS: Final = 3_000
FLOOD_REQUESTS: Final = 4
HOST_BYTES: Final = 600_000_000
TTL_SECONDS: Final = 900

RECOMPUTE: Final = "recompute"
STOCK: Final = "stock-offloading"
OURS: Final = "ours"
HYBRID: Final = "hybrid"


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it.

    Args:
        ttft: Seconds until the first token.
        cached_tokens: As vLLM reports them.
        token_ids: What was generated.
    """

    ttft: float
    cached_tokens: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Edited:
    """What the first of some edits has come to.

    Args:
        status: Of its result.
        tokens: That it has saved or brought.
        operation_id: Of all of them.
    """

    status: str
    tokens: int
    operation_id: str


class Arm:
    """One server.

    Args:
        name: In the report.
        server: Where it runs.
        parks: Whether it is told to offload and prefetch.
    """

    def __init__(self, name: str, server: Server, *, parks: bool) -> None:
        self.name = name
        self.parks = parks
        self._server = server
        self._client = httpx.Client(base_url=server.base_url, timeout=300.0, trust_env=False)

    def ask(
        self, prompt: Sequence[int], session_id: str | None = None, max_tokens: int = 4
    ) -> Answer:
        """A greedy completion, streamed."""
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if session_id is not None and self.parks:
            body["agent_hint"] = {"session_id": session_id, "cache_control": {"ttl": TTL_SECONDS}}
        first = 0.0
        usage: dict[str, Any] = {}
        said: list[int] = []
        began = time.perf_counter()
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for event in _events(response.iter_bytes()):
                first = first or time.perf_counter() - began
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    said += choice.get("token_ids") or []
        details = usage.get("prompt_tokens_details") or {}
        return Answer(first, details.get("cached_tokens") or 0, tuple(said))

    def answer(self, prompt: Sequence[int], max_tokens: int) -> None:
        """A completion in one piece, of no session, of which nobody reads a word."""
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        self._client.post("/v1/completions", json=body).raise_for_status()

    def edit(self, session_id: str, *edits: str, wait_seconds: float = 0.0) -> Edited:
        """Run edits, one after the other."""
        response = self._client.post(
            f"/v1/agent_hint/sessions/{session_id}",
            json={"edits": [{"type": edit} for edit in edits], "wait_seconds": wait_seconds},
        )
        response.raise_for_status()
        report = response.json()
        first = report["results"][0]
        return Edited(first["status"], first["tokens"], report["operation_id"])

    def local_tokens(self, session_id: str) -> int:
        """Of the session's latest context: what its cache would serve now."""
        response = self._client.get(f"/v1/agent_hint/sessions/{session_id}")
        response.raise_for_status()
        return int(response.json()["residency"][0]["local"])

    def free(self, session_id: str) -> None:
        """The agent has done its work: what it has protected is not in the way of the next."""
        self._client.delete(f"/v1/agent_hint/sessions/{session_id}").raise_for_status()

    def status_of(self, operation_id: str) -> str:
        """What an edit has come to."""
        response = self._client.get(f"/v1/agent_hint/operations/{operation_id}")
        response.raise_for_status()
        return str(response.json()["results"][0]["status"])

    def total(self, metric: str, **labels: str) -> float:
        return self._server.metrics().total(metric, **labels)

    def flood(self, seed: int) -> None:
        """One-shot traffic that drives everything unprotected out of the cache."""
        for k in range(FLOOD_REQUESTS):
            self.answer(tokens(FLOOD_TOKENS, seed * FLOOD_REQUESTS + k + 1_000_000), max_tokens=1)


def _events(chunks: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The events of a stream. Generated text may hold what ``str.splitlines`` takes for an end."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])


def tokens(count: int, seed: int) -> list[int]:
    """A prompt; another seed shares no block with it."""
    state = seed * 2_654_435_761 % 2**32 | 1
    prompt = []
    for _ in range(count):
        state = (1_103_515_245 * state + 12_345) % 2**31
        prompt.append(3 + (state >> 16) % 256)
    return prompt


@dataclass(frozen=True, slots=True)
class Arms:
    """All servers; those that nobody asks anything take no time of the others."""

    recompute: Arm
    stock: Arm
    ours: Arm
    hybrid: Arm

    @property
    def of_resumes(self) -> tuple[Arm, ...]:
        """Those whose resumes are compared."""
        return self.recompute, self.stock, self.ours


@contextmanager
def running_arms(folder: Path, load_bytes_per_second: float, kind: str) -> Iterator[Arms]:
    """Each a ``vllm serve`` of its own, started side by side."""
    environment = server_environment(folder / "vllm-cache", on_gpu=False)
    off = {**environment, "VLLM_AGENT_HINT": "0"}
    tier = ["--kv-transfer-config", json.dumps(_tier(load_bytes_per_second))]
    models = {one: ensure_model(one, folder / "models") for one in (kind, HYBRID_KIND)}

    def server(
        name: str, env: Mapping[str, str], more: Sequence[str], of: str = kind
    ) -> AbstractContextManager[Server]:
        arguments = [
            *("--max-model-len", str(8_192 if of == kind else 4_096)),
            *("--num-gpu-blocks-override", str(BLOCKS if of == kind else HYBRID_BLOCKS)),
            *more,
        ]
        log = folder / f"{name}.log"
        return running_server(models[of], log, {**os.environ, **env}, arguments)

    wanted = [
        server(RECOMPUTE, off, []),
        server(STOCK, off, tier),
        server(OURS, environment, tier),
        server(HYBRID, environment, tier, HYBRID_KIND),
    ]
    with ExitStack() as running, ThreadPoolExecutor(len(wanted)) as starting:
        started = [starting.submit(one.__enter__) for one in wanted]
        for one, future in zip(wanted, started, strict=True):
            if future.exception() is None:
                running.push(one)
        recompute, stock, ours, hybrid = (future.result() for future in started)
        yield Arms(
            Arm(RECOMPUTE, recompute, parks=False),
            Arm(STOCK, stock, parks=False),
            Arm(OURS, ours, parks=True),
            Arm(HYBRID, hybrid, parks=True),
        )


def _tier(load_bytes_per_second: float) -> dict[str, Any]:
    """The same throttled tier for both that have one: without our plugin it goes by use alone."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "AgentHintOffloadingSpec",
            "spec_module_path": "vllm_agent_hint.pooling.tier",
            "cpu_bytes_to_use": HOST_BYTES,
            "load_bytes_per_second": load_bytes_per_second,
        },
    }
