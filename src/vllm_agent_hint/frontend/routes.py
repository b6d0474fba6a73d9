"""``/v1/agent_hint``: a tenant's own sessions, what became of its operations, and the state.

Under ``/v1``, since ``--api-key`` guards nothing else. Each route asks every engine, for one
tenant: what belongs to another is answered exactly as what does not exist.
"""

import base64
import binascii
import uuid
from collections.abc import Callable, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Annotated, Any, Final

from fastapi import FastAPI, Path, Query, Request
from starlette.convertors import StringConvertor, register_url_convertor
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from vllm_agent_hint import seams
from vllm_agent_hint.frontend import capture_routes
from vllm_agent_hint.frontend.access_log import SESSIONS_PATH, hide_session_ids
from vllm_agent_hint.frontend.engine_calls import (
    EngineAnswer,
    await_transfers,
    call_engines,
    edit_call,
    merge_results,
)
from vllm_agent_hint.frontend.facts import say_whether_tools_are_found
from vllm_agent_hint.frontend.fail_open import name_once
from vllm_agent_hint.frontend.merging import merge_lists, merge_operations, merge_sessions
from vllm_agent_hint.frontend.rest_errors import RefusedError, Responses, agent_hint_router
from vllm_agent_hint.frontend.rest_models import (
    Bounds,
    EditReport,
    EditRequest,
    EngineState,
    Features,
    FreeQuery,
    ListQuery,
    NoQuery,
    OperationReport,
    SaltQuery,
    SessionPage,
    SessionView,
    State,
    TurnReport,
    TurnRequest,
)
from vllm_agent_hint.frontend.tenants import tenant_of
from vllm_agent_hint.hints import (
    MAX_ID_LENGTH,
    AgentHintParams,
    ContextEdit,
    ContextManagementParams,
    HintError,
    Identity,
    check_edits_allowed,
)
from vllm_agent_hint.settings import load_settings

NO_SUCH_SESSION: Final = (
    "you have no such session. It may never have been, or have been freed, by a client or after "
    f"its idle time; a cache_salt is a part of its name. GET {SESSIONS_PATH} lists what you have"
)
NO_SUCH_OPERATION: Final = (
    "you have no such operation. Results are kept for ten minutes, or for less where more come in "
    "that time than VLLM_AGENT_HINT_MAX_OPERATIONS; GET /v1/agent_hint/state says whether hints "
    "have an effect here"
)


