"""``/v1/chat/completions``."""

from collections.abc import Callable
from typing import Any, ClassVar, Final

from vllm_agent_hint.frontend.carry import carried, hint_in_body
from vllm_agent_hint.frontend.choices import ChoicesDoor
from vllm_agent_hint.frontend.doors import arguments, pass_hinted
from vllm_agent_hint.frontend.own_prompt import Rendered
from vllm_agent_hint.frontend.reading import find_hint


def create_chat_completion(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``OpenAIServingChat.create_chat_completion(request, raw_request=None)``, a coroutine.

    Stock: renders the messages and runs the model; ``agent_hint`` lies unread in the body.
    Ours: sends a request that has a hint through the ``Door``; a look-up or two for all others.
    Anthropic's handler calls it for each of its requests, whose hint has been read by then.
    If it moves: hints in chat bodies go unread, unvalidated too.
    """
    request, _ = arguments(args, kwargs)
    xargs = getattr(request, "vllm_xargs", None)
    unread = find_hint(hint_in_body(request), getattr(request, "session_id", None), xargs)
    if unread is None or carried.get() is not None:
        return wrapped(*args, **kwargs)
    return pass_hinted(_DOOR, unread, wrapped, instance, args, kwargs)


class ChatDoor(ChoicesDoor):
    """A turn of one conversation."""

    id_prefix: ClassVar[str] = "chatcmpl"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def engine_requests(self, request: Any) -> int:
        return request.n or 1

    async def rendered(self, serving: Any, request: Any) -> Any:
        return await rendered_chat(serving, request)

    def response(self, content: dict[str, Any]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

        return ChatCompletionResponse.model_validate(content)

    def empty_choices(self, request: Any) -> list[dict[str, Any]]:
        return [empty_choice(0)]

    def empty_deltas(self) -> list[dict[str, Any]]:
        return [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": "stop"},
        ]


async def rendered_chat(serving: Any, request: Any) -> Any:
    """What ``OpenAIServingChat.render_chat_request`` makes of a chat request, without vLLM's cache
    of multimodal items.
    """
    result = await serving.online_renderer.render_chat(request, skip_mm_cache=True)
    if getattr(result, "error", None) is not None:
        return result
    _, engine_inputs = result
    lora = serving._maybe_get_adapters(request, supports_default_mm_loras=True)
    return Rendered(engine_inputs, lora)


def empty_choice(index: int) -> dict[str, Any]:
    """An assistant that says nothing."""
    message = {"role": "assistant", "content": ""}
    return {"index": index, "message": message, "finish_reason": "stop"}


_DOOR: Final = ChatDoor()
