"""Management requests: edits that run now, answered without the model.

The answer has the shape of the API that the request came through, an empty assistant turn, with
the results in a top-level ``agent_hint``: any OpenAI client can parse it, and nothing but a client
that asks for the results sees a difference.
"""

import time
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any, Final, Protocol

from vllm_agent_hint.frontend.engine_calls import call_engines, edit_call, merge_results
from vllm_agent_hint.frontend.fail_open import name_once
from vllm_agent_hint.hints import AgentHintParams

_NO_USAGE: Final = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


class _Shape(Protocol):
    """How one API spells an answer that says nothing."""

    id_prefix: str

    def whole(self, head: dict[str, Any]) -> Any:
        """The response of a request that isn't streamed."""

    def chunk(self, head: dict[str, Any]) -> Any:
        """One event of a stream."""

    def empty_choice(self) -> dict[str, Any]:
        """The choice of ``whole``."""

    def chunk_choices(self) -> list[dict[str, Any]]:
        """The choice of each chunk; the last one finishes the stream."""


class _Chat:
    id_prefix = "chatcmpl"

    def whole(self, head: dict[str, Any]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

        return ChatCompletionResponse.model_validate(head)

    def chunk(self, head: dict[str, Any]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse

        return ChatCompletionStreamResponse.model_validate(
            {"object": "chat.completion.chunk", **head}
        )

    def empty_choice(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": ""}
        return {"index": 0, "message": message, "finish_reason": "stop"}

    def chunk_choices(self) -> list[dict[str, Any]]:
        return [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": "stop"},
        ]


class _Completion:
    id_prefix = "cmpl"

    def whole(self, head: dict[str, Any]) -> Any:
        from vllm.entrypoints.openai.completion.protocol import CompletionResponse

        return CompletionResponse.model_validate(head)

    def chunk(self, head: dict[str, Any]) -> Any:
        from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse

        return CompletionStreamResponse.model_validate({"object": "text_completion", **head})

    def empty_choice(self) -> dict[str, Any]:
        return {"index": 0, "text": "", "finish_reason": "stop"}

    def chunk_choices(self) -> list[dict[str, Any]]:
        return [self.empty_choice()]


_SHAPES: Final[dict[str, _Shape]] = {"chat": _Chat(), "completion": _Completion()}


async def answer(
    api: str,
    serving: Any,
    request: Any,
    raw_request: Any,
    hint: AgentHintParams,
    operation_id: str,
) -> Any:
    """Run the edits on every engine and answer; nothing is rendered and no model runs.

    Args:
        api: ``"chat"`` or ``"completion"``.
        serving: vLLM's ``OpenAIServingChat`` or ``OpenAIServingCompletion``.
        request: The body, as vLLM parsed it.
        raw_request: FastAPI's request, or ``None``.
        hint: The body's hint.
        operation_id: Names the edits in the answer and in the engine.

    Returns:
        What the API's router takes: its response, a generator of server-sent events, or an
        error (an unknown model, as for any request).
    """
    wrong_model = await serving._check_model(request)
    if wrong_model is not None:
        return wrong_model
    try:
        shape = _SHAPES[api]
        head = {
            "id": f"{shape.id_prefix}-{serving._base_request_id(raw_request, request.request_id)}",
            "created": int(time.time()),
            "model": serving.models.model_name(serving._maybe_get_adapters(request)),
        }
        report = {"agent_hint": await _run_edits(serving, request, hint, operation_id)}
        if request.stream:
            return _events(shape, head, report, *_usage_wanted(serving, request))
        return shape.whole(
            {**head, **report, "choices": [shape.empty_choice()], "usage": _NO_USAGE}
        )
    except Exception:
        # Running the model instead would do what the client asked not to be done.
        name_once("answering a management request failed; they get a 501")
        return serving.create_error_response(
            "agent_hint management requests can't be answered by this vLLM",
            err_type="NotImplementedError",
            status_code=HTTPStatus.NOT_IMPLEMENTED,
        )


async def _run_edits(
    serving: Any, request: Any, hint: AgentHintParams, operation_id: str
) -> dict[str, Any]:
    results = []
    if hint.edits:
        payload = edit_call(hint, getattr(request, "cache_salt", None), operation_id)
        results = merge_results(await call_engines(serving.engine_client, payload))
    return {
        "session_id": hint.session_id,
        "operation_id": operation_id,
        "results": [result.model_dump(mode="json") for result in results],
    }


def _usage_wanted(serving: Any, request: Any) -> tuple[bool, bool]:
    """Whether the stream ends with a usage chunk, and whether every chunk has usage."""
    if getattr(serving, "enable_force_include_usage", False):
        return True, True
    options = request.stream_options
    at_end = bool(options and options.include_usage)
    return at_end, at_end and bool(options.continuous_usage_stats)


async def _events(
    shape: _Shape,
    head: dict[str, Any],
    report: dict[str, Any],
    usage_at_end: bool,
    usage_always: bool,
) -> AsyncGenerator[str, None]:
    """The answer as server-sent events.

    The report is on the chunk that finishes the choice and on the usage chunk behind it: clients
    differ in which of the two they read last.
    """
    *openings, ending = shape.chunk_choices()
    usage = {"usage": _NO_USAGE} if usage_always else {}
    for choice in openings:
        yield _event(shape.chunk({**head, "choices": [choice], **usage}))
    yield _event(shape.chunk({**head, "choices": [ending], **usage, **report}))
    if usage_at_end:
        yield _event(shape.chunk({**head, "choices": [], "usage": _NO_USAGE, **report}))
    yield "data: [DONE]\n\n"


def _event(chunk: Any) -> str:
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
