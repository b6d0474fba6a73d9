"""Management for an offline ``vllm.LLM``, where there is no request to carry the edits."""

import uuid
from collections.abc import Mapping
from typing import Any

from vllm_agent_hint.frontend.engine_calls import call_engine, edit_call, merge_results
from vllm_agent_hint.hints import AgentHintParams, EditResult, parse_agent_hint


def manage(
    llm: Any, hint: AgentHintParams | Mapping[str, Any], *, cache_salt: str | None = None
) -> list[EditResult]:
    """Run a hint's edits on an offline ``LLM`` now, without the model.

    Args:
        llm: A ``vllm.LLM``, its engine in this process or in another one.
        hint: The session and the edits, as in ``agent_hint``; ``manage_request`` is implied.
        cache_salt: The salt that the session's prompts were sent with, if any.

    Returns:
        One result per edit, in their order. An engine that can't answer is a result, too:
        ``unsupported`` or ``failed``, with the reason.

    Raises:
        HintError: The hint is wrong; it names the field and the cure.
        TypeError: ``llm`` is no ``vllm.LLM``.
    """
    params = parse_agent_hint(hint)
    llm_engine = getattr(llm, "llm_engine", None)
    if llm_engine is None:
        raise TypeError(f"manage() needs a vllm.LLM, not {type(llm).__name__}")
    if not params.edits:
        return []
    payload = edit_call(params, cache_salt, uuid.uuid4().hex, at_once=True)
    return merge_results(call_engine(llm_engine, payload))
