"""vLLM's real scheduler and KV cache manager without a model, for measuring them."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE: Final = 16
MAX_MODEL_LEN: Final = 262_144
SAMPLED_TOKEN: Final = 7

init_none_hash(sha256)
_hasher = get_request_block_hasher(BLOCK_SIZE, sha256)


def full_attention() -> list[Any]:
    """One KV cache group of full attention."""
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return [spec]


def cache_config_of(specs: Sequence[Any], num_blocks: int) -> KVCacheConfig:
    """One KV cache group per spec over a pool of ``num_blocks``."""
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def build_scheduler(
    scheduler_cls: Any,
    specs: Sequence[Any],
    *,
    num_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    asynchronous: bool = False,
    enable_caching: bool = True,
    mamba_cache_mode: str | None = None,
    kv_transfer_config: Any = None,
) -> Any:
    """Construct a scheduler class as the engine core does.

    Args:
        scheduler_cls: Stock's, or one with the mixin laid over it.
        specs: One KV cache spec per group.
        num_blocks: Size of the block pool, the null block included.
        max_num_seqs: Requests that run at once.
        max_num_batched_tokens: Tokens per step; small values chunk prefills.
        asynchronous: Async scheduling.
        enable_caching: Prefix caching.
        mamba_cache_mode: For specs with state.
        kv_transfer_config: vLLM's, for a KV connector.
    """
    model_config = ModelConfig(
        model=_model_folder(),
        skip_tokenizer_init=True,
        dtype="float16",
        seed=0,
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
    )
    cache_config = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=enable_caching)
    if mamba_cache_mode is not None:
        cache_config.mamba_cache_mode = mamba_cache_mode
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            async_scheduling=asynchronous,
            is_encoder_decoder=False,
        ),
        model_config=model_config,
        cache_config=cache_config,
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(),
        kv_transfer_config=kv_transfer_config,
    )
    cache_config.num_gpu_blocks = num_blocks
    return scheduler_cls(
        vllm_config=config,
        kv_cache_config=cache_config_of(specs, num_blocks),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )


@cache
def _model_folder() -> str:
    """A folder of this process's own, with a config that the scheduler reads and no weights."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-agent-hint-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "vocab_size": 1024,
        "max_position_embeddings": MAX_MODEL_LEN,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def build_request(
    request_id: str,
    tokens: Sequence[int],
    *,
    max_tokens: int,
    extra_args: dict[str, Any] | None = None,
    cache_salt: str | None = None,
) -> Request:
    """A request as the engine core hands it to the scheduler, its prompt hashed."""
    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args
        ),
        pooling_params=None,
        block_hasher=_hasher,
        cache_salt=cache_salt,
    )


def model_output(request_ids: Sequence[str], sampled: Sequence[Sequence[int]]) -> ModelRunnerOutput:
    """What a model runner returns for a step.

    Args:
        request_ids: Those that were scheduled.
        sampled: Their new tokens.
    """
    return ModelRunnerOutput(
        req_ids=list(request_ids),
        req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
        sampled_token_ids=[list(tokens) for tokens in sampled],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
