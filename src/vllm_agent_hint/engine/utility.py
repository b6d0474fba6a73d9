"""``EngineCore.agent_hint_rpc``: what the front end asks of an engine, between two of its steps.

Every call speaks for one tenant, whom the front end has named; what it reads and changes are that
tenant's sessions only.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from vllm_agent_hint import seams
from vllm_agent_hint.engine.capture import TrafficCapture
from vllm_agent_hint.engine.hooks import EngineHooks
from vllm_agent_hint.hints import ContextEdit, EditResult, EditStatus, EditType
from vllm_agent_hint.sessions import view
from vllm_agent_hint.sessions.facts import TurnFacts
from vllm_agent_hint.sessions.intent import Edit, SessionKey
from vllm_agent_hint.sessions.lineage import LOST, GroupLayout
from vllm_agent_hint.sessions.reasons import NOTHING_RECORDED
from vllm_agent_hint.sessions.session import Session
from vllm_agent_hint.settings import load_settings
from vllm_agent_hint.stamp import DEFAULT_TENANT

Content = dict[str, Any]
"""What an operation adds to the answer; plain data."""

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the front end; each operation below says which fields it takes.

    Args:
        op: A key of ``_OPERATIONS``.
        tenant: Whom the front end speaks for.
        prompts: With which the session will be back; see ``engine.own_prompts``.
        operation_id: Names an operation; empty where nobody will ask for it.
        at_once: Whether the caller can't wait for another step of the engine, as an offline
            engine in the caller's own process can't.
        facts: How a turn ended; ``unknown`` where the call says nothing of it.
        told: Whether the client says so itself.
        capture_id: Names a capture of traffic.
        capture_key: Of its digests; the front end makes one for all engines.
    """

    op: str
    tenant: str
    session_id: str
    cache_salt: str | None
    edits: tuple[ContextEdit, ...]
    prompts: tuple[Mapping[str, Any], ...]
    operation_id: str
    at_once: bool
    limit: int
    after: str | None
    facts: TurnFacts
    told: bool
    capture_id: str
    capture_key: bytes

    @classmethod
    def read(cls, payload: Mapping[str, Any]) -> Self:
        edits = [{"type": "evict"}] if payload["op"] == "free" else payload.get("edits", ())
        return cls(
            op=payload["op"],
            tenant=payload.get("tenant", DEFAULT_TENANT),
            session_id=payload.get("session_id", ""),
            cache_salt=payload.get("cache_salt"),
            edits=tuple(ContextEdit.model_validate(edit) for edit in edits),
            prompts=tuple(payload.get("prompts", ())),
            operation_id=payload.get("operation_id", ""),
            at_once=payload.get("at_once", False),
            limit=payload.get("limit", 0),
            after=payload.get("after"),
            facts=TurnFacts.of(payload.get("ended"), payload.get("tools", ())),
            told=payload.get("told", False),
            capture_id=payload.get("capture_id", ""),
            capture_key=payload.get("capture_key", b""),
        )

    @property
    def key(self) -> SessionKey:
        return SessionKey(self.tenant, self.cache_salt, self.session_id)

    @property
    def edit_types(self) -> list[EditType]:
        return [EditType(edit.type) for edit in self.edits]


def agent_hint_rpc(engine_core: Any, payload: dict[str, Any]) -> Content | Future[Content]:
    """Answer a call of the front end. Runs on the engine's thread, also while it is paused.

    Args:
        engine_core: vLLM's ``EngineCore``, of which this is a method.
        payload: What ``Call.read`` reads.

    Returns:
        ``{"active", "reason", "results", "stats"}`` and what the operation adds to it; plain
        data, or a future of it where the work takes more than one step. vLLM waits for that
        without holding up the engine. Never raises for what a client can send.
    """
    call = Call.read(payload)
    run, nothing = _OPERATIONS[call.op]
    hooks: EngineHooks | None = getattr(engine_core.scheduler, "agent_hint", None)
    if hooks is None or hooks.sam is None:
        return _inactive(hooks, call, nothing)

    def answer(content: Content) -> Content:
        stats = hooks.statistics()
        return {"active": True, "reason": "", "results": [], "stats": stats, **content}

    try:
        return _then(run(hooks, call, time.monotonic()), answer)
    except Exception:
        hooks.drop_sessions("a management call")
        return _inactive(hooks, call, nothing)


def _inactive(hooks: EngineHooks | None, call: Call, nothing: Content) -> Content:
    """Where no hint has an effect there are no sessions; what was done before is still known."""
    reason = hooks.reason if hooks is not None else seams.why_inactive
    results = [
        EditResult(type=edit, status=EditStatus.UNSUPPORTED, reason=reason)
        for edit in call.edit_types
    ]
    content = nothing
    if hooks is not None and call.op == "operation":
        content = _operation(hooks, call, time.monotonic())
    elif hooks is not None and call.operation_id:
        hooks.outcomes.finish(call.operation_id, call.tenant, results, None, time.monotonic())
    return {"active": False, "reason": reason, "results": _plain(results), "stats": None, **content}


