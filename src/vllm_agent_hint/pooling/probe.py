"""Requests that nobody will run, made to ask a connector or to hand it something."""

from typing import Any, Final

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_agent_hint.pooling.capability import Content

PROBE_ID: Final = "agent-hint-probe"


def request_of(content: Content, request_id: str = PROBE_ID, *, priority: int = 0) -> Any:
    """A request with the content as its prompt and one token more: a whole prompt never hits.

    Args:
        content: With its tokens where the connector makes its keys of them.
        request_id: Of its own, unless it is only asked about.
        priority: vLLM's; the lowest number goes first.
    """
    tokens = (
        [0] * content.num_tokens
        if content.token_ids is None
        else list(content.token_ids[: content.num_tokens])
    )
    request = Request(
        request_id=request_id,
        prompt_token_ids=[*tokens, 0],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=content.lora_request,
        cache_salt=content.cache_salt,
        priority=priority,
        block_hasher=None,
    )
    request.block_hashes = list(content.hashes)
    return request
