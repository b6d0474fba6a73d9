"""The session that a request names outside its hint.

vLLM has had a session identity of its own since 0.28, in three places. Where a hint names no
session, that one is meant, and vLLM's own order decides between the places.
"""

from collections.abc import Mapping
from typing import Any, Final

from vllm_agent_hint.hints import OutsideIdentity

SESSION_FIELD: Final = "session_id"
SESSION_HEADER: Final = "X-Session-ID"


def outside_identity(
    in_body: Any, raw_request: Any, xargs: Mapping[str, Any] | None
) -> OutsideIdentity | None:
    """The first of body, header and ``vllm_xargs`` that names a session. Empty ones name none.

    Args:
        in_body: The body's own ``session_id``.
        raw_request: FastAPI's request, or None where there is none.
        xargs: The body's ``vllm_xargs``.
    """
    if in_body is not None and in_body != "":
        return OutsideIdentity(in_body, SESSION_FIELD)
    if raw_request is not None and (header := raw_request.headers.get(SESSION_HEADER)):
        return OutsideIdentity(header, SESSION_HEADER)
    in_xargs = xargs.get(SESSION_FIELD) if xargs else None
    if in_xargs is not None and in_xargs != "":
        return OutsideIdentity(in_xargs, f"vllm_xargs.{SESSION_FIELD}")
    return None
