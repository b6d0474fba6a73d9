"""The prompts of a management request: rendered as those of any request, and never run.

A session that an engine has never seen may have its content in a store all the same, saved by
another server. A prefetch finds it by the hashes of the prompt with which the session will be
back, if the client sends that along. Rendering is vLLM's own, with its own errors: template,
tokenizer, LoRA adapter, multimodal items and limits are those of the request that will follow.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from vllm_agent_hint.frontend.fail_open import name_once
from vllm_agent_hint.hints import AgentHintParams, EditType
from vllm_agent_hint.settings import load_settings

_PROMPT_FIELDS: Final = (
    *("messages", "system"),
    *("prompt", "prompt_embeds"),
    *("input", "instructions", "previous_response_id"),
)
"""Where the bodies of the APIs have what is rendered."""
_LABELS: Final = ("role", "type")
"""What says something of a message's text and is none itself."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The prompts of a body.

    Args:
        inputs: vLLM's engine inputs, one per prompt.
        lora: Its LoRA request for all of them, or None.
    """

    inputs: Sequence[Any]
    lora: Any


class Renders(Protocol):
    """How one API makes prompts of its bodies."""

    async def rendered(self, serving: Any, request: Any) -> Any:
        """A ``Rendered``, or vLLM's error response.

        The cache of multimodal items is left alone: the engine has a mirror of it, and does not
        get these.
        """


async def render_own_prompts(
    door: Renders, serving: Any, request: Any, hint: AgentHintParams
) -> Any:
    """What a body's prompts are to the engine.

    Args:
        door: The API's.
        serving: vLLM's handler of the API.
        request: The body, as vLLM parsed it. It is left as it was.
        hint: What the body asks for.

    Returns:
        A list of plain data, one item per prompt, or vLLM's error response. No more than a session
        may run side by side: an engine hashes and keeps them. Empty where nothing is to be
        prefetched, or nowhere from; where the body says nothing, as the RFC's own example of a
        prefetch does; and where this vLLM renders in another way than expected.

    Raises:
        Exception: What the client has to correct, as vLLM raises it for any request.
    """
    try:
        if not (_wants_prefetch(hint) and _has_connector(serving) and _says_something(request)):
            return []
        found = await door.rendered(serving, request.model_copy())
        if not isinstance(found, Rendered):
            return found
        inputs = found.inputs[: load_settings().max_lineages]
        requests = [_as_engine_request(serving, each, found.lora) for each in inputs]
        return [plain for each in requests if (plain := _as_plain(each)) is not None]
    except Exception as error:
        if _is_the_clients(serving, error):
            raise
        name_once("rendering the prompt of a prefetch failed; it goes by the session's manifest")
        return []


def _wants_prefetch(hint: AgentHintParams) -> bool:
    return any(EditType(edit.type) is EditType.PREFETCH for edit in hint.edits)


def _has_connector(serving: Any) -> bool:
    """Without one a prefetch is `unsupported`, whatever the prompt."""
    config = getattr(serving.engine_client, "vllm_config", None)
    has_one = getattr(config, "kv_transfer_config", None) is not None
    return has_one and load_settings().pooling


def _says_something(request: Any) -> bool:
    return any(_has_text(getattr(request, name, None)) for name in _PROMPT_FIELDS)


def _has_text(value: Any) -> bool:
    if value is None or isinstance(value, (str, bytes)):
        return bool(value)
    if hasattr(value, "model_fields_set"):
        value = dict(value)
    if isinstance(value, Mapping):
        return any(_has_text(each) for name, each in value.items() if name not in _LABELS)
    return not isinstance(value, Sequence) or any(map(_has_text, value))


def _as_engine_request(serving: Any, engine_input: Any, lora: Any) -> Any:
    """vLLM's ``EngineCoreRequest``. Its length, its tokens and its adapter are checked on the way.

    The name is never used: the request ends here.
    """
    from vllm.sampling_params import SamplingParams

    return serving.engine_client.input_processor.process_inputs(
        "agent-hint-own-prompt",
        engine_input,
        SamplingParams(max_tokens=1),
        ("generate",),
        lora_request=lora,
    )


def _as_plain(request: Any) -> dict[str, Any] | None:
    """All that makes the block hashes of a request, for msgpack; None for a prompt of embeddings,
    whose hashes are made of what is too much to send along.
    """
    import msgspec

    if request.prompt_embeds is not None:
        return None
    lora = request.lora_request
    return {
        # Many may have to wait: four bytes for each token.
        "token_ids": array("I", request.prompt_token_ids).tobytes(),
        "cache_salt": request.cache_salt,
        "lora": None if lora is None else msgspec.to_builtins(lora),
        "items": [
            [item.identifier, item.mm_position.offset, item.mm_position.length]
            for item in request.mm_features or ()
        ],
    }


def _is_the_clients(serving: Any, error: Exception) -> bool:
    """Whether vLLM would answer an error with a 400. What is called with the wrong arguments is
    called by us, and not as this vLLM expects it.
    """
    if isinstance(error, TypeError):
        return False
    return int(serving.create_error_response(error).error.code) < 500
