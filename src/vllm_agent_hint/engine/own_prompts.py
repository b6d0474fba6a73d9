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

    def content_of(self, plain: Mapping[str, Any], *, needs_tokens: bool) -> Content:
        """A prompt's whole hash blocks. O(tokens), some microseconds for each block.

        Args:
            plain: As ``frontend.own_prompt`` sends it.
            needs_tokens: Whether the tokens are wanted with them.
        """
        lora = None if plain["lora"] is None else msgspec.convert(plain["lora"], LoRARequest)
        items = [
            MultiModalFeatureSpec(
                data=None,
                modality="",
                identifier=identifier,
                mm_position=PlaceholderRange(offset, length),
            )
            for identifier, offset, length in plain["items"]
        ]
        request = Request(
            request_id="agent-hint-own-prompt",
            prompt_token_ids=plain["token_ids"],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            mm_features=items,
            lora_request=lora,
            cache_salt=plain["cache_salt"],
            block_hasher=self._hasher,
        )
        hashes = request.block_hashes
        tokens = array("I", plain["token_ids"][: len(hashes) * self._unit])
        return Content(
            hashes, self._unit, plain["cache_salt"], lora, tokens if needs_tokens else None
        )