# -- operations that change something --------------------------------------------------------------


def _edit(hooks: EngineHooks, call: Call, now: float) -> Content | Future[Content]:
    """Run edits on one session, whose name is ``session_id`` and ``cache_salt``.

    Adds ``known``: whether there was such a session.
    """
    return _accounted(hooks, call, lambda: _apply(hooks, call, now))


def _free(hooks: EngineHooks, call: Call, now: float) -> Content | Future[Content]:
    """Forget one session. The result is that of an ``evict``; adds ``known``, as ``_edit``.

    It counts what was recorded, as ``evict`` does.
    """
    return _accounted(hooks, call, lambda: [_free_session(hooks, call)])


def _accounted(
    hooks: EngineHooks,
    call: Call,
    run: Callable[[], list[EditResult] | Future[list[EditResult]]],
) -> Content | Future[Content]:
    """Run an operation whose results can be asked for while it runs, and afterwards."""
    assert hooks.sam is not None
    is_known = call.key in hooks.sam.sessions or (
        hooks.remote is not None and hooks.remote.knows(call.key)
    )

    def content(results: list[EditResult]) -> Content:
        if call.operation_id and not any(map(_is_pending, results)):
            hooks.outcomes.finish(call.operation_id, call.tenant, results, None, time.monotonic())
        return {"results": _plain(results), "known": is_known}

    if call.operation_id:
        hooks.outcomes.open(call.operation_id, call.tenant, call.edit_types)
    return _then(run(), content)


def _apply(
    hooks: EngineHooks, call: Call, now: float
) -> list[EditResult] | Future[list[EditResult]]:
    assert hooks.sam is not None
    block_size = hooks.manager.logical_block_size
    edits = [Edit.from_wire(edit, block_size) for edit in call.edits]
    results: Future[list[EditResult]] = Future()
    remote = hooks.remote
    with nullcontext() if remote is None else remote.prompts_at_hand(call.prompts):
        run = hooks.sam.start_edits(call.key, edits, now, results.set_result)
    if call.at_once or hooks.is_paused:
        hooks.sam.finish_releases()
    if results.done():
        return results.result()
    if hooks.remote is not None:
        # What is transferred takes its time; who wants to know how it ends asks for it.
        results.add_done_callback(lambda done: _note(hooks, call, done.result()))
        return run.so_far
    hooks.unanswered.add(results)
    results.add_done_callback(hooks.unanswered.discard)
    return results


def _note(hooks: EngineHooks, call: Call, results: list[EditResult]) -> None:
    if call.operation_id:
        hooks.outcomes.finish(call.operation_id, call.tenant, results, None, time.monotonic())


def _is_pending(result: EditResult) -> bool:
    return result.status is EditStatus.PENDING


def _free_session(hooks: EngineHooks, call: Call) -> EditResult:
    assert hooks.sam is not None
    session = hooks.sam.sessions.get(call.key)
    if session is None:
        if hooks.remote is not None:
            # A prefetch may be about to bring the first that there is of it.
            hooks.remote.session_ended(call.key)
        return EditResult(type=EditType.EVICT, status=EditStatus.MISSING, reason=NOTHING_RECORDED)
    blocks, tokens = _holding(session, hooks.manager.group_layouts())
    hooks.sam.free_session(call.key)
    if call.at_once or hooks.is_paused:
        hooks.sam.finish_releases()
    return EditResult(type=EditType.EVICT, status=EditStatus.APPLIED, blocks=blocks, tokens=tokens)


def _holding(session: Session, layouts: Sequence[GroupLayout]) -> tuple[int, int]:
    """What is recorded for a session and still in the cache, each block once, as an evict counts.

    Returns:
        Blocks, and the tokens of the KV cache group that holds most. O(blocks), at C speed.
    """
    held: list[set[int]] = [set() for _ in layouts]
    for lineage in session.lineages:
        for chain in lineage.chains:
            held[chain.group].update(chain.block_ids)
    counts = [len(blocks - {LOST}) for blocks in held]
    tokens = max(n * layout.block_size for n, layout in zip(counts, layouts, strict=True))
    return sum(counts), tokens


# -- operations that only look ---------------------------------------------------------------------


def _list(hooks: EngineHooks, call: Call, now: float) -> Content:
    """The tenant's sessions, ``limit`` of them ``after`` the cursor of an earlier one."""
    assert hooks.sam is not None
    sessions, layouts = hooks.sam.sessions, hooks.manager.group_layouts()
    keys = view.page(view.keys_of(call.tenant, sessions), call.limit, call.after)
    return {"sessions": [view.summary(key, sessions[key], layouts) for key in keys]}


