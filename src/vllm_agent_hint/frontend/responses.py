"""``/v1/responses``."""

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from vllm_agent_hint.frontend.carry import as_client_error, hint_in_body
from vllm_agent_hint.frontend.doors import arguments, pass_hinted
from vllm_agent_hint.frontend.management import EmptyTurn
from vllm_agent_hint.frontend.own_prompt import Rendered
from vllm_agent_hint.frontend.reading import find_hint
from vllm_agent_hint.frontend.witnesses import ResponsesWitness
from vllm_agent_hint.hints import HINT_KEY, HintError

_COMPLETED: Final = "response.completed"
_RUN_BY_THE_CLIENT: Final = ("function", "custom", "namespace")
_BUILT_IN_TOOLS_CURE: Final = (
    "edits can't wait for tools that the server runs, since nobody knows how many turns they take; "
    "send the edits on their own with manage_request: true"
)


def create_responses(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``OpenAIServingResponses.create_responses(request, raw_request=None)``, a coroutine.

    The same as for chat, but that its streams are events, which the router writes.
    """
    request, _ = arguments(args, kwargs)
    xargs = getattr(request, "vllm_xargs", None)
    unread = find_hint(hint_in_body(request), getattr(request, "session_id", None), xargs)
    if unread is None:
        return wrapped(*args, **kwargs)
    return pass_hinted(_DOOR, unread, wrapped, instance, args, kwargs)


class ResponsesDoor:
    """A response; an empty one has no output items."""

    def engine_requests(self, request: Any) -> int:
        """One. Built-in tools make more of it, turn by turn, but then no edits wait for them."""
        return 1

    def streams(self, request: Any) -> bool:
        return bool(request.stream)

    def check_edits_can_follow(self, serving: Any, request: Any) -> None:
        if getattr(serving, "tool_server", None) is None:
            return
        if any(tool.type not in _RUN_BY_THE_CLIENT for tool in request.tools or ()):
            raise HintError("tools", _BUILT_IN_TOOLS_CURE)

    def refusal(self, serving: Any, error: HintError) -> Any:
        raise as_client_error(error) from None

    def with_report(self, reply: Any, report: dict[str, Any]) -> Any:
        """In the background, the report is on the response that says ``queued``, too."""
        if hasattr(reply, "__aiter__"):
            return _report_on_completion(reply, report)
        if getattr(reply, "error", None) is None:
            setattr(reply, HINT_KEY, report)
        return reply

    async def rendered(self, serving: Any, request: Any) -> Any:
        """As stock, with the turns before that it has stored."""
        wrong = serving._validate_create_responses_input(request)
        if wrong is not None:
            return wrong
        before = None
        if request.previous_response_id is not None:
            async with serving.response_store_lock:
                before = serving.response_store.get(request.previous_response_id)
            if before is None:
                return serving._make_not_found_error(request.previous_response_id)
        result = await serving._render_resolved_response_inputs(request, before, skip_mm_cache=True)
        if getattr(result, "error", None) is not None:
            return result
        return Rendered([result.engine_input], serving._maybe_get_adapters(request))

    def witness(self, request: Any, *, can_tell: bool) -> ResponsesWitness:
        return ResponsesWitness(can_tell=can_tell)

    def empty_reply(self, turn: EmptyTurn, report: dict[str, Any]) -> Any:
        response = _empty_response(turn, int(time.time()), "completed")
        setattr(response, HINT_KEY, report)
        return response

    def empty_events(self, turn: EmptyTurn, report: dict[str, Any]) -> list[Any]:
        from vllm.entrypoints.openai.responses import protocol

        created_at = int(time.time())
        begun = _empty_response(turn, created_at, "in_progress")
        done = _empty_response(turn, created_at, "completed")
        completed = protocol.ResponseCompletedEvent(
            type=_COMPLETED, sequence_number=2, response=done
        )
        return [
            protocol.ResponseCreatedEvent(
                type="response.created", sequence_number=0, response=begun
            ),
            protocol.ResponseInProgressEvent(
                type="response.in_progress", sequence_number=1, response=begun
            ),
            completed.model_copy(update={HINT_KEY: report}),
        ]


async def _report_on_completion(
    stock: AsyncGenerator[Any, None], report: dict[str, Any]
) -> AsyncGenerator[Any, None]:
    """A copy of the event that ends the response has the report: the store keeps stock's own."""
    try:
        async for event in stock:
            if getattr(event, "type", None) == _COMPLETED:
                event = event.model_copy(update={HINT_KEY: report})
            yield event
    finally:
        await stock.aclose()


def _empty_response(turn: EmptyTurn, created_at: int, status: str) -> Any:
    from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
    from vllm.sampling_params import SamplingParams

    # What stock would refuse only once the model has run: a response has no null in these places.
    request = turn.request.model_copy(
        update={"background": False, "truncation": turn.request.truncation or "disabled"}
    )
    usage = None
    if status == "completed":
        usage = {
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 0,
        }
    return ResponsesResponse.from_request(
        request,
        SamplingParams(max_tokens=1),
        model_name=turn.model,
        created_time=created_at,
        output=[],
        status=status,
        usage=usage,
    )


_DOOR: Final = ResponsesDoor()
