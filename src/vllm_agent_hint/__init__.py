"""vllm-agent-hint: session-aware KV cache retention for agents on vLLM."""

from typing import TYPE_CHECKING, Any

from vllm_agent_hint.hints import (
    AgentHintParams,
    CacheControlParams,
    ContextEdit,
    ContextManagementParams,
    EditResult,
    EditStatus,
    HintError,
)

if TYPE_CHECKING:
    from vllm_agent_hint.frontend.offline import manage

__all__ = [
    "AgentHintParams",
    "CacheControlParams",
    "ContextEdit",
    "ContextManagementParams",
    "EditResult",
    "EditStatus",
    "HintError",
    "manage",
    "register",
]


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; vLLM calls it once per process.

    An exception from here would kill the process, so there is none: a plugin that can't start
    says so in one line, and vLLM runs stock.
    """
    try:
        from vllm_agent_hint.settings import load_settings

        if load_settings().enabled:
            from vllm_agent_hint import seams, stamp

            stamp.make_secret()
            seams.install()
    except Exception as error:
        import logging

        reason = " ".join(str(error).split())
        logging.getLogger("vllm.agent_hint").warning("vllm-agent-hint: disabled (%s)", reason)


def __getattr__(name: str) -> Any:
    """``manage`` needs vLLM; the schema above doesn't."""
    if name == "manage":
        from vllm_agent_hint.frontend.offline import manage

        return manage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
