"""Carrying a hint from a request body, or from ``SamplingParams``, to the engine.

The way of a hint: ``create_chat_completion`` or ``create_completion`` finds it in the body and
validates it before anything else runs; ``to_sampling_params`` puts it into ``extra_args``, the
one channel to the engine that all vLLM versions and routes share; ``process_inputs``, which every
Python route into the engine passes, validates what came there by another way (offline,
``vllm_xargs``, token-in) and makes it plain data.

The functions with the signature ``(wrapped, instance, args, kwargs)`` are wrapt wrappers, named
in the table of ``seams.py``. Without a hint each costs a look-up or two.
"""

import copy
import uuid
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from vllm.exceptions import VLLMValidationError

from vllm_agent_hint.frontend.fail_open import name_once
from vllm_agent_hint.hints import HINT_KEY, AgentHintParams, HintError, parse_agent_hint
from vllm_agent_hint.stamp import DEFAULT_TENANT, STAMP_KEY, Stamp, open_stamp

_MANAGE_FIELD: Final = f"{HINT_KEY}.context_management.manage_request"
_MANAGE_CURE: Final = (
    "a management request runs no model, and this route always does; send it as the field "
    "agent_hint of /v1/chat/completions or /v1/completions, or offline call "
    "vllm_agent_hint.manage(llm, hint)"
)
_BEAM_SEARCH_CURE: Final = (
    "edits can't wait for a beam search, whose requests carry no hint; turn use_beam_search off, "
    "or send the edits on their own with manage_request: true"
)


@dataclass(frozen=True, slots=True)
class CarriedHint:
    """The valid hint of one HTTP request on its way to ``to_sampling_params``.

    Args:
        hint: What the client said.
        operation_id: Names the hint's edits, in the answer and in the engine.
        engine_requests: How many requests the engine makes of it (``n`` times the prompts): the
            edits run once, after the last of them has succeeded.
        tenant: Whose session it is.
    """

    hint: AgentHintParams
    operation_id: str
    engine_requests: int
    tenant: str = DEFAULT_TENANT

    def put_into(self, extra_args: dict[str, Any] | None) -> dict[str, Any]:
        """``SamplingParams.extra_args`` with the hint stamped: plain data, for msgpack."""
        stamp = Stamp(
            self.hint.model_dump(mode="json", exclude_none=True),
            self.tenant,
            self.operation_id,
            self.engine_requests,
        )
        others = {k: v for k, v in (extra_args or {}).items() if k not in (HINT_KEY, STAMP_KEY)}
        return {**others, STAMP_KEY: stamp.sealed()}


_carried: ContextVar[CarriedHint | None] = ContextVar("agent_hint_carried", default=None)


