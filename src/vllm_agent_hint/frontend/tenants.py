"""Whose session a request names."""

from typing import Any

from vllm_agent_hint.stamp import DEFAULT_TENANT


def tenant_of(raw_request: Any) -> str:
    """The tenant of an HTTP request: a digest, or ``DEFAULT_TENANT`` where none is told apart."""
    return DEFAULT_TENANT
