"""Errors of ``/v1/agent_hint``, in vLLM's own shape: which field, what is wrong, what cures it.

None of them repeats what the client sent.
"""

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, Final, TypeAlias
from urllib.parse import unquote_to_bytes

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from vllm_agent_hint.frontend.fail_open import name_once
from vllm_agent_hint.hints import HintError, as_hint_error

# As vLLM names them.
_TYPES: Final = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.CONFLICT: "ConflictError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}

Responses: TypeAlias = dict[int | str, dict[str, Any]]
"""What a status means, for the OpenAPI schema."""
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class RefusedError(Exception):
    """A question that is answered with an error.

    Args:
        status: Of the response.
        message: What is wrong, and the cure.
        param: The field or parameter that it is about.
    """

    def __init__(self, status: HTTPStatus, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    def response(self) -> JSONResponse:
        error = ErrorInfo(
            message=self.message,
            type=_TYPES[self.status],
            param=self.param,
            code=self.status.value,
        )
        return JSONResponse(ErrorResponse(error=error).model_dump(), self.status.value)


class AgentHintRoute(APIRoute):
    """A route whose errors are all of that shape.

    vLLM's own handler of validation errors sends back what the client sent.
    """

    def get_route_handler(self) -> Handler:
        stock = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                _check_encoding(request)
                return await stock(request)
            except RefusedError as refused:
                return refused.response()
            except HintError as error:
                return _bad(error).response()
            except RequestValidationError as error:
                return _bad(_first_of(error)).response()
            except HTTPException as error:
                if error.status_code != HTTPStatus.BAD_REQUEST:
                    raise
                return _bad(HintError("body", "must be a JSON object, in UTF-8")).response()
            except Exception:
                name_once("a route of /v1/agent_hint failed; it answers 500")
                return RefusedError(
                    HTTPStatus.INTERNAL_SERVER_ERROR, "vllm-agent-hint failed; see the log"
                ).response()

        return handle


def agent_hint_router(responses: Responses) -> APIRouter:
    """Routes whose errors are all of that shape, and say so in the OpenAPI schema.

    Args:
        responses: Errors beyond those that every route can answer.
    """
    return APIRouter(
        prefix="/v1/agent_hint",
        tags=["agent_hint"],
        route_class=AgentHintRoute,
        responses={
            400: {"model": ErrorResponse, "description": "`param` names the field to correct."},
            401: {"description": "An `--api-key` is wanted, in `Authorization: Bearer`."},
            **responses,
            # Without this FastAPI would promise a 422, which vLLM never sends.
            "default": {"model": ErrorResponse, "description": "Any other error."},
        },
    )


def _first_of(error: RequestValidationError) -> HintError:
    """The first error, by the field's own name: clients know of no path, query or body of ours."""
    first = error.errors()[0]
    where, *path = first["loc"]
    if first["type"] == "json_invalid" or not path:
        path = [where]
    return as_hint_error({**first, "loc": path})


def _bad(error: HintError) -> RefusedError:
    return RefusedError(HTTPStatus.BAD_REQUEST, error.message, error.field)


def _check_encoding(request: Request) -> None:
    """Refuse what the server would decode to something else than was sent.

    A byte that is no UTF-8 becomes U+FFFD, which is a good character of an id: the request would
    be about another session.
    """
    for part, field in (("raw_path", "session_id"), ("query_string", "query")):
        try:
            unquote_to_bytes(request.scope.get(part) or b"").decode()
        except UnicodeDecodeError:
            message = "must be percent-encoded UTF-8"
            raise RefusedError(HTTPStatus.BAD_REQUEST, message, field) from None
