"""Servers that stand already, such as on a GPU: the same loads, in sizes that suit them."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx

from vllm_agent_hint.cli.bench.serve.arms import STOCK, Arm, WishError
from vllm_agent_hint.cli.bench.serve.local import DEMO_VOCABULARY
from vllm_agent_hint.cli.bench.serve.play import Target
from vllm_agent_hint.cli.bench.serve.scale import RFC_LONGEST_PROMPT, Scale
from vllm_agent_hint.cli.bench.serve.script import Extent, Piece, Vocabulary
from vllm_agent_hint.cli.bench.serve.stage import Stage
from vllm_agent_hint.cli.demo.client import (
    LoadError,
    Question,
    RequestRecord,
    Traffic,
    ask,
    client_of,
)
from vllm_agent_hint.cli.demo.metrics import Metrics

USUAL_VOCABULARY: Final = Vocabulary(1_000, 30_000)
CONTEXT_PART: Final = 0.9
"""Of the longest context that the server takes: the answers need room."""
PROBE_TOKENS: Final = 4_000
CACHE_INFO: Final = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class Standing:
    """What a server says of itself.

    Args:
        cache_tokens: 0 where it doesn't tell.
        prefill_rate: Prompt tokens per second, measured.
    """

    target: Target
    max_model_len: int
    cache_tokens: int
    prefill_rate: float


@dataclass(frozen=True, slots=True)
class Urls:
    """
    Args:
        ours: A server with the plugin.
        stock: One without; None: what is unhinted on ours is the reference.
        model: As both call it; None: the first that they serve.
        cache_tokens: Overrides what they say.
    """

    ours: str
    stock: str | None
    model: str | None
    cache_tokens: int | None


class StandingServers:
    """Looks at the servers once.

    Raises:
        LoadError: One does not answer, or leaves out what a figure needs; with the cure.
    """

    def __init__(self, urls: Urls) -> None:
        self._ours = look_at(urls.ours, urls.model)
        self._stock = look_at(urls.stock, urls.model) if urls.stock else None
        self._cache_tokens = urls.cache_tokens

    @property
    def _all(self) -> list[Standing]:
        return [self._ours, *([self._stock] if self._stock else [])]

    def scale(self) -> Scale:
        """That of the smaller server.

        Raises:
            WishError: Nobody knows the size of the cache.
        """
        cache = self._cache_tokens or min(server.cache_tokens for server in self._all)
        if not cache:
            raise WishError(
                "--url: the server does not say how large its KV cache is; give it "
                "with --cache-tokens"
            )
        longest = min(round(server.max_model_len * CONTEXT_PART) for server in self._all)
        prompt = min(RFC_LONGEST_PROMPT, longest)
        return Scale(
            prompt,
            prompt,
            min(server.prefill_rate for server in self._all),
            cache,
        )

    def notes(self) -> list[str]:
        """For the reader of the report."""
        notes = []
        if not all(server.target.can_reset for server in self._all):
            notes.append(
                "The prefix cache could not be emptied between plays (VLLM_SERVER_DEV_MODE=1 opens "
                "the route): each starts in a cache full of the one before, under a cache salt of "
                "its own, the other's sessions freed."
            )
        sizes = {server.cache_tokens for server in self._all}
        if len(sizes) > 1:
            notes.append(
                f"The servers' caches differ: {', '.join(f'{s:,}' for s in sorted(sizes))} tokens."
            )
        return notes

    def check(self, arms: Sequence[Arm]) -> None:
        """
        Raises:
            WishError: An arm can't be played to these servers.
        """
        for arm in arms:
            self._server_of(arm)

    def target_of(self, arm: Arm) -> Target:
        return self._server_of(arm).target

    @contextmanager
    def open_stage(self, arm: Arm, extent: Extent) -> Iterator[Stage]:
        """See ``OpenStage``."""
        server = self._server_of(arm)
        if extent.longest_request > server.max_model_len:
            raise LoadError(
                f"{server.target.base_url}: takes {server.max_model_len} tokens, and the load has "
                f"a request of {extent.longest_request}"
            )
        yield Stage(arm, server.target, server.cache_tokens, None)

    def _server_of(self, arm: Arm) -> Standing:
        if arm.name == STOCK and self._stock is not None:
            return self._stock
        if arm.environment or arm.holds_everything:
            raise WishError(
                f"--arm {arm.name}: needs a server of its own"
                + (
                    ", given with --url-stock"
                    if arm.name == STOCK
                    else "; start one with its flags, and give it with --url and --arm hints"
                )
            )
        return self._ours


def look_at(base_url: str, model: str | None) -> Standing:
    """
    Raises:
        LoadError: With the cure.
    """
    base_url = base_url.rstrip("/")
    try:
        with httpx.Client(base_url=base_url, timeout=60, trust_env=False) as client:
            served = client.get("/v1/models").raise_for_status().json()["data"]
            metrics = Metrics.parse(client.get("/metrics").raise_for_status().text)
            can_reset = client.post("/reset_prefix_cache").status_code == httpx.codes.OK
    except (httpx.HTTPError, KeyError, ValueError) as error:
        raise LoadError(f"{base_url}: does not answer like vLLM: {error}") from None
    card = _card(served, model, base_url)
    max_model_len = int(card.get("max_model_len") or 0)
    if not max_model_len:
        raise LoadError(f"{base_url}: /v1/models says no max_model_len")
    length = min(PROBE_TOKENS, max_model_len // 2)
    vocabulary, seconds = asyncio.run(_probe(base_url, card["id"], length))
    return Standing(
        Target(base_url, card["id"], vocabulary, can_reset),
        max_model_len,
        cache_tokens_in(metrics),
        length / seconds,
    )


def _card(served: list[Mapping[str, Any]], model: str | None, base_url: str) -> Mapping[str, Any]:
    for card in served:
        if model in (None, card["id"]):
            return card
    names = ", ".join(str(card["id"]) for card in served)
    raise LoadError(f"{base_url}: serves no model of that name, but {names}")


def cache_tokens_in(metrics: Metrics) -> int:
    """Of all engines together; 0 if they don't tell."""
    total = 0
    for sample in metrics.samples:
        if sample.name == CACHE_INFO:
            block, blocks = (sample.labels.get(k, "") for k in ("block_size", "num_gpu_blocks"))
            if block.isdigit() and blocks.isdigit():
                total += int(block) * int(blocks)
    return total


