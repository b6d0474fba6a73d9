"""Servers that the bench starts: each arm on a ``vllm serve`` of its own, on loopback."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_agent_hint.cli.bench.serve.arms import Arm
from vllm_agent_hint.cli.bench.serve.clock_file import ENV_FILE, lay_out
from vllm_agent_hint.cli.bench.serve.play import Target
from vllm_agent_hint.cli.bench.serve.script import Extent, Vocabulary
from vllm_agent_hint.cli.bench.serve.stage import OpenStage, Stage
from vllm_agent_hint.cli.demo.load import FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN
from vllm_agent_hint.cli.demo.server import MODEL_NAME, running_server

DEMO_VOCABULARY: Final = Vocabulary(FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN)
ROOM_FOR_EVERYTHING: Final = 1.3
"""Whole blocks per request, and what runs."""
CLOCKED: Final = "vllm_agent_hint.cli.bench.serve.clock"


@dataclass(frozen=True, slots=True)
class Stand:
    """What every server that we start has in common.

    Args:
        folder: For logs.
        environment: Without what arms differ by.
        dtype: In float32 a greedy answer does not depend on how its prompt was batched, so every
            arm is asked the same prompts.
        is_async: Whether vLLM's async scheduler is the default here.
    """

    model: Path
    folder: Path
    environment: Mapping[str, str]
    dtype: str
    block_size: int
    is_async: bool


def local_stages(stand: Stand, load: str) -> OpenStage:
    """Each arm on a ``vllm serve`` of its own, in the cache that the script was written for."""

    @contextmanager
    def open_stage(arm: Arm, extent: Extent) -> Iterator[Stage]:
        tokens = extent.cache_tokens
        if arm.holds_everything:
            tokens = max(tokens, round(extent.total_tokens * ROOM_FOR_EVERYTHING))
        blocks = max(tokens, extent.longest_request + stand.block_size) // stand.block_size + 1
        clock = stand.folder / "clocks" / f"{load}-{arm.name}"
        lay_out(clock)
        scheduler = "ClockedAsyncScheduler" if stand.is_async else "ClockedScheduler"
        arguments = [
            *("--dtype", stand.dtype, "--block-size", str(stand.block_size)),
            *("--max-model-len", str(extent.longest_request + stand.block_size)),
            *("--num-gpu-blocks-override", str(blocks)),
            *("--scheduler-cls", f"{CLOCKED}.{scheduler}"),
        ]
        # Dev mode opens /reset_prefix_cache, on loopback.
        environment = {
            **stand.environment,
            **arm.environment,
            ENV_FILE: str(clock.resolve()),
            "VLLM_SERVER_DEV_MODE": "1",
        }
        log = stand.folder / "logs" / f"{load}-{arm.name}.log"
        with running_server(stand.model, log, environment, arguments) as server:
            target = Target(server.base_url, MODEL_NAME, DEMO_VOCABULARY, can_reset=True)
            yield Stage(arm, target, blocks * stand.block_size, clock)

    return open_stage
