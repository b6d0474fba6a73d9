"""Carrying a hint to the engine, whatever route it came by.

``SamplingParams.extra_args`` is the one channel to the engine that all vLLM versions and routes
share. A hint that a door has read (see ``doors``) waits in a context variable until
``to_sampling_params`` stamps it there. ``process_inputs``, which every Python route into the
engine passes, validates what came by another way (offline, token-in) and stamps it for the
default tenant.

The functions with the signature ``(wrapped, instance, args, kwargs)`` are wrapt wrappers, named
in the table of ``seams.py``. Without a hint each costs a look-up or two.
"""

import copy
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from vllm.exceptions import VLLMValidationError

from vllm_agent_hint.frontend.fail_open import name_once
from vllm_agent_hint.frontend.identity import SESSION_FIELD, outside_identity
from vllm_agent_hint.frontend.spreading import may_spread_unseen
from vllm_agent_hint.hints import (
    HINT_KEY,
    AgentHintParams,
    HintError,
    OutsideIdentity,
    parse_agent_hint,
)
from vllm_agent_hint.settings import load_settings
from vllm_agent_hint.stamp import DEFAULT_TENANT, STAMP_KEY, Stamp, open_stamp

_MANAGE_FIELD: Final = f"{HINT_KEY}.context_management.manage_request"
_MANAGE_CURE: Final = (
    "a management request runs no model, and this route always does; send it to "
    "/v1/chat/completions, /v1/completions, /v1/responses or /v1/messages, or offline call "
    "vllm_agent_hint.manage(llm, hint)"
)


@dataclass(frozen=True, slots=True)
class CarriedHint:
    """The valid hint of one request on its way to the engine.

    Args:
        hint: What the client said.
        operation_id: Names the hint's effects, in the answer and in the engine.
        engine_requests: How many requests the engine makes of it (``n`` times the prompts): the
            edits run once, after the last of them has succeeded.
        tenant: Whose session it is.
        may_spread: Whether those requests may run on several engines.
    """

    hint: AgentHintParams
    operation_id: str
    engine_requests: int
    tenant: str = DEFAULT_TENANT
    may_spread: bool = False

    @property
    def report(self) -> dict[str, Any]:
        """What the reply says of it: the name under which its effects can be asked for."""
        return {"session_id": self.hint.session_id, "operation_id": self.operation_id}

    def put_into(self, extra_args: dict[str, Any] | None) -> dict[str, Any]:
        """``SamplingParams.extra_args`` with the hint stamped: plain data, for msgpack.

        Without it where no engine of ours would take it off again: vLLM logs what it is left.
        """
        if not load_settings().sam:
            return _without_hint(extra_args or {})
        stamp = Stamp(
            self.hint.model_dump(mode="json", exclude_none=True),
            self.tenant,
            self.operation_id,
            self.engine_requests,
            self.may_spread,
        )
        return {**_without_hint(extra_args or {}), STAMP_KEY: stamp.sealed()}


carried: Final[ContextVar[CarriedHint | None]] = ContextVar("agent_hint_carried", default=None)
"""The hint of the HTTP request that this task answers, while vLLM prepares it for the engine."""


def new_operation_id() -> str:
    """Unique over all front ends, and no client can guess another one's."""
    return uuid.uuid4().hex


def hint_in_body(request: Any) -> Any:
    """The raw ``agent_hint`` of a request body: an extra field to vLLM's request models."""
    extra = getattr(request, "model_extra", None)
    return extra.get(HINT_KEY) if extra else None


def to_sampling_params(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``to_sampling_params`` of the chat, completion and Responses request.

    Stock: makes ``SamplingParams`` whose ``extra_args`` *is* the request's ``vllm_xargs``.
    Ours: gives them an ``extra_args`` of their own, with the hint in it. A body that came through
    none of our doors (rendering alone, for another server to run) has its hint validated here and
    sent on without a stamp: ``process_inputs``, there, will read it.
    If it moves: hints in bodies are validated, then lost.
    """
    params = wrapped(*args, **kwargs)
    ours = carried.get()
    if ours is not None:
        params.extra_args = ours.put_into(params.extra_args)
    elif (raw := hint_in_body(instance)) is not None:
        params.extra_args = _with_plain_hint(raw, instance, params.extra_args or {})
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
    identity = outside_identity(kwargs.get(SESSION_FIELD), None, extra_args)
    try:
        engine_requests = params.n or 1
        may_spread = engine_requests > 1 and may_spread_unseen(
            instance.vllm_config.parallel_config, kwargs.get("data_parallel_rank")
        )
        params.extra_args = _stamped(extra_args, identity, engine_requests, may_spread)
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


def _with_plain_hint(raw: Any, request: Any, extra_args: dict[str, Any]) -> dict[str, Any]:
    identity = outside_identity(getattr(request, SESSION_FIELD, None), None, extra_args)
    try:
        hint = parse_agent_hint(raw, identity=identity)
    except HintError as error:
        raise as_client_error(error) from None
    except Exception:
        name_once("reading a hint for another server failed; the request goes on without it")
        return _without_hint(extra_args)
    return {**_without_hint(extra_args), HINT_KEY: hint.model_dump(mode="json", exclude_none=True)}


def _stamped(
    extra_args: dict[str, Any],
    identity: OutsideIdentity | None,
    engine_requests: int,
    may_spread: bool,
) -> dict[str, Any]:
    """The arguments of a request that came through no door, its hint validated.

    It belongs to the default tenant, and a stamp that we did not make is dropped.

    Raises:
        HintError: The caller has to correct the hint.
    """
    if extra_args.get(HINT_KEY) is None:
        return _without_hint(extra_args)
    hint = parse_agent_hint(extra_args[HINT_KEY], identity=identity)
    if hint.manages:
        raise HintError(_MANAGE_FIELD, _MANAGE_CURE)
    ours = CarriedHint(hint, new_operation_id(), engine_requests, may_spread=may_spread)
    return ours.put_into(extra_args)


def _without_hint(extra_args: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in extra_args.items() if k not in (HINT_KEY, STAMP_KEY)}
