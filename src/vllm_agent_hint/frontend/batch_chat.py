"""``/v1/chat/completions/batch``: several conversations in one request, never streamed."""

from collections.abc import Callable
from typing import Any, Final

from vllm_agent_hint.frontend.carry import hint_in_body
from vllm_agent_hint.frontend.chat import ChatDoor, empty_choice, rendered_chat
from vllm_agent_hint.frontend.doors import arguments, pass_hinted
from vllm_agent_hint.frontend.own_prompt import Rendered
from vllm_agent_hint.frontend.reading import find_hint


def create_batch_chat_completion(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``OpenAIServingChatBatch.create_batch_chat_completion(request, raw_request=None)``.

    Stock: makes a chat request of each conversation, extra fields included, and one reply of all.
    Ours: the same as for chat; the hint is one for all conversations. ``session_id`` and
    ``vllm_xargs`` are extra fields here.
    If it moves: hints in batches are read when the engine is asked, and nothing is reported.
    """
    request, _ = arguments(args, kwargs)
    xargs = getattr(request, "vllm_xargs", None)
    unread = find_hint(
        hint_in_body(request),
        getattr(request, "session_id", None),
        xargs if isinstance(xargs, dict) else None,
    )
    if unread is None:
        return wrapped(*args, **kwargs)
    return pass_hinted(_DOOR, unread, wrapped, instance, args, kwargs)


class BatchChatDoor(ChatDoor):
    """A turn of each of several conversations: a choice and an engine request for each."""

    def engine_requests(self, request: Any) -> int:
        return len(request.messages)

    async def rendered(self, serving: Any, request: Any) -> Any:
        inputs: list[Any] = []
        for messages in request.messages:
            one = request.to_chat_completion_request(messages)
            found = await rendered_chat(serving, one)
            if not isinstance(found, Rendered):
                return found
            inputs += found.inputs
        lora = serving._maybe_get_adapters(request, supports_default_mm_loras=True)
        return Rendered(inputs, lora)

    def streams(self, request: Any) -> bool:
        """Its request class has no such field; a client may have sent one all the same."""
        return False

    def empty_choices(self, request: Any) -> list[dict[str, Any]]:
        return [empty_choice(index) for index in range(len(request.messages))]


_DOOR: Final = BatchChatDoor()
