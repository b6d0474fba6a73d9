"""The seeded load: agents with growing contexts, and one-shot requests between them."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Final

import httpx

from vllm_agent_hint.cli.demo.client import (
    LoadError,
    Question,
    RequestRecord,
    Traffic,
    ask,
    client_of,
)
from vllm_agent_hint.cli.demo.settings import DemoSettings

FIRST_TEXT_TOKEN: Final = 3
LAST_TEXT_TOKEN: Final = 258


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
        async with client_of(self._base_url) as client:
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
                hint={
                    "session_id": f"demo-agent-{agent}",
                    "cache_control": {"type": "ephemeral", "ttl": settings.ttl_seconds},
                },
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
        async with client_of(base_url) as client:
            await ask(client, Question(Traffic.ONE_SHOT, "warm-up", 0, prompt, 2), 0.0)

    asyncio.run(send())


def random_tokens(settings: DemoSettings, name: str, count: int) -> list[int]:
    """Text tokens that depend on the seed and the name alone."""
    dice = random.Random(f"{settings.seed}/{name}")
    return [dice.randint(FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN) for _ in range(count)]
