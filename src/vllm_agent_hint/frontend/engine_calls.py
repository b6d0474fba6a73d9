"""Calls to the engines outside any request: edits now, and the state of sessions.

``EngineCore.agent_hint_rpc`` (see ``engine/``) answers on each engine's own thread, between two
steps. A session may live on several data-parallel engines, so every engine is asked and the
answers are merged.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final

from vllm_agent_hint.frontend import metrics
from vllm_agent_hint.frontend.fail_open import name_once
from vllm_agent_hint.hints import AgentHintParams, EditResult, EditStatus, EditType
from vllm_agent_hint.stamp import DEFAULT_TENANT

RPC_METHOD: Final = "agent_hint_rpc"
_POLL_SECONDS: Final = 0.05

_COMMON: Final = frozenset({"active", "reason", "results", "stats"})

# Best first. What an engine did counts above what another could not do; an engine that failed
# may hold the session, so a `missing` elsewhere must not hide it.
_RANKED: Final = (
    EditStatus.APPLIED,
    EditStatus.PARTIAL,
    EditStatus.CLIPPED,
    EditStatus.PENDING,
    EditStatus.REJECTED,
    EditStatus.FAILED,
    EditStatus.UNSUPPORTED,
    EditStatus.MISSING,
)


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """What one engine said to one call.

    Args:
        engine: Its data-parallel index, as in vLLM's ``engine`` label.
        active: Whether hints act on this engine.
        reason: Why not.
        results: One per edit, in the order of the edits; empty where none were sent.
        stats: Gauges and deltas for ``metrics``, if it sent any.
        has_failed: It gave no answer; it may hold what was asked for.
        content: The rest of its answer, by the names that ``engine.utility`` gives it.
    """

    engine: int
    active: bool
    reason: str = ""
    results: tuple[EditResult, ...] = ()
    stats: dict[str, Any] | None = None
    has_failed: bool = False
    content: Mapping[str, Any] = field(default_factory=dict)


def edit_call(
    hint: AgentHintParams,
    cache_salt: str | None,
    operation_id: str,
    *,
    tenant: str = DEFAULT_TENANT,
    at_once: bool = False,
    prompts: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """The payload that runs a hint's edits now.

    Args:
        hint: Names the session and the edits.
        cache_salt: The salt of the session's prompts, a part of its name.
        operation_id: Names the edits.
        tenant: Whose session it is.
        at_once: The engine takes no step while the caller waits.
        prompts: With which the session will be back, as ``own_prompt`` renders them.
    """
    return {
        "op": "edit",
        "tenant": tenant,
        "session_id": hint.session_id,
        "cache_salt": cache_salt,
        "edits": [edit.model_dump(mode="json", exclude_none=True) for edit in hint.edits],
        "operation_id": operation_id,
        "at_once": at_once,
        "prompts": list(prompts),
    }


async def await_transfers(
    engine_client: Any, results: list[EditResult], operation_id: str, tenant: str, seconds: float
) -> list[EditResult]:
    """Results of edits once none is pending, or after so many seconds as far as they have come."""
    until = time.monotonic() + seconds
    asked = {"op": "operation", "operation_id": operation_id, "tenant": tenant}
    while any(r.status is EditStatus.PENDING for r in results) and time.monotonic() < until:
        await asyncio.sleep(min(_POLL_SECONDS, max(0.0, until - time.monotonic())))
        answers = await call_engines(engine_client, asked)
        found = [a.content["operation"] for a in answers if a.content.get("operation")]
        if found and all(part["status"] == "done" for part in found):
            of_each_edit = zip_longest(*(part["results"] for part in found))
            return [
                best_of([EditResult.model_validate(r) for r in of_one if r is not None])
                for of_one in of_each_edit
            ]
    return results


async def call_engines(engine_client: Any, payload: dict[str, Any]) -> list[EngineAnswer]:
    """Ask every engine of an ``AsyncLLM``. Never raises: an engine that can't answer has failed."""
    edits = _edits_of(payload)
    try:
        core_client = engine_client.engine_core
        engines = list(core_client.core_engines)
        replies = await asyncio.gather(
            *(
                core_client._call_utility_async(RPC_METHOD, payload, engine=engine)
                for engine in engines
            ),
            return_exceptions=True,
        )
    except Exception as error:
        return [_failure(0, edits, error)]
    # An engine's identity on the wire is its rank in two little-endian bytes.
    answers = [
        _read(int.from_bytes(engine, "little"), edits, reply)
        for engine, reply in zip(engines, replies, strict=True)
    ]
    _take_stats(engine_client, answers)
    return answers


