"""Whose sessions a request speaks of.

The tenant comes from the API key, where this server checks keys, and from one header, where the
operator says that a gateway of theirs sets it. From nowhere else: not from the body, the query or
another header. It is a keyed digest, so that no key and no name leaves this process.
"""

import hashlib
import hmac
from typing import Any

from vllm_agent_hint.settings import load_settings
from vllm_agent_hint.stamp import DEFAULT_TENANT, digest_of


def tenant_of(raw_request: Any) -> str:
    """The tenant of an HTTP request.

    Where a header is trusted and a request has none (or an empty one), it belongs to those whom
    the gateway does not name: nobody with a name ever shares sessions with it, and vLLM serves it
    as before. To refuse it would make a hint decide whether a request runs, and health checks
    that pass the gateway by would fail. A header that is there twice counts with all its values:
    a gateway that adds its own behind the client's then makes a tenant that nobody else is.

    Args:
        raw_request: FastAPI's request; None for a request that came in another way.

    Returns:
        A digest, or ``DEFAULT_TENANT`` where nothing tells tenants apart.
    """
    if raw_request is None:
        return DEFAULT_TENANT
    parts: list[str] = []
    if (key := _verified_key(raw_request)) is not None:
        parts += ["key", key]
    if named := _trusted_names(raw_request):
        parts += ["header", *named]
    return digest_of("tenant", *parts) if parts else DEFAULT_TENANT


def _verified_key(raw_request: Any) -> str | None:
    """The API key of a request, if it is one that this server accepts.

    vLLM guards some paths only (``/invocations`` is not one of them), so a key is worth nothing
    before it has been compared. Read as vLLM's ``AuthenticationMiddleware`` reads it: the first
    ``Authorization`` header, whose scheme is ``bearer`` in any case.
    """
    accepted = _accepted_keys(raw_request)
    if not accepted:
        return None
    scheme, _, key = (raw_request.headers.get("Authorization") or "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    sent = hashlib.sha256(key.encode()).digest()
    matches = [hmac.compare_digest(sent, hashlib.sha256(one.encode()).digest()) for one in accepted]
    return key if any(matches) else None


def _accepted_keys(raw_request: Any) -> list[str]:
    """The keys that vLLM checks against, as ``init_entrypoints_middleware`` finds them."""
    from vllm import envs

    args = getattr(raw_request.app.state, "args", None)
    return [key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key]


def _trusted_names(raw_request: Any) -> list[str]:
    header = load_settings().tenant_header
    return [name for name in raw_request.headers.getlist(header) if name] if header else []