def _show(hooks: EngineHooks, call: Call, now: float) -> Content:
    """One session in full, or None. Takes ``session_id`` and ``cache_salt``."""
    assert hooks.sam is not None
    session = hooks.sam.sessions.get(call.key)
    if session is None:
        return {"session": None}
    described = view.describe(call.key, session, hooks.manager.group_layouts(), now)
    if hooks.remote is not None and not hooks.remote.reason:
        described["residency"] = hooks.remote.residency(call.key)
    return {"session": described}


def _operation(hooks: EngineHooks, call: Call, now: float) -> Content:
    """What became of ``operation_id``, or None."""
    found = hooks.outcomes.get(call.operation_id, call.tenant, now)
    if found is None:
        return {"operation": None}
    return {"operation": {"operation_id": call.operation_id, **found.as_plain()}}


def _state(hooks: EngineHooks, call: Call, now: float) -> Content:
    """What a client may know of the engine itself."""
    assert hooks.sam is not None
    own = view.keys_of(call.tenant, hooks.sam.sessions)
    block_size = hooks.manager.logical_block_size
    return {"state": {"sessions": sum(1 for _ in own), "block_size": block_size}}


# -- what the front end has seen -------------------------------------------------------------------


def _facts(hooks: EngineHooks, call: Call, now: float) -> Content:
    """How a turn of a session ended. It may be another engine's, then this one knows none of it.

    Adds ``used``: whether it says something of the turn after which the session rests here.
    """
    used = hooks.turn_facts(call.key, call.operation_id, call.facts, now, told=call.told)
    return {"used": used}


# -- recording traffic -----------------------------------------------------------------------------


def _capture_start(hooks: EngineHooks, call: Call, now: float) -> Content:
    """Begin to record all traffic. Adds ``capture``, whose ``state`` is ``running``, ``busy`` with
    another one, or ``off``."""
    if not load_settings().capture:
        return {"capture": {"state": "off"}}
    if hooks.traffic is not None and not hooks.traffic.capture.has_lapsed(now):
        return {"capture": {"state": "busy"}}
    block_size = hooks.manager.block_pool.hash_block_size
    hooks.record_traffic(TrafficCapture(call.capture_id, call.capture_key, block_size, now))
    return {"capture": {"state": "running", "block_size": block_size}}


def _capture_take(hooks: EngineHooks, call: Call, now: float) -> Content:
    """The next part of what was recorded; see ``TrafficCapture.take``."""
    running = _own_capture(hooks, call, now)
    return _NO_CAPTURE if running is None else {"capture": {"state": "running"} | running.take(now)}


def _capture_stop(hooks: EngineHooks, call: Call, now: float) -> Content:
    """End a capture. What was not taken is lost."""
    running = _own_capture(hooks, call, now)
    if running is None:
        return _NO_CAPTURE
    hooks.end_traffic()
    ended = {"dropped": running.num_dropped, "unfinished": running.num_unfinished}
    return {"capture": {"state": "ended", **ended}}


def _own_capture(hooks: EngineHooks, call: Call, now: float) -> TrafficCapture | None:
    running = None if hooks.traffic is None else hooks.traffic.capture
    if running is None or running.capture_id != call.capture_id or running.has_lapsed(now):
        return None
    return running


_NO_CAPTURE: Final[Content] = {"capture": {"state": "none"}}

_Run = Callable[[EngineHooks, Call, float], Content | Future[Content]]

_OPERATIONS: Final[dict[str, tuple[_Run, Content]]] = {
    # Beside each, what it adds to the answer of an engine that has no sessions.
    "edit": (_edit, {"known": False}),
    "free": (_free, {"known": False}),
    "list": (_list, {"sessions": []}),
    "show": (_show, {"session": None}),
    "operation": (_operation, {"operation": None}),
    "state": (_state, {"state": None}),
    "facts": (_facts, {"used": False}),
    "capture_start": (_capture_start, _NO_CAPTURE),
    "capture_take": (_capture_take, _NO_CAPTURE),
    "capture_stop": (_capture_stop, _NO_CAPTURE),
}


def _plain(results: Sequence[EditResult]) -> list[dict[str, Any]]:
    """For msgpack."""
    return [result.model_dump(mode="json") for result in results]


def _then(outcome: T | Future[T], step: Callable[[T], U]) -> U | Future[U]:
    """``step`` of an outcome, now or as soon as it is there, on the thread that brings it."""
    if not isinstance(outcome, Future):
        return step(outcome)
    following: Future[U] = Future()

    def go_on(done: Future[T]) -> None:
        try:
            following.set_result(step(done.result()))
        except Exception as error:
            following.set_exception(error)

    outcome.add_done_callback(go_on)
    return following