def call_engine(llm_engine: Any, payload: dict[str, Any]) -> list[EngineAnswer]:
    """Ask the engine of an offline ``LLM``, in this process or another one. Never raises.

    The engine of this process takes no step before this returns, so ``at_once`` has to be set.
    """
    edits = _edits_of(payload)
    try:
        core_client = llm_engine.engine_core
        in_process = getattr(core_client, "engine_core", None)
        reply = (
            _at_once(getattr(in_process, RPC_METHOD)(payload))
            if in_process is not None
            else core_client.call_utility(RPC_METHOD, payload)
        )
    except Exception as error:
        reply = error
    answers = [_read(0, edits, reply)]
    _take_stats(llm_engine, answers)
    return answers


def _at_once(reply: Any) -> Any:
    """What an engine in this process answers: nobody could finish a future that is not done.

    Raises:
        TimeoutError: It is not done.
    """
    return reply.result(timeout=0) if isinstance(reply, Future) else reply


def _edits_of(payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a call is answered for, one result each: a freed session is one evicted."""
    if payload["op"] == "free":
        return [{"type": "evict"}]
    edits: list[dict[str, Any]] = payload.get("edits", [])
    return edits


def merge_results(answers: Sequence[EngineAnswer]) -> list[EditResult]:
    """One result per edit: the best status among the engines, blocks and tokens summed.

    What some engine did is `partial` where another one failed, or rejected the edit because its
    share of the requests did not succeed: that one may hold a part of the session.
    """
    return [
        best_of(of_one_edit)
        for of_one_edit in zip(*(answer.results for answer in answers), strict=True)
    ]


def best_of(results: Sequence[EditResult]) -> EditResult:
    """What several engines say of one edit, at least one of them."""
    best = min(results, key=lambda result: _RANKED.index(result.status))
    status, reason = best.status, best.reason
    for left_out in (EditStatus.FAILED, EditStatus.REJECTED):
        others = [result for result in results if result.status is left_out]
        if others and status is EditStatus.APPLIED:
            status = EditStatus.PARTIAL
            reason = f"{len(others)} of {len(results)} engines {left_out}: {others[0].reason}"
    return EditResult(
        type=best.type,
        status=status,
        blocks=sum(result.blocks for result in results),
        tokens=sum(result.tokens for result in results),
        beyond_range=sum(result.beyond_range for result in results),
        reason=reason,
    )


def _read(engine: int, edits: Sequence[dict[str, Any]], reply: Any) -> EngineAnswer:
    """One engine's reply, which may be an exception, as an answer with a result per edit."""
    if isinstance(reply, BaseException):
        return _failure(engine, edits, reply)
    try:
        active, reason, stats = reply["active"], reply["reason"], reply.get("stats")
        if not active:
            results = _same_for_all(edits, EditStatus.UNSUPPORTED, reason)
        else:
            results = tuple(EditResult.model_validate(result) for result in reply["results"])
        if len(results) != len(edits):
            raise ValueError(f"{len(results)} results for {len(edits)} edits")
    except Exception as error:
        return _failure(engine, edits, error)
    content = {key: value for key, value in reply.items() if key not in _COMMON}
    return EngineAnswer(engine, active, reason, results, stats, content=content)


def _failure(engine: int, edits: Sequence[dict[str, Any]], error: BaseException) -> EngineAnswer:
    name_once("a call to an engine failed; its edits answer `failed`", error)
    reason = f"engine {engine} could not answer ({type(error).__name__}); the server's log has more"
    results = _same_for_all(edits, EditStatus.FAILED, reason)
    return EngineAnswer(engine, False, reason, results, has_failed=True)


def _same_for_all(
    edits: Sequence[dict[str, Any]], status: EditStatus, reason: str
) -> tuple[EditResult, ...]:
    return tuple(
        EditResult(type=EditType(edit["type"]), status=status, reason=reason) for edit in edits
    )


def _take_stats(engine_client: Any, answers: Sequence[EngineAnswer]) -> None:
    """Bring the metrics up to date: an engine that idles sends no statistics of its own."""
    manager = getattr(engine_client, "logger_manager", None)
    for answer in answers:
        if answer.stats is not None:
            metrics.take(manager, answer.engine, answer.stats)
