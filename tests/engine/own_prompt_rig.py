"""Prompts that the engine is told beside a prefetch, and two engines over one directory.

They stand for two servers: what one has saved the other has never seen.
"""

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from tests.engine.pooling_rig import PoolingEngine, pooling_engine
from tests.engine.rig import BLOCK, hinted, prompt
from vllm_agent_hint.engine.own_prompts import PromptHasher
from vllm_agent_hint.pooling.capability import Content
from vllm_agent_hint.settings import Settings

WHOLE = 20 * BLOCK
CONTEXT = prompt(1, WHOLE + 3)
RESUME = [*CONTEXT, *prompt(6, 2 * BLOCK)]
ADAPTER = LoRARequest("adapter", 1, "/somewhere")


def plain(
    tokens: Sequence[int],
    *,
    cache_salt: str | None = None,
    lora: LoRARequest | None = None,
    items: Sequence[tuple[str, int, int]] = (),
) -> dict[str, Any]:
    """A prompt as the front end sends it."""
    return {
        "token_ids": array("I", tokens).tobytes(),
        "cache_salt": cache_salt,
        "lora": None if lora is None else msgspec.to_builtins(lora),
        "items": [list(item) for item in items],
    }


def server(directory: Path, **more: Any) -> PoolingEngine:
    return pooling_engine(extra={"directory": str(directory)}, **more)


def saved(directory: Path, session_id: str = "there", ttl: float | None = None) -> PoolingEngine:
    """A server that has parked a context for the others; for its TTL and a minute at least."""
    first = server(directory, settings=Settings(protected_share=1.0, idle_seconds=60.0))
    first.serve(CONTEXT, hint=hinted(session_id, ttl))
    (parked,) = first.done(session_id, "offload")
    assert parked["status"] == "applied", parked
    first.remote.spm.store.manifest.finish()
    return first


def hashed(
    engine: PoolingEngine,
    prompt: dict[str, Any],
    *,
    slices: Iterable[int] = (),
    needs_tokens: bool = False,
) -> Content:
    """What a prompt leaves in a cache, found in slices of so many tokens, the rest in one."""
    hashing = PromptHasher(engine.scheduler).begin(prompt, needs_tokens=needs_tokens)
    for num_tokens in slices:
        hashing.go_on(num_tokens)
    hashing.go_on(len(prompt["token_ids"]))  # Bytes: more than there are tokens.
    assert hashing.is_done
    return hashing.content()


def request_of(
    tokens: Sequence[int],
    *,
    cache_salt: str | None = None,
    lora: LoRARequest | None = None,
    items: Sequence[tuple[str, int, int]] = (),
) -> Request:
    """A request with such a prompt, as vLLM makes it: hashed in one piece."""
    features = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
        for name, offset, length in items
    ]
    return Request(
        "a request",
        list(tokens),
        SamplingParams(max_tokens=1),
        None,
        mm_features=features,
        lora_request=lora,
        cache_salt=cache_salt,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
