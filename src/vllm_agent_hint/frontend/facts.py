"""Tells the engines how a session's turn ended, which only the front end can see.

A tool call or a final message, cut or given up: that decides when the session comes back. It is
said once per HTTP request, beside the reply and never in its way: it may come late or not at all.
Only with ``VLLM_AGENT_HINT_AUTO``, and only for requests that name a session.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, Final, Protocol

from vllm_agent_hint.frontend.carry import CarriedHint
from vllm_agent_hint.frontend.engine_calls import call_engines
from vllm_agent_hint.frontend.fail_open import name_once
from vllm_agent_hint.frontend.witnesses import Witness
from vllm_agent_hint.sessions.facts import Ended
from vllm_agent_hint.settings import load_settings

logger: Final = logging.getLogger("vllm.agent_hint")

MAX_IN_FLIGHT: Final = 1_000
"""Calls to the engines that may be out at once; what comes then is not said."""

LIMIT_SECONDS: Final = 30.0

_in_flight: Final[set[asyncio.Task[None]]] = set()


class Observed(Protocol):
    """A door whose replies show how the turn ended."""

    def witness(self, request: Any, *, can_tell: bool) -> Witness:
        """What looks at the reply to one request."""


class TurnWatch:
    """Over one request, from its hint to the end of its reply.

    Args:
        witness: The API's.
        engine_client: Through which the engines are told.
        call: The utility call, but for what the witness sees.
    """

    def __init__(self, witness: Witness, engine_client: Any, call: dict[str, Any]) -> None:
        self._witness = witness
        self._engine_client = engine_client
        self._call = call
        self._has_told = False

    def client_left(self) -> None:
        """The handler was cancelled: nobody waits for the reply."""
        self._tell("disconnected")

    def over(self, reply: Any) -> Any:
        """The reply, which tells how its turn ended as soon as it is known."""
        if hasattr(reply, "__aiter__"):
            return self._over_stream(reply)
        if getattr(reply, "error", None) is None:
            self._look(lambda: self._witness.see_whole(reply))
            self._tell(None)
        elif _is_cancelled():
            self.client_left()
        return reply

    async def _over_stream(self, stock: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Event by event as it is. Told before the last one: many a client is gone after it."""
        try:
            async for event in stock:
                if not self._has_told and self._look(lambda e=event: self._witness.see_event(e)):
                    self._tell(None)
                yield event
            self._tell(None)
        except (GeneratorExit, asyncio.CancelledError):
            self._tell("disconnected")
            raise
        finally:
            await stock.aclose()

    def _look(self, at: Any) -> bool:
        try:
            return bool(at())
        except Exception:
            name_once("looking at how a turn ended failed; the engines are not told")
            self._has_told = True
            return False

    def _tell(self, otherwise: Ended | None) -> None:
        if self._has_told:
            return
        self._has_told = True
        try:
            facts = self._witness.facts(otherwise)
            if facts is None:
                return
            if len(_in_flight) >= MAX_IN_FLIGHT:
                logger.debug("vllm-agent-hint: the engines lag behind; a turn's end is not said")
                return
            call = {**self._call, "ended": facts.ended, "tools": list(facts.tools)}
            task = asyncio.get_running_loop().create_task(_deliver(self._engine_client, call))
            _in_flight.add(task)
            task.add_done_callback(_in_flight.discard)
        except Exception:
            name_once("telling the engines how a turn ended failed; they go on without")


def _is_cancelled() -> bool:
    """Whether the handler was cancelled, of which vLLM makes an error that nobody gets."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _deliver(engine_client: Any, call: dict[str, Any]) -> None:
    try:
        await asyncio.wait_for(call_engines(engine_client, call), LIMIT_SECONDS)
    except TimeoutError:
        name_once("an engine did not take how a turn ended; it goes on without")


def watch_turn(
    door: Observed, ours: CarriedHint, serving: Any, request: Any, raw_request: Any
) -> TurnWatch | None:
    """A watch over one request; None where nobody wants to know, or our own code fails."""
    if not load_settings().auto or ours.hint.session_id is None:
        return None
    try:
        can_tell = bool(getattr(request, "tools", None)) and _finds_tools(serving, raw_request)
        call = {
            "op": "facts",
            "tenant": ours.tenant,
            "session_id": ours.hint.session_id,
            "cache_salt": getattr(request, "cache_salt", None),
            "operation_id": ours.operation_id,
        }
        witness = door.witness(request, can_tell=can_tell)
        return TurnWatch(witness, serving.engine_client, call)
    except Exception:
        name_once("watching how a turn ends failed; the engines are not told")
        return None


def say_whether_tools_are_found(args: Any) -> None:
    """At start-up, once per front end: what AUTO can't know here.

    Args:
        args: The server's.
    """
    if load_settings().auto and not _has_tool_parser(args):
        logger.warning(
            "vllm-agent-hint: VLLM_AGENT_HINT_AUTO is on and this server has no tool parser, so it "
            "can't tell a tool call from a final message and falls back to the time between turns "
            "and the finish reason; cure: --enable-auto-tool-choice --tool-call-parser NAME"
        )


def _finds_tools(serving: Any, raw_request: Any) -> bool:
    """Whether vLLM looks for tool calls in what the model says. gpt-oss marks them itself."""
    if getattr(serving, "use_harmony", False):
        return True
    return raw_request is not None and _has_tool_parser(raw_request.app.state.args)


def _has_tool_parser(args: Any) -> bool:
    enabled = getattr(args, "enable_auto_tool_choice", False)
    return bool(enabled and getattr(args, "tool_call_parser", None))
