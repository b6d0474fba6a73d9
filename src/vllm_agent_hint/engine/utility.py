"""``EngineCore.agent_hint_rpc``: management calls, between two steps of the engine."""

import time
from typing import Any

from vllm_agent_hint import seams
from vllm_agent_hint.hints import ContextEdit, EditResult, EditStatus, EditType
from vllm_agent_hint.sessions.intent import Edit, SessionKey


def agent_hint_rpc(engine_core: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """Answer a call of the front end. Runs on the engine's thread, also while it is paused.

    Args:
        engine_core: vLLM's ``EngineCore``, of which this is a method.
        payload: ``{"op": "edit", "session_id", "cache_salt", "edits"}`` or ``{"op": "state"}``.

    Returns:
        ``{"active", "reason", "results", "stats"}``; plain data. Never raises for what a client
        can send.
    """
    hooks = getattr(engine_core.scheduler, "agent_hint", None)
    edits = [EditType(edit["type"]) for edit in payload.get("edits", ())]
    if hooks is None or hooks.sam is None:
        reason = hooks.reason if hooks is not None else seams.why_inactive
        unsupported = [
            EditResult(type=e, status=EditStatus.UNSUPPORTED, reason=reason) for e in edits
        ]
        return _answer(active=False, reason=reason, results=unsupported, stats=None)
    results: list[EditResult] = []
    key = SessionKey("", payload.get("cache_salt"), payload.get("session_id", ""))
    try:
        if payload.get("op") == "edit":
            block_size = hooks.manager.logical_block_size
            lowered = [
                Edit.from_wire(ContextEdit.model_validate(e), block_size) for e in payload["edits"]
            ]
            results = hooks.sam.apply_edits(key, lowered, time.monotonic())
        stats = hooks.statistics()
    except Exception:
        hooks.drop_sessions("a management call")
        return agent_hint_rpc(engine_core, payload)
    return _answer(active=True, reason="", results=results, stats=stats)


def _answer(
    *, active: bool, reason: str, results: list[EditResult], stats: dict[str, Any] | None
) -> dict[str, Any]:
    """As plain data for msgpack."""
    plain = [result.model_dump(mode="json") for result in results]
    return {"active": active, "reason": reason, "results": plain, "stats": stats}
