"""Between a scheduler and the capture of its traffic, while somebody reads one."""

import logging
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from vllm_agent_hint.engine.arrival import ArrivedHint
from vllm_agent_hint.engine.capture import TrafficCapture
from vllm_agent_hint.engine.completion import completed
from vllm_agent_hint.engine.origins import origin_of
from vllm_agent_hint.sessions.facts import TurnFacts

logger = logging.getLogger("vllm.agent_hint")

P = ParamSpec("P")


def _spares_the_engine(
    record: Callable[Concatenate["TrafficRecorder", float, P], None],
) -> Callable[Concatenate["TrafficRecorder", P], None]:
    """Record while somebody reads; a fault ends the capture and nothing else."""

    @wraps(record)
    def guarded(self: "TrafficRecorder", /, *args: P.args, **kwargs: P.kwargs) -> None:
        now = time.monotonic()
        try:
            if self.capture.has_lapsed(now):
                self._end()
            else:
                record(self, now, *args, **kwargs)
        except Exception:
            self._end()
            logger.exception("vllm-agent-hint: recording traffic failed; the capture is over")

    return guarded


class TrafficRecorder:
    """Records every request of a scheduler, with or without a hint.

    Args:
        capture: Where to.
        end: Takes this recorder from its scheduler, once the capture has lapsed or failed.
    """

    def __init__(self, capture: TrafficCapture, *, end: Callable[[], None]) -> None:
        self.capture = capture
        self._end = end

    @_spares_the_engine
    def request_added(self, now: float, request: Any, arrived: ArrivedHint | None) -> None:
        """A request has been added."""
        self.capture.request_added(request.request_id, origin_of(request, arrived), now)

    @_spares_the_engine
    def requests_complete(self, now: float, request_ids: list[str]) -> None:
        """The front end ends requests; see ``completed``."""
        for request_id in completed(request_ids):
            self.capture.request_complete(request_id)

    @_spares_the_engine
    def request_ended(self, now: float, request: Any) -> None:
        """A request is over. O(blocks of its prompt)."""
        num_blocks = request.num_prompt_tokens // self.capture.block_size
        self.capture.request_ended(
            request.request_id,
            request.block_hashes[:num_blocks],
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            finish=str(request.get_finished_reason()),
            now=now,
        )

    @_spares_the_engine
    def turn_ended(self, now: float, operation_id: str, facts: TurnFacts) -> None:
        """The front end has seen how a turn ended."""
        self.capture.turn_ended(operation_id, facts)
