"""vllm-agent-hint: session-aware KV cache retention for agents on vLLM."""

from vllm_agent_hint.hints import (
    AgentHintParams,
    CacheControlParams,
    ContextEdit,
    ContextManagementParams,
    EditResult,
    EditStatus,
    HintError,
)

__all__ = [
    "AgentHintParams",
    "CacheControlParams",
    "ContextEdit",
    "ContextManagementParams",
    "EditResult",
    "EditStatus",
    "HintError",
    "register",
]


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; vLLM calls it once per process."""
    from vllm_agent_hint import seams

    seams.install()
