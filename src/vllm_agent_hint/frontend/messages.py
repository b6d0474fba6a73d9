"""Anthropic's ``/v1/messages``."""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

from vllm_agent_hint.frontend.chat import rendered_chat
from vllm_agent_hint.frontend.doors import arguments, pass_hinted
from vllm_agent_hint.frontend.fail_open import name_once
from vllm_agent_hint.frontend.identity import SESSION_FIELD
from vllm_agent_hint.frontend.management import EmptyTurn
from vllm_agent_hint.frontend.reading import UnreadHint, find_hint
from vllm_agent_hint.frontend.sse import data_event, report_on_event
from vllm_agent_hint.frontend.witnesses import MessagesWitness
from vllm_agent_hint.hints import HINT_KEY, HintError

_ENDING: Final = "message_delta"
_NO_USAGE: Final = {"input_tokens": 0, "output_tokens": 0}
_NO_TEXT: Final = {"type": "text", "text": ""}


async def create_messages(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``AnthropicServingMessages.create_messages(request, raw_request=None)``, a coroutine.

    Stock: makes a chat request of its own, field by field, and hands it to
    ``create_chat_completion``. Its request class drops fields that it doesn't know.
    Ours: the same as for chat, on the raw body, which Starlette has parsed and kept. The hint
    waits for the inner chat request's ``to_sampling_params``.
    If it moves: hints in ``vllm_xargs`` still work, others go unread.
    """
    unread = await _find_hint(*arguments(args, kwargs))
    if unread is None:
        return await wrapped(*args, **kwargs)
    return await pass_hinted(_DOOR, unread, wrapped, instance, args, kwargs)


async def _find_hint(request: Any, raw_request: Any) -> UnreadHint | None:
    """The hint; None also where the raw body can't be had again."""
    try:
        body = await raw_request.json() if raw_request is not None else {}
        xargs = getattr(request, "vllm_xargs", None)
        return find_hint(body.get(HINT_KEY), body.get(SESSION_FIELD), xargs)
    except Exception:
        name_once("looking for a hint in a message's body failed; the request runs without it")
        return None


class MessagesDoor:
    """A message; an empty one holds one empty text, as strict clients expect."""

    def engine_requests(self, request: Any) -> int:
        return 1

    def streams(self, request: Any) -> bool:
        return bool(request.stream)

    def check_edits_can_follow(self, serving: Any, request: Any) -> None:
        """They always can: no beam search, and no tools that the server runs."""

    def refusal(self, serving: Any, error: HintError) -> Any:
        """Returned, since the router logs what is raised with a traceback. Anthropic's errors
        have no field for the parameter, so the message starts with it.
        """
        return serving.create_error_response(str(error), param=error.field)

    def with_report(self, reply: Any, report: dict[str, Any]) -> Any:
        if hasattr(reply, "__aiter__"):
            return report_on_event(reply, _ENDING, report)
        if getattr(reply, "error", None) is not None:
            return reply
        return _reporting_message()(**dict(reply), **{HINT_KEY: report})

    async def rendered(self, serving: Any, request: Any) -> Any:
        """As stock counts the tokens of a message."""
        effort = "none"
        if request.thinking is not None and request.thinking.type == "disabled":
            effort = await serving._get_disabled_thinking_effort()
        chat = serving.to_chat_completion_request(
            request,
            merge_inline_system=serving._merge_inline_system,
            disabled_thinking_effort=effort,
        )
        return await rendered_chat(serving, chat)

    def witness(self, request: Any, *, can_tell: bool) -> MessagesWitness:
        return MessagesWitness(can_tell=can_tell)

    def empty_reply(self, turn: EmptyTurn, report: dict[str, Any]) -> Any:
        return _reporting_message()(
            **{
                **_empty_message(turn),
                "content": [_NO_TEXT],
                "stop_reason": "end_turn",
                HINT_KEY: report,
            }
        )

    def empty_events(self, turn: EmptyTurn, report: dict[str, Any]) -> list[str]:
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": _empty_message(turn)},
            {"type": "content_block_start", "index": 0, "content_block": _NO_TEXT},
            {"type": "content_block_stop", "index": 0},
            {
                "type": _ENDING,
                "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                "usage": _NO_USAGE,
                HINT_KEY: report,
            },
            {"type": "message_stop"},
        ]
        return [data_event(event, event["type"]) for event in events]


def _empty_message(turn: EmptyTurn) -> dict[str, Any]:
    """As a stream begins it."""
    return {
        "id": f"msg_{turn.request_id}",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": turn.model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _NO_USAGE,
    }


@cache
def _reporting_message() -> type[Any]:
    """vLLM's message with one field more, which it would drop otherwise."""
    from pydantic import create_model
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse

    message: type[Any] = create_model(
        "ReportingMessage", __base__=AnthropicMessagesResponse, agent_hint=(dict[str, Any], ...)
    )
    return message


_DOOR: Final = MessagesDoor()
