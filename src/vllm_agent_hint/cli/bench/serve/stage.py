"""A server that an arm is played to, and what is done to it beside the load."""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import httpx

from vllm_agent_hint.cli.bench.serve.arms import Arm
from vllm_agent_hint.cli.bench.serve.clock_file import Reading, start_round
from vllm_agent_hint.cli.bench.serve.play import Target, session_path
from vllm_agent_hint.cli.bench.serve.script import Extent, Piece
from vllm_agent_hint.cli.demo.client import LoadError, Question, Traffic, ask, client_of
from vllm_agent_hint.cli.demo.metrics import Metrics

RESET_ATTEMPTS: Final = 20
RESET_PAUSE_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class Stage:
    """A server that an arm is played to.

    Args:
        cache_tokens: Its KV cache; 0 if it doesn't tell.
        clock: Where its scheduler's clock shows; None if it has none.
    """

    arm: Arm
    target: Target
    cache_tokens: int
    clock: Path | None

    def start_round(self) -> None:
        if self.clock:
            start_round(self.clock)

    def reading(self) -> Reading | None:
        return Reading.of(self.clock) if self.clock else None

    def metrics(self) -> Metrics:
        response = httpx.get(f"{self.target.base_url}/metrics", timeout=60, trust_env=False)
        return Metrics.parse(response.raise_for_status().text)

    def empty_cache(self) -> None:
        """Where the server lets us: vLLM opens that route in its dev mode only.

        Raises:
            LoadError: It did not, although it should. Something else uses the server.
        """
        if not self.target.can_reset:
            return
        with self._client() as client:
            for _ in range(RESET_ATTEMPTS):  # Blocks of the request that just ended may be held.
                if client.post("/reset_prefix_cache").json().get("success", False):
                    return
                time.sleep(RESET_PAUSE_SECONDS)
        raise LoadError(
            f"{self.target.base_url}: its prefix cache could not be emptied, since requests run "
            "there. Cure: leave the server to the bench"
        )

    def free_sessions(self, session_ids: Iterable[str], cache_salt: str | None) -> None:
        """Nothing of a play may be kept for it while the next one runs."""
        if not self.arm.keeps_sessions:
            return
        named = {} if cache_salt is None else {"cache_salt": cache_salt}
        with self._client() as client:
            for session_id in session_ids:
                client.delete(session_path(session_id), params=named)

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.target.base_url, timeout=60, trust_env=False)


OpenStage: TypeAlias = Callable[[Arm, Extent], AbstractContextManager[Stage]]


def warm_up(target: Target, longest_request: int) -> None:
    """The first requests of a server pay for things that are not ours to measure.

    Raises:
        LoadError: One failed.
    """

    async def send() -> None:
        length = longest_request - 8
        prompts = [
            tuple(target.vocabulary.text_of(Piece(f"warm-up-{number}", length // (number + 1))))
            for number in range(3)
        ]
        async with client_of(target.base_url) as client:
            for number, prompt in enumerate(prompts):
                question = Question(
                    Traffic.ONE_SHOT, f"warm-up-{number}", 0, prompt, 8, model=target.model
                )
                await ask(client, question, 0.0)

    try:
        asyncio.run(send())
    except httpx.HTTPError as error:
        raise LoadError(f"{target.base_url}: {error or type(error).__name__}") from error
