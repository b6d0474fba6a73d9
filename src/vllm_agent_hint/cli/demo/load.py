"""The seeded load: agents with growing contexts, and one-shot requests between them."""

import asyncio
import hashlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import httpx

from vllm_agent_hint.cli.demo.server import MODEL_NAME
from vllm_agent_hint.cli.demo.settings import DemoSettings

FIRST_TEXT_TOKEN: Final = 3
LAST_TEXT_TOKEN: Final = 258
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
        session_id: Of an agent; one-shot requests have none, and then no hint.
    """

    traffic: Traffic
    name: str
    turn: int
    prompt: tuple[int, ...]
    reply_tokens: int
    session_id: str | None = None
    ttl_seconds: float = 0.0

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "prompt": self.prompt,
            "max_tokens": self.reply_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self.session_id is not None:
            body["agent_hint"] = {
                "session_id": self.session_id,
                "cache_control": {"type": "ephemeral", "ttl": self.ttl_seconds},
            }
        return body


@dataclass(frozen=True, slots=True)
class Answer:
    record: RequestRecord
    token_ids: list[int]


class Load:
    """Sends the load of these settings to one server.

    The requests are the same bytes in every column, hints included: a server without the plugin
    ignores ``agent_hint``. An agent appends what the model has really answered, as agents do;
    greedy decoding makes that the same everywhere, and the digests of the prompts prove it.
    """

    def __init__(
        self, settings: DemoSettings, base_url: str, on_request_done: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._base_url = base_url
        self._on_request_done = on_request_done
        self._records: list[RequestRecord] = []
        self._began = 0.0

    def run(self, with_one_shots: bool) -> list[RequestRecord]:
        """All requests, in the order in which they were sent.

        Raises:
            LoadError: A request failed.
        """
        try:
            asyncio.run(self._run(with_one_shots))
        except* (httpx.HTTPError, LoadError) as failures:
            first = failures.exceptions[0]
            raise LoadError(str(first) or type(first).__name__) from failures
        return sorted(self._records, key=lambda record: record.sent)

    async def _run(self, with_one_shots: bool) -> None:
        async with _client(self._base_url) as client:
            self._began = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for agent in range(self._settings.agents):
                    tasks.create_task(self._run_agent(client, agent))
                if with_one_shots:
                    tasks.create_task(self._run_one_shots(client, tasks))

    async def _run_agent(self, client: httpx.AsyncClient, agent: int) -> None:
        settings = self._settings
        dice = random.Random(f"{settings.seed}/agent-{agent}/pauses")
        context = random_tokens(settings, "system", settings.system_tokens)
        context += random_tokens(settings, f"agent-{agent}/task", settings.task_tokens)
        await asyncio.sleep(settings.pause_seconds * agent / settings.agents)
        for turn in range(settings.turns):
            if turn > 0:
                await asyncio.sleep(settings.pause_seconds * dice.uniform(0.75, 1.25))
                tool_output = f"agent-{agent}/tool-{turn}"
                context += random_tokens(settings, tool_output, settings.tool_tokens)
            question = Question(
                Traffic.AGENTS,
                f"agent-{agent}/turn-{turn}",
                turn,
                tuple(context),
                settings.agent_reply_tokens,
                session_id=f"demo-agent-{agent}",
                ttl_seconds=settings.ttl_seconds,
            )
            context += await self._ask(client, question)

    async def _run_one_shots(self, client: httpx.AsyncClient, tasks: asyncio.TaskGroup) -> None:
        settings = self._settings
        dice = random.Random(f"{settings.seed}/one-shots")
        arrival = 0.0
        for number in range(settings.one_shots):
            arrival += dice.expovariate(settings.one_shots_per_second)
            length = round(settings.one_shot_tokens * dice.uniform(0.5, 1.5))
            name = f"one-shot-{number}"
            question = Question(
                Traffic.ONE_SHOT,
                name,
                0,
                tuple(random_tokens(settings, name, length)),
                settings.one_shot_reply_tokens,
            )
            await asyncio.sleep(max(0.0, self._began + arrival - time.monotonic()))
            tasks.create_task(self._ask(client, question))

    async def _ask(self, client: httpx.AsyncClient, question: Question) -> list[int]:
        answer = await ask(client, question, self._began)
        self._records.append(answer.record)
        self._on_request_done()
        return answer.token_ids


def warm_up(settings: DemoSettings, base_url: str) -> None:
    """The first request of a server pays for things that are not ours to measure."""

    async def send() -> None:
        prompt = tuple(random_tokens(settings, "warm-up", settings.one_shot_tokens))
        async with _client(base_url) as client:
            await ask(client, Question(Traffic.ONE_SHOT, "warm-up", 0, prompt, 2), 0.0)

    asyncio.run(send())


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


def _client(base_url: str) -> httpx.AsyncClient:
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


def random_tokens(settings: DemoSettings, name: str, count: int) -> list[int]:
    """Text tokens that depend on the seed and the name alone."""
    dice = random.Random(f"{settings.seed}/{name}")
    return [dice.randint(FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN) for _ in range(count)]
