"""The contexts with which a session will be back, said by itself; finding them out takes time."""

from collections.abc import Callable

from vllm_agent_hint.hints import EditStatus
from vllm_agent_hint.pooling.capability import Content, OperationHandle, Outcome

Take = Callable[[Content], object]
"""Gets each of them as soon as it is known. It may look it up in a store: between two steps no
more than one that is long is handed over."""

AskOwnContents = Callable[[Take], OperationHandle]
"""Begins to find them out. Ends as ``applied`` once all are known, as ``failed`` where they can't
be told, and else with why they are not wanted any more."""


def nothing_is_said(_: Take) -> OperationHandle:
    """For a session that has said nothing."""
    return OperationHandle.ended(Outcome(EditStatus.APPLIED))