def create_chat_completion(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``OpenAIServingChat.create_chat_completion(request, raw_request=None)``, a coroutine.

    Stock: renders the messages and runs the model; ``agent_hint`` lies unread in the body.
    Ours: refuses a bad hint with a 400 first, answers management requests without the model,
    and carries any other hint to ``to_sampling_params``.
    If it moves: hints in chat bodies go unread, unvalidated too.
    """
    return _create("chat", wrapped, instance, args, kwargs)


def create_completion(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``OpenAIServingCompletion.create_completion(request, raw_request=None)``, a coroutine.

    The same as for chat, for ``/v1/completions``.
    """
    return _create("completion", wrapped, instance, args, kwargs)


def to_sampling_params(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``ChatCompletionRequest.to_sampling_params`` and ``CompletionRequest.to_sampling_params``.

    Stock: makes ``SamplingParams`` whose ``extra_args`` *is* the request's ``vllm_xargs``.
    Ours: gives them an ``extra_args`` of their own, with the hint in it. A body that came
    by another route than the two above (batched chat) has its hint validated here.
    If it moves: hints in bodies are validated, then lost.
    """
    params = wrapped(*args, **kwargs)
    carried = _carried.get()
    if carried is None:
        raw = _hint_in_body(instance)
        if raw is None:
            return params
        carried = _prepare_or_none(raw, instance)
        if carried is None:
            return params
    params.extra_args = carried.put_into(params.extra_args)
    return params


def process_inputs(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``InputProcessor.process_inputs(request_id, prompt, params, ...)``, offline and online.

    Stock: validates and clones ``params`` and makes the engine's request of them.
    Ours: validates a hint in ``params.extra_args`` and hands stock a shallow copy of the
    params whose hint is plain data. The caller's object is never written to.
    If it moves: a hint that didn't come in a body reaches the engine unvalidated, where a
    bad one is ignored.
    """
    params: Any = kwargs["params"] if "params" in kwargs else args[2] if len(args) > 2 else None
    extra_args = getattr(params, "extra_args", None)
    if not extra_args or not (STAMP_KEY in extra_args or extra_args.get(HINT_KEY) is not None):
        return wrapped(*args, **kwargs)
    if open_stamp(extra_args.get(STAMP_KEY)) is not None:
        return wrapped(*args, **kwargs)
    params = copy.copy(params)
    try:
        params.extra_args = _stamped(extra_args, params.n or 1)
    except HintError as error:
        raise as_client_error(error) from None
    except Exception:
        name_once("reading a hint in SamplingParams failed; the request runs without it")
        params.extra_args = _without_hint(extra_args)
    if "params" in kwargs:
        kwargs = {**kwargs, "params": params}
    else:
        args = (*args[:2], params, *args[3:])
    return wrapped(*args, **kwargs)


def as_client_error(error: HintError) -> VLLMValidationError:
    """What vLLM answers with a 400 whose ``param`` is the field. Holds nothing the client sent."""
    return VLLMValidationError(error.message, parameter=error.field)


def _create(
    api: str,
    wrapped: Callable[..., Any],
    serving: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Called for every request: returns stock's coroutine untouched where there is no hint."""
    request = args[0] if args else kwargs.get("request")
    raw = _hint_in_body(request)
    if raw is not None:
        return _create_hinted(api, raw, request, wrapped, serving, args, kwargs)
    xargs = getattr(request, "vllm_xargs", None)
    if xargs and xargs.get(HINT_KEY) is not None:
        return _create_hinted(None, xargs[HINT_KEY], request, wrapped, serving, args, kwargs)
    return wrapped(*args, **kwargs)


async def _create_hinted(
    api: str | None,
    raw: Any,
    request: Any,
    wrapped: Callable[..., Coroutine[Any, Any, Any]],
    serving: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Answer a request that has a hint.

    Args:
        api: The API in whose shape a management request is answered; ``None`` where the hint
            came in ``vllm_xargs``, which other APIs and front ends share, so that the shape
            isn't known and management is refused.
    """
    carried = _prepare_or_none(raw, request)
    if carried is None:
        return await wrapped(*args, **kwargs)
    if carried.hint.manages:
        if api is None:
            raise VLLMValidationError(_MANAGE_CURE, parameter=_MANAGE_FIELD)
        from vllm_agent_hint.frontend import management

        raw_request = args[1] if len(args) > 1 else kwargs.get("raw_request")
        return await management.answer(
            api, serving, request, raw_request, carried.hint, carried.operation_id
        )
    token = _carried.set(carried)
    try:
        return await wrapped(*args, **kwargs)
    finally:
        _carried.reset(token)


def _hint_in_body(request: Any) -> Any:
    """The raw ``agent_hint`` of a request body: an extra field to vLLM's request models."""
    extra = getattr(request, "model_extra", None)
    return extra.get(HINT_KEY) if extra else None


def _prepare_or_none(raw: Any, request: Any) -> CarriedHint | None:
    """Validate the hint of a body; ``None`` where our own code fails.

    Raises:
        VLLMValidationError: The client has to correct the hint.
    """
    try:
        hint = parse_agent_hint(raw)
        if hint.edits and not hint.manages and getattr(request, "use_beam_search", False):
            raise HintError("use_beam_search", _BEAM_SEARCH_CURE)
        return CarriedHint(
            hint=hint,
            operation_id=uuid.uuid4().hex,
            engine_requests=_count_engine_requests(request),
        )
    except HintError as error:
        raise as_client_error(error) from None
    except Exception:
        name_once("reading agent_hint in a request body failed; the request runs without it")
        return None


def _count_engine_requests(request: Any) -> int:
    """``n`` times the number of prompts (a chat body has one, a completion body any number)."""
    prompts = sum(
        _count_prompts(getattr(request, field, None)) for field in ("prompt", "prompt_embeds")
    )
    return (request.n or 1) * max(prompts, 1)


def _count_prompts(prompt: Any) -> int:
    if prompt is None:
        return 0
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        return len(prompt)
    return 1


def _stamped(extra_args: dict[str, Any], engine_requests: int) -> dict[str, Any]:
    """The arguments of a request that did not come through a body, its hint validated.

    It belongs to the default tenant, and a stamp that we did not make is dropped.

    Raises:
        HintError: The caller has to correct the hint.
    """
    if extra_args.get(HINT_KEY) is None:
        return _without_hint(extra_args)
    hint = parse_agent_hint(extra_args[HINT_KEY])
    if hint.manages:
        raise HintError(_MANAGE_FIELD, _MANAGE_CURE)
    return CarriedHint(hint, uuid.uuid4().hex, engine_requests).put_into(extra_args)


def _without_hint(extra_args: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in extra_args.items() if k not in (HINT_KEY, STAMP_KEY)}
