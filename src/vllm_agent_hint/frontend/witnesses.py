"""What a reply shows of how its turn ended, API by API.

Only replies that the client gets are looked at, as vLLM has written them. A stream is parsed where
it finishes or names a tool; every other event costs a search for a few bytes.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Final, Literal

from vllm_agent_hint.frontend.sse import DONE
from vllm_agent_hint.sessions.facts import MAX_TOOLS, Ended, TurnFacts

_CLIENT_TOOLS: Final = ("function_call", "custom_tool_call")
"""Items of a response that ask the client to run something."""


class Witness(ABC):
    """Sees one reply go by, whole or event by event.

    Args:
        can_tell: Whether vLLM would have found a tool call in the text: there is a parser for them,
            and tools were offered. Otherwise a regular end says nothing.
    """

    def __init__(self, *, can_tell: bool) -> None:
        self._regular: Ended = "final_message" if can_tell else "unknown"
        self._tools: list[str] = []

    @abstractmethod
    def see_whole(self, reply: Any) -> None:
        """A reply that isn't streamed, no error."""

    @abstractmethod
    def see_event(self, event: Any) -> bool:
        """An event of a stream. Returns whether it is the last of substance."""

    @property
    @abstractmethod
    def ended(self) -> Ended | None:
        """How the turn ended; None while it has not, as far as the reply shows."""

    def facts(self, otherwise: Ended | None) -> TurnFacts | None:
        """What can be said; ``otherwise`` of a turn of which no end was seen."""
        ended = self.ended or otherwise
        return None if ended is None else TurnFacts.of(ended, self._tools)

    def _called(self, name: Any) -> None:
        if isinstance(name, str) and name and len(self._tools) < MAX_TOOLS:
            self._tools.append(name)


class ChoicesWitness(Witness):
    """Chat, batched chat, completions.

    Args:
        can_tell: See ``Witness``.
        num_choices: That the reply will have.
    """

    def __init__(self, *, can_tell: bool, num_choices: int) -> None:
        super().__init__(can_tell=can_tell)
        self._num_choices = num_choices
        self._ends: dict[int, Ended] = {}
        self._calling: set[int] = set()
        """Choices that call a tool."""

    def see_whole(self, reply: Any) -> None:
        for choice in reply.choices:
            message = getattr(choice, "message", None)
            calls = getattr(message, "tool_calls", None) or ()
            self._calls(choice.index, (call.function.name for call in calls))
            self._finished(choice.index, choice.finish_reason, choice.stop_reason)

    def see_event(self, event: str) -> bool:
        # A quotation mark inside text is escaped, so none of these can be the model's words.
        finishes = '"finish_reason":"' in event
        if finishes or ('"tool_calls":[' in event and '"name":"' in event):
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                calls = (choice.get("delta") or {}).get("tool_calls") or ()
                names = ((call.get("function") or {}).get("name") for call in calls)
                self._calls(choice["index"], names)
                if choice.get("finish_reason"):
                    reasons = choice["finish_reason"], choice.get("stop_reason")
                    self._finished(choice["index"], *reasons)
        return event == DONE

    @property
    def ended(self) -> Ended | None:
        """One of several choices that calls a tool brings the client back."""
        if len(self._ends) < self._num_choices:
            return None
        order: tuple[Ended, ...] = ("tool_call", "cut", "unknown", "final_message")
        return min(self._ends.values(), key=order.index)

    def _calls(self, index: int, names: Iterable[Any]) -> None:
        for name in names:
            self._calling.add(index)
            self._called(name)

    def _finished(self, index: int, reason: Any, stop_reason: Any) -> None:
        """A stop string of the client's own may mean anything; only the client knows.

        A tool that the client forced is called with the reason ``stop``.
        """
        if reason == "tool_calls":
            self._ends[index] = "tool_call"
        elif reason == "length":
            self._ends[index] = "cut"
        elif reason != "stop" or isinstance(stop_reason, str):
            self._ends[index] = "unknown"
        else:
            self._ends[index] = "tool_call" if index in self._calling else self._regular


class AnswerWitness(Witness):
    """Sees a reply with one answer, which ends once."""

    def __init__(self, *, can_tell: bool) -> None:
        super().__init__(can_tell=can_tell)
        self._ended: Ended | None = None

    @property
    def ended(self) -> Ended | None:
        return self._ended


class MessagesWitness(AnswerWitness):
    """Anthropic's messages."""

    def see_whole(self, reply: Any) -> None:
        for block in reply.content:
            if block.type == "tool_use":
                self._called(block.name)
        self._stopped(reply.stop_reason)

    def see_event(self, event: str) -> bool:
        if event.startswith("event: content_block_start") and '"type":"tool_use"' in event:
            self._called(_data_of(event)["content_block"].get("name"))
        elif event.startswith("event: message_delta"):
            self._stopped(_data_of(event)["delta"].get("stop_reason"))
        return event.startswith("event: message_stop")

    def _stopped(self, reason: str | None) -> None:
        ends: dict[str | None, Ended] = {
            "tool_use": "tool_call",
            "max_tokens": "cut",
            "end_turn": self._regular,
        }
        self._ended = ends.get(reason, "unknown")


class ResponsesWitness(AnswerWitness):
    """OpenAI's Responses. One that runs in the background has not ended yet."""

    def see_whole(self, reply: Any) -> None:
        for item in reply.output:
            if item.type in _CLIENT_TOOLS:
                self._called(item.name)
        status: Literal["completed", "incomplete"] | str = reply.status
        if status == "completed":
            self._ended = "tool_call" if self._tools else self._regular
        elif status == "incomplete":
            self._ended = "cut"

    def see_event(self, event: Any) -> bool:
        is_last = getattr(event, "type", None) == "response.completed"
        if is_last:
            self.see_whole(event.response)
        return is_last


def _data_of(event: str) -> Any:
    return json.loads(event.partition("\ndata: ")[2])