def attach(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``attach_endpoint_plugins(app, supported_tasks)``, as ``build_app`` calls it.

    Stock: attaches the routes of plugins that ``VLLM_PLUGINS`` names, after vLLM's own and before
    the middleware is built. Ours: attaches our routes to servers that generate text, whatever
    ``VLLM_PLUGINS`` says of endpoints.
    If it moves: there is no ``/v1/agent_hint``; hints work as before.
    """
    result = wrapped(*args, **kwargs)
    try:
        app: FastAPI = args[0] if args else kwargs["app"]
        tasks = args[1] if len(args) > 1 else kwargs["supported_tasks"]
        if "generate" in tasks:
            app.include_router(router)
            app.include_router(capture_routes.router)
            hide_session_ids()
            say_whether_tools_are_found(app.state.args)
    except Exception:
        name_once("attaching /v1/agent_hint failed; the routes are not there")
    return result


class _AnyId(StringConvertor):
    """All that follows in the path: ids have slashes, and what is no id is refused by name.

    Starlette's own ``path`` stops at a line break, and would take ``id%0A`` for ``id``.
    """

    regex = r"[\s\S]*"


register_url_convertor("agent_hint_id", _AnyId())

router = agent_hint_router(
    {
        503: {"model": ErrorResponse, "description": "An engine can't answer; try again."},
    }
)
_NOT_FOUND: Final[Responses] = {
    404: {"model": ErrorResponse, "description": "You have none of that name."}
}

SessionId = Annotated[
    Identity,
    Path(description="Percent-encoded; slashes may stand as they are."),
]
OperationId = Annotated[
    str,
    Path(pattern=r"^[0-9a-f]{32}$", description="As in the answer: 32 hexadecimal digits."),
]


@router.get("/state")
async def get_state(raw_request: Request, query: Annotated[NoQuery, Query()]) -> State:
    """Whether hints have an effect here, what is switched on, and the bounds."""
    answers = await _ask(raw_request, {"op": "state"})
    settings = load_settings()
    states = [(answer, answer.content.get("state") or {}) for answer in answers]
    return State(
        version=version("vllm-agent-hint"),
        vllm_version=seams.installed_vllm_version(),
        active=all(answer.active for answer in answers),
        engines=[
            EngineState(
                engine=answer.engine,
                active=answer.active,
                reason=answer.reason,
                sessions=state.get("sessions", 0),
            )
            for answer, state in states
        ],
        features=Features.model_validate(settings.model_dump(include=set(Features.model_fields))),
        bounds=Bounds(
            max_id_length=MAX_ID_LENGTH,
            **settings.model_dump(include=set(Bounds.model_fields)),
        ),
        block_size=next((state["block_size"] for _, state in states if state), None),
    )


@router.get("/sessions")
async def list_sessions(raw_request: Request, query: Annotated[ListQuery, Query()]) -> SessionPage:
    """Your sessions, a page at a time, in an order that does not depend on their use."""
    after = None if query.after is None else _decode_cursor(query.after)
    answers = await _ask(raw_request, {"op": "list", "limit": query.limit + 1, "after": after})
    _all_have_answered(answers)
    sessions, last = merge_lists(answers, query.limit)
    return SessionPage.model_validate(
        {"sessions": sessions, "next": None if last is None else _encode_cursor(last)}
    )


@router.get("/sessions/{session_id:agent_hint_id}", responses=_NOT_FOUND)
async def show_session(
    raw_request: Request, session_id: SessionId, query: Annotated[SaltQuery, Query()]
) -> SessionView:
    """What is recorded for one session, and how long it is kept."""
    named = {"session_id": session_id, "cache_salt": query.cache_salt}
    answers = await _ask(raw_request, {"op": "show", **named})
    session = merge_sessions(answers)
    if session is None:
        _all_have_answered(answers)
        raise RefusedError(HTTPStatus.NOT_FOUND, NO_SUCH_SESSION, "session_id")
    return SessionView.model_validate(session)


# Before the route of which it would be an id: one that ends in ``/turn`` can't be edited there.
@router.post("/sessions/{session_id:agent_hint_id}/turn")
async def end_turn(
    raw_request: Request,
    session_id: SessionId,
    query: Annotated[NoQuery, Query()],
    body: TurnRequest,
) -> TurnReport:
    """Say how a turn of a session ended: who comes back soon is kept longer.

    It goes above what the server sees by itself. Say it once the reply is there; it may come
    late, or twice, and a server that has no use for it says so.
    """
    payload = {
        "op": "facts",
        "session_id": session_id,
        "cache_salt": body.cache_salt,
        "operation_id": body.operation_id or "",
        "ended": body.ended,
        "tools": body.tools,
        "told": True,
    }
    answers = await _ask(raw_request, payload)
    used = any(answer.content.get("used") for answer in answers)
    if not used:
        _all_have_answered(answers)
    return TurnReport(session_id=session_id, used=used)


@router.post("/sessions/{session_id:agent_hint_id}", responses=_NOT_FOUND)
async def edit_session(
    raw_request: Request,
    session_id: SessionId,
    query: Annotated[NoQuery, Query()],
    body: EditRequest,
) -> EditReport:
    """Run edits on a session's recorded context now, without the model."""
    check_edits_allowed(body.edits, "edits", load_settings())
    return await _edit(
        raw_request, session_id, body.cache_salt, body.edits, wait_seconds=body.wait_seconds
    )


@router.delete("/sessions/{session_id:agent_hint_id}", responses=_NOT_FOUND)
async def free_session(
    raw_request: Request, session_id: SessionId, query: Annotated[FreeQuery, Query()]
) -> EditReport:
    """Forget a session. Requests of it that are running go on, and leave nothing behind.

    The result is that of an `evict`: it counts what was recorded for the session.
    """
    if query.include_children:
        tree = [ContextEdit(type="evict", include_children=True)]
        return await _edit(raw_request, session_id, query.cache_salt, tree)
    operation_id = uuid.uuid4().hex
    payload = {
        "op": "free",
        "session_id": session_id,
        "cache_salt": query.cache_salt,
        "operation_id": operation_id,
    }
    return _report(session_id, operation_id, await _ask(raw_request, payload))


@router.get("/operations/{operation_id:agent_hint_id}", responses=_NOT_FOUND)
async def get_operation(
    raw_request: Request, operation_id: OperationId, query: Annotated[NoQuery, Query()]
) -> OperationReport:
    """What became of an operation: of edits, or of a request that carried a hint."""
    answers = await _ask(raw_request, {"op": "operation", "operation_id": operation_id})
    operation = merge_operations(answers)
    if operation is None:
        _all_have_answered(answers)
        raise RefusedError(HTTPStatus.NOT_FOUND, NO_SUCH_OPERATION, "operation_id")
    return OperationReport.model_validate(operation)


# -- asking the engines ----------------------------------------------------------------------------


async def _ask(raw_request: Request, payload: dict[str, Any]) -> list[EngineAnswer]:
    client = raw_request.app.state.engine_client
    return await call_engines(client, {**payload, "tenant": tenant_of(raw_request)})


def _all_have_answered(answers: Sequence[EngineAnswer]) -> None:
    """One that has not may hold what was asked for: nobody can say that it isn't there.

    Raises:
        RefusedError: 503.
    """
    for answer in answers:
        if answer.has_failed:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, answer.reason)


async def _edit(
    raw_request: Request,
    session_id: str,
    cache_salt: str | None,
    edits: list[ContextEdit],
    *,
    wait_seconds: float = 0.0,
) -> EditReport:
    hint = AgentHintParams(
        session_id=session_id,
        context_management=ContextManagementParams(manage_request=True, edits=edits),
    )
    operation_id = uuid.uuid4().hex
    payload = edit_call(hint, cache_salt, operation_id)
    report = _report(session_id, operation_id, await _ask(raw_request, payload))
    if not wait_seconds:
        return report
    client = raw_request.app.state.engine_client
    results = await await_transfers(
        client, report.results, operation_id, tenant_of(raw_request), wait_seconds
    )
    return report.model_copy(update={"results": results})


def _report(session_id: str, operation_id: str, answers: Sequence[EngineAnswer]) -> EditReport:
    """
    Raises:
        RefusedError: 404 where every engine answers and none has the session. Where hints have
            no effect there are no sessions at all, which the results say.
    """
    if all(answer.active and not answer.content.get("known") for answer in answers):
        raise RefusedError(HTTPStatus.NOT_FOUND, NO_SUCH_SESSION, "session_id")
    return EditReport(
        session_id=session_id, operation_id=operation_id, results=merge_results(answers)
    )


# -- cursors ---------------------------------------------------------------------------------------


def _encode_cursor(cursor: str) -> str:
    """Opaque: a client that took it for an id would be wrong."""
    return base64.urlsafe_b64encode(cursor.encode()).rstrip(b"=").decode()


def _decode_cursor(after: str) -> str:
    try:
        padded = after.encode() + b"=" * (-len(after) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        raise HintError("after", "must be the `next` of an earlier page, as it was") from None
