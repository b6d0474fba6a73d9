"""``/v1/agent_hint/capture``: the traffic of all tenants, as hashes and times, for its operator.

Off unless ``VLLM_AGENT_HINT_CAPTURE`` is set, and behind the API key as all of ``/v1``. Who may
read it learns how much traffic there is and which prompts share a beginning; no prompt, no
session id, no tenant. ``vllm-agent-hint capture`` reads it.
"""

import base64
import secrets
import uuid
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import Query, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from vllm_agent_hint.frontend.engine_calls import EngineAnswer, call_engines
from vllm_agent_hint.frontend.rest_errors import RefusedError, Responses, agent_hint_router
from vllm_agent_hint.frontend.rest_models import NoQuery
from vllm_agent_hint.settings import load_settings

OFF: Final = (
    "this server's traffic may not be recorded; start it with VLLM_AGENT_HINT_CAPTURE=1 to allow it"
)
BUSY: Final = (
    "another capture runs; it ends when its reader stops, or a minute after the reader has gone"
)
NONE: Final = (
    "there is no such capture. One that is not read for a minute ends; POST starts another"
)

_KEY_BYTES: Final = 32


class CaptureQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    capture_id: Annotated[
        str, StringConstraints(pattern=r"^[0-9a-f]{32}$"), Field(description="As POST gave it.")
    ]


class CaptureStarted(BaseModel):
    capture_id: Annotated[str, Field(description="32 hexadecimal digits.")]
    block_size: Annotated[int, Field(description="Tokens per hashed block.")]


class CapturedRequest(BaseModel):
    t: Annotated[float, Field(description="Arrival, in seconds since the capture began.")]
    seconds: Annotated[float, Field(description="From its arrival to its end.")]
    session: Annotated[str | None, Field(description="A keyed digest; null without one.")]
    parent: Annotated[str | None, Field(description="The same of the parent session.")]
    prompt_tokens: int
    output_tokens: int
    finish: Annotated[str, Field(description="vLLM's finish reason.")]
    ended: Annotated[
        str | None,
        Field(description="`tool_call`, `final_message`, `cut`, `disconnected`; null if unknown."),
    ] = None
    tool: Annotated[str | None, Field(description="A keyed digest of what was called.")] = None
    hinted: Annotated[bool, Field(description="Whether it carried an `agent_hint`.")]
    blocks: Annotated[
        str,
        Field(description="Base64 of 8 bytes for each complete block of the prompt, keyed."),
    ]


class CapturePart(BaseModel):
    requests: Annotated[list[CapturedRequest], Field(description="In the order of arrival.")]
    until: Annotated[
        float,
        Field(description="Requests that arrived before this many seconds are all handed out."),
    ]
    more: Annotated[bool, Field(description="Whether others wait already.")]
    dropped: Annotated[int, Field(description="Requests lost so far for want of room.")]
    unfinished: Annotated[int, Field(description="Requests that have not ended.")]


class CaptureEnded(BaseModel):
    dropped: Annotated[int, Field(description="Requests lost for want of room.")]
    unfinished: Annotated[int, Field(description="Requests that had not ended.")]


router = agent_hint_router(
    {
        403: {"model": ErrorResponse, "description": "The server's flag does not allow it."},
        503: {"model": ErrorResponse, "description": "An engine can't answer, or does not record."},
    }
)
_NOT_FOUND: Final[Responses] = {
    404: {"model": ErrorResponse, "description": "There is no capture of that name."}
}


@router.post("/capture", responses={409: {"model": ErrorResponse, "description": "One runs."}})
async def start_capture(raw_request: Request, query: Annotated[NoQuery, Query()]) -> CaptureStarted:
    """Begin to record the traffic of all engines. There is one capture at a time."""
    capture_id = uuid.uuid4().hex
    # One key for all engines, so that equal blocks have equal digests; it is kept nowhere else.
    start = {"op": "capture_start", "capture_key": secrets.token_bytes(_KEY_BYTES)}
    answers = await _ask(raw_request, start, capture_id)
    try:
        _check(answers)
        if any(_state(answer) == "busy" for answer in answers):
            raise RefusedError(HTTPStatus.CONFLICT, BUSY)
    except RefusedError:
        # Where it has begun it must not go on, and it would lapse only in a minute.
        await _ask(raw_request, {"op": "capture_stop"}, capture_id)
        raise
    block_size = answers[0].content["capture"]["block_size"]
    return CaptureStarted(capture_id=capture_id, block_size=block_size)


@router.get("/capture", responses=_NOT_FOUND)
async def take_capture(
    raw_request: Request, query: Annotated[CaptureQuery, Query()]
) -> CapturePart:
    """What has ended since the last time. Ask at least once a minute, or the capture ends."""
    answers = await _ask(raw_request, {"op": "capture_take"}, query.capture_id)
    parts = _parts(answers)
    requests = sorted((r for part in parts for r in part["requests"]), key=lambda r: r["t"])
    return CapturePart(
        requests=[
            CapturedRequest(**{**r, "blocks": base64.b64encode(r["blocks"]).decode()})
            for r in requests
        ],
        until=min(part["until"] for part in parts),
        more=any(part["more"] for part in parts),
        dropped=sum(part["dropped"] for part in parts),
        unfinished=sum(part["unfinished"] for part in parts),
    )


@router.delete("/capture", responses=_NOT_FOUND)
async def stop_capture(
    raw_request: Request, query: Annotated[CaptureQuery, Query()]
) -> CaptureEnded:
    """End it. What has not been taken is lost."""
    parts = _parts(await _ask(raw_request, {"op": "capture_stop"}, query.capture_id))
    return CaptureEnded(
        dropped=sum(part["dropped"] for part in parts),
        unfinished=sum(part["unfinished"] for part in parts),
    )


async def _ask(
    raw_request: Request, payload: dict[str, Any], capture_id: str
) -> list[EngineAnswer]:
    """
    Raises:
        RefusedError: 403 where the flag is off.
    """
    if not load_settings().capture:
        raise RefusedError(HTTPStatus.FORBIDDEN, OFF)
    client = raw_request.app.state.engine_client
    return await call_engines(client, {**payload, "capture_id": capture_id})


def _check(answers: Sequence[EngineAnswer]) -> None:
    """
    Raises:
        RefusedError: 503 where an engine can't answer or can't record, 403 where its flag is off.
    """
    for answer in answers:
        if not answer.active:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, answer.reason)
        if _state(answer) == "off":
            raise RefusedError(HTTPStatus.FORBIDDEN, OFF)


def _parts(answers: Sequence[EngineAnswer]) -> list[dict[str, Any]]:
    """
    Raises:
        RefusedError: As ``_check``, and 404 where an engine has no such capture.
    """
    _check(answers)
    if any(_state(answer) == "none" for answer in answers):
        raise RefusedError(HTTPStatus.NOT_FOUND, NONE, "capture_id")
    return [answer.content["capture"] for answer in answers]


def _state(answer: EngineAnswer) -> str:
    state: str = answer.content["capture"]["state"]
    return state
