"""The way of a hinted request through any of vLLM's HTTP APIs.

Each API has a ``Door``, a file of its own that says only what differs: ``chat``, ``batch_chat``,
``completion``, ``responses``, ``messages``. The rest is the same for all and stands here: a bad
hint is refused before anything runs, a management request is answered without the model, any
other hint waits for ``to_sampling_params``, the reply says under which name its effects can be
asked for, and a watch tells the engines how the turn ended (see ``facts``).
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from vllm_agent_hint.frontend import management
from vllm_agent_hint.frontend.carry import CarriedHint, carried
from vllm_agent_hint.frontend.facts import Observed, watch_turn
from vllm_agent_hint.frontend.fail_open import name_once
from vllm_agent_hint.frontend.management import Shape
from vllm_agent_hint.frontend.reading import UnreadHint, read_hint
from vllm_agent_hint.hints import HintError


class Door(Shape, Observed, Protocol):
    """What one API does in its own way."""

    def engine_requests(self, request: Any) -> int:
        """How many requests the engine makes of this one."""

    def check_edits_can_follow(self, serving: Any, request: Any) -> None:
        """Refuse edits that could not run after the request.

        Raises:
            HintError: Naming the field that stands in their way.
        """

    def refusal(self, serving: Any, error: HintError) -> Any:
        """What the API's router takes as a 400, or raise what its handlers take as one."""

    def with_report(self, reply: Any, report: dict[str, Any]) -> Any:
        """The reply, whole or streamed, with ``agent_hint`` in it. Errors stay as they are."""


async def pass_hinted(
    door: Door,
    unread: UnreadHint,
    wrapped: Callable[..., Any],
    serving: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Answer a request that has a hint.

    Args:
        door: The API's.
        unread: The hint as it came.
        wrapped: Stock's handler ``(request, raw_request=None)``, with its arguments.
    """
    request, raw_request = arguments(args, kwargs)
    try:
        ours = _read_or_none(door, unread, serving, request, raw_request)
    except HintError as error:
        return door.refusal(serving, error)
    if ours is None:
        return await wrapped(*args, **kwargs)
    if ours.hint.manages:
        return await management.answer(door, serving, request, raw_request, ours)
    watch = watch_turn(door, ours, serving, request, raw_request)
    token = carried.set(ours)
    try:
        reply = await wrapped(*args, **kwargs)
    except asyncio.CancelledError:
        if watch is not None:
            watch.client_left()
        raise
    finally:
        carried.reset(token)
    if watch is not None:
        reply = watch.over(reply)
    try:
        return door.with_report(reply, ours.report)
    except Exception:
        name_once("naming the operation in a reply failed; it says nothing of it")
        return reply


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """``(request, raw_request)`` of a handler's call."""
    request = args[0] if args else kwargs.get("request")
    raw_request = args[1] if len(args) > 1 else kwargs.get("raw_request")
    return request, raw_request


def _read_or_none(
    door: Door, unread: UnreadHint, serving: Any, request: Any, raw_request: Any
) -> CarriedHint | None:
    """The valid hint; None where our own code fails.

    Raises:
        HintError: The client has to correct the request.
    """
    try:
        ours = read_hint(unread, serving, request, raw_request, door.engine_requests(request))
        if ours.hint.edits and not ours.hint.manages:
            door.check_edits_can_follow(serving, request)
        return ours
    except HintError:
        raise
    except Exception:
        name_once("reading agent_hint in a request body failed; the request runs without it")
        return None
