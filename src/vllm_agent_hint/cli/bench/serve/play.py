"""Plays a script to one server, in one arm's voice."""

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import httpx

from vllm_agent_hint.cli.bench.serve.arms import TtlSaid, Voice
from vllm_agent_hint.cli.bench.serve.script import Actor, Script, Text, Turn, Vocabulary
from vllm_agent_hint.cli.demo.client import (
    LoadError,
    Question,
    RequestRecord,
    Traffic,
    ask,
    client_of,
)

POLL_SECONDS: Final = 0.5
USAGE: Final = "vllm:kv_cache_usage_perc"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a script is played.

    Args:
        base_url: Without a slash at its end.
        model: As the server calls it.
        can_reset: Whether its prefix cache can be emptied before a play. Where not, each play has a
            cache salt of its own, and hits nothing of another one.
    """

    base_url: str
    model: str
    vocabulary: Vocabulary
    can_reset: bool


@dataclass(frozen=True, slots=True)
class Played:
    """
    Args:
        records: In the order in which they were sent.
        seconds: From the first request to the last answer.
        peak_usage: Of the KV cache by running requests, a share of 1; 0.0 unless polled.
    """

    records: tuple[RequestRecord, ...]
    seconds: float
    peak_usage: float


class Player:
    """Plays one script once.

    Args:
        prefix: Of session ids: no two plays may share a session. The cache salt, if one is needed.
        on_request_done: Called after each answer.
        polls: Whether the cache's usage is asked for while the load runs, which the server pays.
    """

    def __init__(
        self,
        script: Script,
        target: Target,
        voice: Voice,
        prefix: str,
        on_request_done: Callable[[], None],
        *,
        polls: bool,
    ) -> None:
        self._script = script
        self._target = target
        self._voice = voice
        self._prefix = prefix
        # vLLM takes no slash in a salt.
        self._salt = None if target.can_reset else prefix.replace("/", ".")
        self._polls = polls
        self._on_request_done = on_request_done
        self._slots = asyncio.Semaphore(script.slots) if script.slots else None
        self._records: list[RequestRecord] = []
        self._peak_usage = 0.0
        self._began = 0.0
        text = Text(target.vocabulary)
        # Text is made before the clock starts: a core that makes it is taken from the server.
        self._texts = {
            (actor.name, number): list(text.of_all(turn.pieces))
            for actor in script.actors
            for number, turn in enumerate(actor.turns)
        }

    def play(self) -> Played:
        """
        Raises:
            LoadError: A request failed.
        """
        try:
            asyncio.run(self._play())
        except* (httpx.HTTPError, LoadError) as failures:
            first = failures.exceptions[0]
            raise LoadError(str(first) or type(first).__name__) from failures
        records = tuple(sorted(self._records, key=lambda record: record.sent))
        seconds = max(r.finished for r in records) - min(r.sent for r in records)
        return Played(records, seconds, self._peak_usage)

    async def _play(self) -> None:
        async with client_of(self._target.base_url) as client:
            self._began = time.monotonic()
            polling = asyncio.create_task(self._watch_usage(client))
            try:
                async with asyncio.TaskGroup() as tasks:
                    for actor in self._script.actors:
                        tasks.create_task(self._act(client, actor))
            finally:
                polling.cancel()
                with suppress(asyncio.CancelledError):
                    await polling

    async def _act(self, client: httpx.AsyncClient, actor: Actor) -> None:
        await asyncio.sleep(max(0.0, self._began + actor.starts_at - time.monotonic()))
        context: list[int] = []
        for number, turn in enumerate(actor.turns):
            if turn.gap_seconds:
                await asyncio.sleep(turn.gap_seconds)
            text = self._texts[actor.name, number]
            context = [*context, *text] if turn.keeps_context else text
            question = Question(
                actor.traffic,
                f"{actor.name}/turn-{number}",
                number,
                tuple(context),
                turn.reply_tokens,
                hint=self._hint(actor, number, turn),
                model=self._target.model,
                cache_salt=self._salt,
            )
            limited = self._slots if actor.traffic is Traffic.AGENTS else None
            async with limited or nullcontext():
                answer = await ask(client, question, self._began)
            self._records.append(answer.record)
            self._on_request_done()
            context = [*context, *answer.token_ids]
        if actor.traffic is Traffic.AGENTS and self._voice.evicts:
            await evict(client, self._session_id(actor), self._salt)

    @property
    def cache_salt(self) -> str | None:
        return self._salt

    @property
    def session_ids(self) -> list[str]:
        return [self._session_id(actor) for actor in self._script.of(Traffic.AGENTS)]

    def _session_id(self, actor: Actor) -> str:
        return f"{self._prefix}/{actor.name}"

    def _hint(self, actor: Actor, number: int, turn: Turn) -> dict[str, Any] | None:
        if actor.traffic is not Traffic.AGENTS or not self._voice.names_session:
            return None
        hint: dict[str, Any] = {"session_id": self._session_id(actor)}
        said = self._voice.ttl
        if said is TtlSaid.EVERY_TURN or (said is TtlSaid.FIRST_TURN and number == 0):
            hint["cache_control"] = {"type": "ephemeral", "ttl": turn.ttl_seconds}
        return hint

    async def _watch_usage(self, client: httpx.AsyncClient) -> None:
        while self._polls:
            await asyncio.sleep(POLL_SECONDS)
            with suppress(httpx.HTTPError):
                text = (await client.get("/metrics")).text
                self._peak_usage = max(self._peak_usage, usage_in(text))


def usage_in(metrics_text: str) -> float:
    """The fullest engine's share; looks for one name only, since it runs beside the load."""
    values = [
        float(line.rpartition(" ")[2])
        for line in metrics_text.splitlines()
        if line.startswith(USAGE)
    ]
    return max(values, default=0.0)


def session_path(session_id: str) -> str:
    return f"/v1/agent_hint/sessions/{quote(session_id, safe='')}"


async def evict(client: httpx.AsyncClient, session_id: str, cache_salt: str | None) -> None:
    """
    Raises:
        LoadError: The server refused it.
    """
    body: dict[str, Any] = {"edits": [{"type": "evict"}]}
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    response = await client.post(session_path(session_id), json=body)
    if response.status_code != httpx.codes.OK:
        raise LoadError(f"evict: HTTP {response.status_code}: {response.text[:500]}")