async def _probe(base_url: str, model: str, length: int) -> tuple[Vocabulary, float]:
    """Which tokens it takes, and how many seconds a prompt of them takes that nobody has sent.

    Raises:
        LoadError: It does not say what was cached.
    """
    async with client_of(base_url) as client:
        vocabulary = USUAL_VOCABULARY
        try:
            await _ask(client, model, vocabulary, 8)
        except LoadError:
            vocabulary = DEMO_VOCABULARY
            await _ask(client, model, vocabulary, 8)
        seconds = []
        for _ in range(3):  # The first one pays for more than itself.
            asked = await _ask(client, model, vocabulary, length)
            seconds.append(asked.record.ttft)
        again = await ask(client, asked.question, 0.0)
    if not again.record.cached_tokens:
        raise LoadError(
            f"{base_url}: does not say how much of a prompt was cached. Cure: start it with "
            "--enable-prompt-tokens-details, and with prefix caching on"
        )
    return vocabulary, min(seconds)


@dataclass(frozen=True, slots=True)
class _Asked:
    question: Question
    record: RequestRecord


async def _ask(
    client: httpx.AsyncClient, model: str, vocabulary: Vocabulary, length: int
) -> _Asked:
    prompt = tuple(vocabulary.text_of(Piece(f"probe/{time.time_ns()}", length)))
    question = Question(Traffic.ONE_SHOT, "probe", 0, prompt, 4, model=model)
    return _Asked(question, (await ask(client, question, 0.0)).record)
