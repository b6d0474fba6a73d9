"""Management requests: edits that run now, answered without the model.

The answer has the shape of the API that the request came through, an empty assistant turn, with
the results in a top-level ``agent_hint``: any client of that API can parse it, and nothing but a
client that asks for the results sees a difference.
"""

from collections.abc import AsyncGenerator, Sequence
from http import HTTPStatus
from typing import Any, Protocol

from vllm_agent_hint.frontend.carry import CarriedHint
from vllm_agent_hint.frontend.engine_calls import (
    await_transfers,
    call_engines,
    edit_call,
    merge_results,
)
from vllm_agent_hint.frontend.fail_open import name_once
from vllm_agent_hint.frontend.own_prompt import Renders, render_own_prompts


class Shape(Renders, Protocol):
    """How one API spells an answer that says nothing, and a prompt."""

    def streams(self, request: Any) -> bool:
        """Whether the client is to get a stream."""

    def empty_reply(self, turn: "EmptyTurn", report: dict[str, Any]) -> Any:
        """The response of a request that isn't streamed, as the API's router takes it."""

    def empty_events(self, turn: "EmptyTurn", report: dict[str, Any]) -> Sequence[Any]:
        """The same as a stream, as the API's router takes it, the report on the last event of
        substance.
        """


class EmptyTurn:
    """What the answer to a management request repeats of the request.

    Args:
        serving: vLLM's handler of the API.
        request: The body, as vLLM parsed it.
        raw_request: FastAPI's request, or None.
    """

    def __init__(self, serving: Any, request: Any, raw_request: Any) -> None:
        self.serving = serving
        self.request = request
        self._raw_request = raw_request

    @property
    def model(self) -> str:
        name: str = self.serving.models.model_name(self.serving._maybe_get_adapters(self.request))
        return name

    @property
    def request_id(self) -> str:
        """From the header ``X-Request-Id``, the body, or made up: vLLM's own order."""
        in_body = getattr(self.request, "request_id", None)
        request_id: str = self.serving._base_request_id(self._raw_request, in_body)
        return request_id


async def answer(
    shape: Shape, serving: Any, request: Any, raw_request: Any, ours: CarriedHint
) -> Any:
    """Run the edits on every engine and answer; no model runs.

    Nothing is rendered but for a prefetch from a KV connector: see ``own_prompt``.

    Args:
        shape: The API's.
        serving: vLLM's handler of the API.
        request: The body, as vLLM parsed it.
        raw_request: FastAPI's request, or None.
        ours: The body's hint.

    Returns:
        What the API's router takes: its response, a generator of a stream, or an error (an
        unknown model, a prompt that is too long, as for any request).
    """
    wrong_model = await serving._check_model(request)
    if wrong_model is not None:
        return wrong_model
    prompts = await render_own_prompts(shape, serving, request, ours.hint)
    if getattr(prompts, "error", None) is not None:
        return prompts
    try:
        turn = EmptyTurn(serving, request, raw_request)
        results = await _run_edits(serving, request, ours, prompts)
        report = {**ours.report, "results": results}
        if shape.streams(request):
            return _stream(shape.empty_events(turn, report))
        return shape.empty_reply(turn, report)
    except Exception:
        # Running the model instead would do what the client asked not to be done.
        name_once("answering a management request failed; they get a 501")
        return serving.create_error_response(
            "agent_hint management requests can't be answered by this vLLM",
            err_type="NotImplementedError",
            status_code=HTTPStatus.NOT_IMPLEMENTED,
        )


async def _stream(events: Sequence[Any]) -> AsyncGenerator[Any, None]:
    for event in events:
        yield event


async def _run_edits(
    serving: Any, request: Any, ours: CarriedHint, prompts: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    if not ours.hint.edits:
        return []
    salt = getattr(request, "cache_salt", None)
    payload = edit_call(ours.hint, salt, ours.operation_id, tenant=ours.tenant, prompts=prompts)
    client = serving.engine_client
    results = merge_results(await call_engines(client, payload))
    management = ours.hint.context_management
    if management is not None and management.wait_seconds:
        results = await await_transfers(
            client, results, ours.operation_id, ours.tenant, management.wait_seconds
        )
    return [result.model_dump(mode="json") for result in results]
