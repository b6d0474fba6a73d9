"""``/v1/completions``."""

from collections.abc import Callable
from typing import Any, ClassVar, Final

from vllm_agent_hint.frontend.carry import hint_in_body
from vllm_agent_hint.frontend.choices import ChoicesDoor
from vllm_agent_hint.frontend.doors import arguments, pass_hinted
from vllm_agent_hint.frontend.own_prompt import Rendered
from vllm_agent_hint.frontend.reading import find_hint


def create_completion(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``OpenAIServingCompletion.create_completion(request, raw_request=None)``, a coroutine.

    The same as for chat.
    """
    request, _ = arguments(args, kwargs)
    xargs = getattr(request, "vllm_xargs", None)
    unread = find_hint(hint_in_body(request), getattr(request, "session_id", None), xargs)
    if unread is None:
        return wrapped(*args, **kwargs)
    return pass_hinted(_DOOR, unread, wrapped, instance, args, kwargs)


class CompletionDoor(ChoicesDoor):
    """A text after each of any number of prompts."""

    id_prefix: ClassVar[str] = "cmpl"
    chunk_object: ClassVar[str] = "text_completion"

    def engine_requests(self, request: Any) -> int:
        prompts = _count_prompts(request.prompt) + _count_prompts(request.prompt_embeds)
        return (request.n or 1) * max(prompts, 1)

    async def rendered(self, serving: Any, request: Any) -> Any:
        inputs = await serving.online_renderer.render_completion(request, skip_mm_cache=True)
        if getattr(inputs, "error", None) is not None:
            return inputs
        return Rendered(inputs, serving._maybe_get_adapters(request))

    def response(self, content: dict[str, Any]) -> Any:
        from vllm.entrypoints.openai.completion.protocol import CompletionResponse

        return CompletionResponse.model_validate(content)

    def empty_choices(self, request: Any) -> list[dict[str, Any]]:
        return self.empty_deltas()

    def empty_deltas(self) -> list[dict[str, Any]]:
        return [{"index": 0, "text": "", "finish_reason": "stop"}]


def _count_prompts(prompt: Any) -> int:
    """A list of tokens is one prompt, any other list as many as it holds."""
    if prompt is None:
        return 0
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        return len(prompt)
    return 1


_DOOR: Final = CompletionDoor()
