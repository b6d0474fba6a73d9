"""The contexts with which a session will be back, said by itself; finding them out takes time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from vllm_agent_hint.hints import EditStatus
from vllm_agent_hint.pooling.capability import Content, OperationHandle, Outcome


@dataclass(eq=False, slots=True)
class OwnContents:
    """What the prompts of a session would leave in a cache.

    Args:
        contents: All of them once ``handle`` is ``applied``; none where they can't be told.
        handle: Ends with why they are not wanted any more, or as ``applied``.
    """

    contents: list[Content] = field(default_factory=list)
    handle: OperationHandle = field(default_factory=OperationHandle)

    @classmethod
    def unknown(cls) -> Self:
        """For a session that has said nothing."""
        return cls(handle=OperationHandle.ended(Outcome(EditStatus.APPLIED)))


AskOwnContents = Callable[[], OwnContents]
"""Begins to find them out."""
