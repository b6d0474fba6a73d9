"""What a trace is: sessions of requests, each with its time and the blocks of its prompt.

No text and no token: a block is named by a number that stands for its content *and all that comes
before it* in the prompt (a *chain id*, prefix-exact). So two prompts share exactly the blocks
whose ids they share, and an id always lies at the same place of a prompt.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

ChainIds: TypeAlias = NDArray[np.int64]


class TraceError(ValueError):
    """A trace that can't be read; says which file, line and field, and the cure."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedRequest:
    """One request.

    Args:
        at: Seconds from the first request of its session to its arrival.
        prompt_tokens: Tokens of the prompt.
        output_tokens: Tokens that were generated.
        blocks: Chain ids of the prompt's complete blocks, first to last.
        stop: Why it ended (``tool_use``, ``end_turn``), "" if it was cut off, None if unknown.
        tool: Which tool was called, if that is known.
        service_seconds: From its arrival to its last token, if that is known.
        is_hinted: Whether it carried a hint, if that is known.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: ChainIds
    stop: str | None = None
    tool: str | None = None
    service_seconds: float | None = None
    is_hinted: bool | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TracedRequest):
            return NotImplemented
        return self._scalars() == other._scalars() and np.array_equal(self.blocks, other.blocks)

    __hash__ = None  # type: ignore[assignment]

    def _scalars(self) -> tuple[Any, ...]:
        return (
            self.at,
            self.prompt_tokens,
            self.output_tokens,
            self.stop,
            self.tool,
            self.service_seconds,
            self.is_hinted,
        )


@dataclass(frozen=True, slots=True)
class TracedSession:
    """The requests that one agent, or one chat, sent.

    Args:
        name: Unique in the trace.
        requests: By time; never empty, the first one at 0.0.
        starts_at: Seconds from the start of the trace to its first request. None where the trace
            says nothing of what ran beside what: overlap is then imposed.
        parent: The session that started this one, if any.
        after_parent: Seconds from the parent's first request to this session's, where
            ``starts_at`` is None.
        is_named: Whether its requests carried its identity; if not, it was inferred.
    """

    name: str
    requests: tuple[TracedRequest, ...]
    starts_at: float | None = None
    parent: str | None = None
    after_parent: float = 0.0
    is_named: bool = True


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace.

    Args:
        name: The file's name, for people.
        block_size: Tokens in a block.
        sessions: In the order of the file.
    """

    name: str
    block_size: int
    sessions: tuple[TracedSession, ...]

    @property
    def num_requests(self) -> int:
        return sum(len(session.requests) for session in self.sessions)


def runs_of(ids: ChainIds) -> list[int]:
    """Ids as ``[start, length, ...]`` of the runs that rise by one."""
    if not len(ids):
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(ids) != 1) + 1))
    lengths = np.diff(np.concatenate((starts, [len(ids)])))
    return np.column_stack((ids[starts], lengths)).ravel().tolist()


def ids_of(runs: Sequence[int]) -> ChainIds:
    """The ids of ``[start, length, ...]``."""
    parts = [
        np.arange(start, start + length, dtype=np.int64)
        for start, length in zip(runs[::2], runs[1::2], strict=True)
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def common_blocks(first: ChainIds, second: ChainIds) -> int:
    """How many blocks two prompts share."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if length and differ.any() else length


def by_time(requests: Iterable[TracedRequest]) -> tuple[TracedRequest, ...]:
    """Requests in the order of arrival; those of one moment stay as they were."""
    return tuple(sorted(requests, key=lambda request: request.at))
