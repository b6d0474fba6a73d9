"""What the APIs that answer in ``choices`` have in common: chat, batched chat, completions."""

import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

from vllm_agent_hint.frontend.carry import as_client_error
from vllm_agent_hint.frontend.management import EmptyTurn
from vllm_agent_hint.frontend.sse import DONE, data_event, report_on_last_chunk
from vllm_agent_hint.frontend.witnesses import ChoicesWitness
from vllm_agent_hint.hints import HINT_KEY, HintError

_NO_USAGE: Final = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
_BEAM_SEARCH_CURE: Final = (
    "edits can't wait for a beam search, whose requests carry no hint; turn use_beam_search off, "
    "or send the edits on their own with manage_request: true"
)


class ChoicesDoor(ABC):
    """The ``Door`` of one such API. Its error handlers make a 400 of what is raised."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]

    @abstractmethod
    def engine_requests(self, request: Any) -> int: ...

    @abstractmethod
    def response(self, content: dict[str, Any]) -> Any:
        """A whole response, of the class that the API's router knows."""

    @abstractmethod
    def empty_choices(self, request: Any) -> list[dict[str, Any]]:
        """The choices of a whole response in which nothing is said."""

    @abstractmethod
    def empty_deltas(self) -> list[dict[str, Any]]:
        """The choice of each chunk of a stream; the last one finishes it."""

    def streams(self, request: Any) -> bool:
        return bool(request.stream)

    def check_edits_can_follow(self, serving: Any, request: Any) -> None:
        if getattr(request, "use_beam_search", False):
            raise HintError("use_beam_search", _BEAM_SEARCH_CURE)

    def refusal(self, serving: Any, error: HintError) -> Any:
        raise as_client_error(error) from None

    def with_report(self, reply: Any, report: dict[str, Any]) -> Any:
        if hasattr(reply, "__aiter__"):
            return report_on_last_chunk(reply, report)
        if getattr(reply, "error", None) is None:
            setattr(reply, HINT_KEY, report)
        return reply

    def witness(self, request: Any, *, can_tell: bool) -> ChoicesWitness:
        return ChoicesWitness(can_tell=can_tell, num_choices=self.engine_requests(request))

    def empty_reply(self, turn: EmptyTurn, report: dict[str, Any]) -> Any:
        return self.response(
            {
                **self._head(turn),
                "choices": self.empty_choices(turn.request),
                "usage": _NO_USAGE,
                HINT_KEY: report,
            }
        )

    def empty_events(self, turn: EmptyTurn, report: dict[str, Any]) -> list[str]:
        """The report is on the chunk that finishes the choice and on the usage chunk behind it:
        clients differ in which of the two they read last.
        """
        head = {"object": self.chunk_object, **self._head(turn)}
        usage_at_end, usage_always = _usage_wanted(turn)
        usage = {"usage": _NO_USAGE} if usage_always else {}
        *openings, ending = self.empty_deltas()
        chunks = [{**head, "choices": [choice], **usage} for choice in openings]
        chunks.append({**head, "choices": [ending], **usage, HINT_KEY: report})
        if usage_at_end:
            chunks.append({**head, "choices": [], "usage": _NO_USAGE, HINT_KEY: report})
        return [*map(data_event, chunks), DONE]

    def _head(self, turn: EmptyTurn) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{turn.request_id}",
            "created": int(time.time()),
            "model": turn.model,
        }


def _usage_wanted(turn: EmptyTurn) -> tuple[bool, bool]:
    """Whether the stream ends with a usage chunk, and whether every chunk has usage."""
    if getattr(turn.serving, "enable_force_include_usage", False):
        return True, True
    options = turn.request.stream_options
    at_end = bool(options and options.include_usage)
    return at_end, at_end and bool(options.continuous_usage_stats)
