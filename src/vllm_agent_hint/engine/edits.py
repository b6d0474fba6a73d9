"""When the edits of an ordinary request may run: after the last of its engine requests."""

from dataclasses import dataclass
from typing import Final

from vllm_agent_hint.stamp import Stamp

MAX_OPEN_OPERATIONS: Final = 10_000


@dataclass(slots=True)
class _Operation:
    requests_left: int
    has_failed: bool = False


class EditOperations:
    """Counts the engine requests that one HTTP request has become (``n > 1``, several prompts).

    Their edits run once, after the last has ended, and only if all have succeeded. A request
    without a stamp is one by itself.

    Args:
        counts_siblings: False where they may run on other engines: each is then one by itself,
            and the last of them to end leaves what the edits say.
    """

    def __init__(self, *, counts_siblings: bool = True) -> None:
        self._counts_siblings = counts_siblings
        self._open: dict[str, _Operation] = {}

    def request_ended(self, stamp: Stamp | None, *, succeeded: bool) -> bool | None:
        """Count one engine request.

        Args:
            stamp: As the front end made it, or None.
            succeeded: Whether this request came to a regular end.

        Returns:
            Whether all have succeeded, if this was the last; None if others are still out.
        """
        if not self._counts_siblings or stamp is None:
            return succeeded
        key = stamp.operation_id
        entry = self._open.setdefault(key, _Operation(stamp.engine_requests))
        entry.requests_left -= 1
        entry.has_failed |= not succeeded
        if entry.requests_left > 0:
            if len(self._open) > MAX_OPEN_OPERATIONS:
                del self._open[next(iter(self._open))]
            return None
        del self._open[key]
        return not entry.has_failed
