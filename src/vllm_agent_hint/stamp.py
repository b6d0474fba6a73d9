"""The stamp on a hint: what the front end says of it, signed, so that no client can say it.

A request reaches the engine by many routes, and most let a client write into
``SamplingParams.extra_args``. The front end puts hint, operation and tenant under one key of its
own and signs them; the engine reads a tenant from nowhere else.
"""

import hashlib
import hmac
import json
import os
import secrets
from dataclasses import dataclass
from typing import Any, Final

from vllm_agent_hint.settings import ENV_PREFIX, load_settings

STAMP_KEY: Final = "agent_hint_stamp"
"""Where the stamp travels in ``SamplingParams.extra_args``."""

DEFAULT_TENANT: Final = ""
"""Whose sessions those of requests without a stamp are."""

_ENV_SECRET: Final = f"{ENV_PREFIX}SECRET"


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the front end vouches for.

    Args:
        hint: The validated hint, as plain data.
        tenant: A digest; ``DEFAULT_TENANT`` where the server tells no tenants apart.
        operation_id: Names the request's effects, in its response and at ``/v1/agent_hint``.
        engine_requests: How many engine requests the HTTP request became (``n`` times prompts).
        may_spread: Whether they may run on several data-parallel engines. No engine can tell.
    """

    hint: dict[str, Any]
    tenant: str
    operation_id: str
    engine_requests: int = 1
    may_spread: bool = False

    def sealed(self) -> dict[str, Any]:
        """Plain data for ``extra_args[STAMP_KEY]``, signed."""
        content = {
            "hint": self.hint,
            "tenant": self.tenant,
            "operation_id": self.operation_id,
            "engine_requests": self.engine_requests,
            "may_spread": self.may_spread,
        }
        return _Sealed(content, mac=_mac(content))


class _Sealed(dict[str, Any]):
    """Shows only which operation it belongs to: vLLM can log the parameters of every request.

    Who reads a log shall learn no session id, no tenant, and no stamp to send in again.
    """

    def __repr__(self) -> str:
        return f"<agent hint, operation {self['operation_id']} of {self['engine_requests']}>"


def open_stamp(sealed: Any) -> Stamp | None:
    """The stamp in what ``extra_args[STAMP_KEY]`` holds; None if the front end did not make it."""
    if not isinstance(sealed, dict):
        return None
    content = {key: value for key, value in sealed.items() if key != "mac"}
    mac = sealed.get("mac")
    try:
        if not isinstance(mac, str) or not hmac.compare_digest(mac, _mac(content)):
            return None
        return Stamp(**content)
    except (TypeError, ValueError):
        return None


def digest_of(*parts: str) -> str:
    """A keyed digest, 32 hex digits, that is the same in every process of one server."""
    message = json.dumps(parts).encode()
    return hmac.new(_secret(), message, hashlib.sha256).hexdigest()[:32]


def make_secret() -> None:
    """Give this process a secret, if it has none, that the processes it starts inherit."""
    if not load_settings().secret.get_secret_value():
        os.environ[_ENV_SECRET] = secrets.token_hex(32)
        load_settings.cache_clear()


def _mac(content: dict[str, Any]) -> str:
    message = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hmac.new(_secret(), message.encode(), hashlib.sha256).hexdigest()


def _secret() -> bytes:
    return load_settings().secret.get_secret_value().encode()
