"""Reading the hint of one HTTP request: where it stands, whose it is, what it says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm_agent_hint.frontend.carry import CarriedHint, new_operation_id
from vllm_agent_hint.frontend.identity import outside_identity
from vllm_agent_hint.frontend.spreading import may_spread
from vllm_agent_hint.frontend.tenants import tenant_of
from vllm_agent_hint.hints import HINT_KEY, HintError, parse_agent_hint

_SALT_FIELD: Final = "cache_salt"
_SALT_CURE: Final = "names the session beside a hint, so it must be text without lone surrogates"


@dataclass(frozen=True, slots=True)
class UnreadHint:
    """A hint as it came.

    Args:
        raw: What stood under ``agent_hint``.
        session_id: The body's own ``session_id``, raw.
        xargs: The body's ``vllm_xargs``.
    """

    raw: Any
    session_id: Any
    xargs: Mapping[str, Any] | None


def find_hint(raw: Any, session_id: Any, xargs: Mapping[str, Any] | None) -> UnreadHint | None:
    """The body's own hint goes before the one in ``vllm_xargs``; None if there is neither."""
    if raw is None and xargs:
        raw = xargs.get(HINT_KEY)
    return None if raw is None else UnreadHint(raw, session_id, xargs)


def read_hint(
    unread: UnreadHint, serving: Any, request: Any, raw_request: Any, engine_requests: int
) -> CarriedHint:
    """Validate a hint and name its operation.

    Args:
        unread: As it came.
        serving: vLLM's handler of the API.
        request: The body, as vLLM parsed it.
        raw_request: FastAPI's request, or None.
        engine_requests: How many requests the engine will make of it.

    Raises:
        HintError: The client has to correct the request.
    """
    identity = outside_identity(unread.session_id, raw_request, unread.xargs)
    hint = parse_agent_hint(unread.raw, identity=identity)
    _check_salt(getattr(request, _SALT_FIELD, None))
    return CarriedHint(
        hint,
        new_operation_id(),
        engine_requests,
        tenant_of(raw_request),
        may_spread=engine_requests > 1 and may_spread(serving, raw_request),
    )


def _check_salt(salt: Any) -> None:
    """A lone surrogate is JSON and has no UTF-8, in which everything travels to the engine."""
    try:
        if salt is not None:
            salt.encode()
    except (AttributeError, UnicodeEncodeError):
        raise HintError(_SALT_FIELD, _SALT_CURE) from None
