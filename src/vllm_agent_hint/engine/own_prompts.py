"""What a prompt that never runs would leave in a cache.

The front end has rendered it (``frontend.own_prompt``); it is hashed here, since the hashes of an
engine begin with a secret of its process unless ``PYTHONHASHSEED`` is set.
"""

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from vllm_agent_hint.pooling.capability import Content


class PromptHasher:
    """Hashes prompts as the engine core hashes those of requests.

    Args:
        scheduler: vLLM's.
    """

    def __init__(self, scheduler: Any) -> None:
        self._unit = int(scheduler.kv_cache_manager.block_pool.hash_block_size)
        algorithm = scheduler.vllm_config.cache_config.prefix_caching_hash_algo
        self._hasher = get_request_block_hasher(self._unit, get_hash_fn_by_name(algorithm))

    def begin(self, plain: Mapping[str, Any], *, needs_tokens: bool) -> "PromptInHashing":
        """Prepare to hash a prompt; nothing is hashed yet.

        Args:
            plain: As ``frontend.own_prompt`` sends it.
            needs_tokens: Whether the tokens are wanted with the hashes.
        """
        return PromptInHashing(plain, self._unit, self._hasher, needs_tokens=needs_tokens)


class PromptInHashing:
    """A prompt that is being hashed, its first blocks first.

    To vLLM it is a request that grows, as one does whose tokens are being made: with each slice
    it hashes the blocks that have become whole.

    Args:
        plain: As ``frontend.own_prompt`` sends it.
        unit: Tokens per hash.
        hasher: vLLM's.
        needs_tokens: Whether the tokens are wanted with the hashes.
    """

    def __init__(
        self, plain: Mapping[str, Any], unit: int, hasher: Any, *, needs_tokens: bool
    ) -> None:
        self._unit = unit
        self._prompt = array("I")
        self._prompt.frombytes(plain["token_ids"])
        self._end = len(self._prompt) // unit * unit
        """What lies behind it fills no block."""
        self._done = 0
        self._tokens = array("I") if needs_tokens else None
        items = [
            MultiModalFeatureSpec(
                data=None,
                modality="",
                identifier=identifier,
                mm_position=PlaceholderRange(offset, length),
            )
            for identifier, offset, length in plain["items"]
        ]
        items_end = max((offset + length for _, offset, length in plain["items"]), default=0)
        self._uncut = -(-items_end // unit) * unit
        """Tokens that are hashed in one go. How vLLM finds the item with which it goes on within a
        prompt differs from version to version; behind the last there is none to find."""
        self._request = Request(
            request_id="agent-hint-own-prompt",
            prompt_token_ids=[],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            mm_features=items,
            lora_request=None
            if plain["lora"] is None
            else msgspec.convert(plain["lora"], LoRARequest),
            cache_salt=plain["cache_salt"],
            block_hasher=hasher,
        )

    @property
    def is_done(self) -> bool:
        return self._done == self._end

    def go_on(self, num_tokens: int) -> int:
        """Hash the next blocks. Some microseconds for each.

        Args:
            num_tokens: For how many tokens; a block at least, and whole ones only.

        Returns:
            How many they were; 0 where nothing is left.
        """
        begin = self._done
        end = begin + max(1, num_tokens // self._unit) * self._unit
        self._done = min(max(end, self._uncut), self._end)
        part = self._prompt[begin : self._done]
        self._request.append_output_token_ids(part.tolist())
        if self._tokens is not None:
            self._tokens.extend(part)
        return self._done - begin

    def content(self) -> Content:
        """All that has been hashed."""
        request = self._request
        return Content(
            request.block_hashes,
            self._unit,
            request.cache_salt,
            request.lora_request,
            self._tokens,
        )
