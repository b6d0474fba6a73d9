"""What a request says of where it comes from, whether it carries a hint or not."""

from typing import Any

from vllm_agent_hint.engine.arrival import ArrivedHint
from vllm_agent_hint.engine.capture import Origin
from vllm_agent_hint.hints import HintError, parse_agent_hint
from vllm_agent_hint.stamp import DEFAULT_TENANT, Stamp


def origin_of(request: Any, arrived: ArrivedHint | None) -> Origin:
    """The hint's session, else vLLM's own ``session_id``, which needs no hint.

    Of an unhinted request no tenant is known: it belongs to the default one.

    Args:
        request: vLLM's, its hint taken off.
        arrived: What was taken off it.
    """
    own_id = getattr(request, "session_id", None) or None
    salt = request.cache_salt
    if arrived is None or arrived.hint is None:
        return Origin(DEFAULT_TENANT, salt, own_id)
    stamp = arrived.stamp or Stamp({}, DEFAULT_TENANT, "")
    try:
        hint = parse_agent_hint(arrived.hint)
    except HintError:
        return Origin(stamp.tenant, salt, own_id)
    return Origin(
        stamp.tenant,
        salt,
        hint.session_id or own_id,
        hint.parent_session_id,
        is_hinted=True,
        operation_id=stamp.operation_id,
    )
