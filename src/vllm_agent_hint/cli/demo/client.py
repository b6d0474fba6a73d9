"""One streamed request to a server, as its client sees it."""

import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import httpx

from vllm_agent_hint.cli.demo.server import MODEL_NAME

REQUEST_TIMEOUT_SECONDS: Final = 300.0


class Traffic(StrEnum):
    AGENTS = "agents"
    ONE_SHOT = "one_shot"


class LoadError(RuntimeError):
    """A request of the load was refused or broke off."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its client saw it. Times are seconds since the load began.

    Args:
        name: The same for the same request in every column, such as ``agent-2/turn-5``.
        turn: Of the agent, from 0; of a one-shot request always 0.
        prompt_digest: Of the prompt's token ids: equal prompts, equal digests.
    """

    traffic: Traffic
    name: str
    turn: int
    sent: float
    first_token: float
    finished: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prompt_digest: str

    @property
    def ttft(self) -> float:
        return self.first_token - self.sent

    @property
    def tpot(self) -> float:
        return (self.finished - self.first_token) / max(1, self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Question:
    """One request of the load, before it is sent.

    Args:
        hint: Its ``agent_hint``, if it has one.
        model: As the server calls it.
        cache_salt: Keeps it apart from equal prompts with another salt, or none.
    """

    traffic: Traffic
    name: str
    turn: int
    prompt: tuple[int, ...]
    reply_tokens: int
    hint: Mapping[str, Any] | None = None
    model: str = MODEL_NAME
    cache_salt: str | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": self.reply_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self.cache_salt is not None:
            body["cache_salt"] = self.cache_salt
        if self.hint is not None:
            body["agent_hint"] = self.hint
        return body


@dataclass(frozen=True, slots=True)
class Answer:
    record: RequestRecord
    token_ids: list[int]


async def ask(client: httpx.AsyncClient, question: Question, began: float) -> Answer:
    """Streams one completion.

    Raises:
        LoadError: It was refused, or ended early.
    """
    sent = time.monotonic()
    first_token = finished = 0.0
    token_ids: list[int] = []
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=question.body()) as response:
        if response.status_code != httpx.codes.OK:
            text = (await response.aread()).decode(errors="replace")
            raise LoadError(f"{question.name}: HTTP {response.status_code}: {text[:500]}")
        async for event in _events(response):
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                finished = time.monotonic()
                first_token = first_token or finished
                token_ids += choice.get("token_ids") or ()
    if not usage or len(token_ids) != question.reply_tokens:
        raise LoadError(f"{question.name}: the stream ended after {len(token_ids)} tokens")
    record = RequestRecord(
        traffic=question.traffic,
        name=question.name,
        turn=question.turn,
        sent=sent - began,
        first_token=first_token - began,
        finished=finished - began,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        completion_tokens=usage["completion_tokens"],
        prompt_digest=hashlib.sha256(repr(question.prompt).encode()).hexdigest()[:16],
    )
    return Answer(record, token_ids)


def client_of(base_url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=base_url,
        timeout=REQUEST_TIMEOUT_SECONDS,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    )


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The stream's JSON objects, split at newlines alone: ``aiter_lines`` splits at every
    character that Unicode calls a line break, and random text has them inside the strings."""
    pending = b""
    async for part in response.aiter_bytes():
        *lines, pending = (pending + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data: ").strip()
            if data.startswith(b"{"):
                yield json.loads(data)
