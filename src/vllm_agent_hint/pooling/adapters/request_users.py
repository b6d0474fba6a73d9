"""Whose a request is that a connector sees."""

from typing import Any

from vllm_agent_hint.pooling.tier.users import OwnRequest, User


def user_of(scheduler: Any, request_id: str) -> User:
    """The session of a request that waits or runs.

    Args:
        scheduler: vLLM's, with the mixin laid over it.
        request_id: vLLM's.
    """
    hooks = scheduler.agent_hint
    tracked = hooks.tracked.get(request_id)
    if tracked is not None:
        key: User = tracked.live.session.key
        return key
    if hooks.remote is not None and request_id in hooks.remote.loads:
        return OwnRequest.TRANSFER
    return None
