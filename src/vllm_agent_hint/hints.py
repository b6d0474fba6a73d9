"""The wire schema: what a client may put under ``agent_hint``, and what it gets back.

Source: vLLM RFC #52113, section 1. The models are strict (no ``"300"`` for a number) and
closed (an unknown field is an error), since a hint that is silently ignored is worse than
one that is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vllm_agent_hint.settings import Settings, load_settings

HINT_KEY: Final = "agent_hint"
"""Where a hint stands in a request body and in ``SamplingParams.extra_args``."""

MAX_TTL_SECONDS: Final = 3600.0
MAX_ID_LENGTH: Final = 256
MAX_EDITS: Final = 16
MAX_WAIT_SECONDS: Final = 60.0


class HintError(ValueError):
    """A hint that a client has to correct: HTTP 400.

    Args:
        field: Path of the offending field, such as ``agent_hint.cache_control.ttl``.
        message: What is wrong and how to cure it. Never repeats what the client sent.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def _check_printable(value: str) -> str:
    if not value.isprintable():
        raise PydanticCustomError(
            "not_printable", "must hold printable characters only (no control characters)"
        )
    return value


Identity = Annotated[
    str, Field(min_length=1, max_length=MAX_ID_LENGTH), AfterValidator(_check_printable)
]
ResumeSeconds = Annotated[float, Field(ge=0, le=MAX_TTL_SECONDS, allow_inf_nan=False)]
WaitSeconds = Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False)]
BlockIndex = Annotated[int, Field(ge=0, lt=2**31)]


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


_Model = TypeVar("_Model", bound=_Wire)


class CacheControlParams(_Wire):
    """How long the request's cacheable prefix is worth keeping after it ends.

    Args:
        type: Only ``"ephemeral"`` exists.
        ttl: Seconds, 0 to 3600. 0 drops the lease and keeps the session's association.
        block_offset: Protect only the logical blocks before this one. Needs
            ``VLLM_AGENT_HINT_RANGES``.
    """

    type: Literal["ephemeral"] = "ephemeral"
    ttl: float = Field(default=300.0, ge=0, le=MAX_TTL_SECONDS, allow_inf_nan=False)
    block_offset: BlockIndex | None = None


class EditType(StrEnum):
    OFFLOAD = "offload"
    PREFETCH = "prefetch"
    EVICT = "evict"


class ContextEdit(_Wire):
    """One operation on the context that is recorded for the session.

    Args:
        type: ``"offload"``, ``"prefetch"`` or ``"evict"``.
        block_start: First logical block of a range; with ``block_end`` or not at all. Needs
            ``VLLM_AGENT_HINT_RANGES``.
        block_end: End of the range, exclusive.
        include_children: ``evict`` only: frees the session and every session below it, children
            first.
    """

    type: Literal["offload", "prefetch", "evict"]
    block_start: BlockIndex | None = None
    block_end: BlockIndex | None = None
    include_children: bool = False

    @model_validator(mode="after")
    def _addresses_something(self) -> Self:
        if (self.block_start is None) != (self.block_end is None):
            missing = "block_end" if self.block_end is None else "block_start"
            raise PydanticCustomError(
                "half_a_range",
                "is missing: block_start and block_end are sent together, or neither for the "
                "whole context",
                {"field": missing},
            )
        if self.block_start is not None and self.block_end is not None:
            if self.block_end <= self.block_start:
                raise PydanticCustomError(
                    "empty_range",
                    "must be greater than block_start; the range is half open",
                    {"field": "block_end"},
                )
            if self.include_children:
                raise PydanticCustomError(
                    "range_of_a_tree",
                    "has no range; omit block_start and block_end, or include_children",
                    {"field": "include_children"},
                )
        if self.include_children and self.type != "evict":
            raise PydanticCustomError(
                "children_of_a_transfer",
                "belongs to evict only; send the edit once per session instead",
                {"field": "include_children"},
            )
        return self

    @property
    def has_range(self) -> bool:
        return self.block_start is not None


class ContextManagementParams(_Wire):
    """Edits, and when to run them.

    Args:
        manage_request: ``True``: run the edits now and answer without the model.
            ``False``: run them after this request has succeeded.
        edits: At most 16 (or what the server's ``VLLM_AGENT_HINT_MAX_EDITS`` says), applied in
            this order.
        wait_seconds: With ``manage_request``: answer once ``offload`` and ``prefetch`` have
            ended, or after so many seconds, 0 to 60. 0 answers at once; what has not ended is
            ``"pending"`` then, and ``operation_id`` can be asked for.
    """

    manage_request: bool = False
    edits: list[ContextEdit] = Field(default_factory=list, max_length=MAX_EDITS)
    wait_seconds: WaitSeconds = 0.0

    @model_validator(mode="after")
    def _waits_for_something(self) -> Self:
        if self.wait_seconds and not self.manage_request:
            raise PydanticCustomError(
                "wait_for_nothing",
                "belongs to manage_request only: other edits run after the answer",
                {"field": "wait_seconds"},
            )
        return self


class AgentHintParams(_Wire):
    """What an agent runtime knows about the future of a request's KV cache.

    Args:
        session_id: The agent session, 1 to 256 printable characters.
        parent_session_id: The session that started this one; never itself.
        cache_control: Retention of this request's prefix. Without a ``session_id`` it
            protects the prefix under an anonymous session that ends with its lease.
        context_management: Edits of the session's recorded context.
        expected_resume_seconds: When the session will be back, counted from the end of this
            request, 0 to 3600. What of its context lies in a KV connector only is brought shortly
            before, if there is room that nobody else needs. (Past the RFC.)
    """

    session_id: Identity | None = None
    parent_session_id: Identity | None = None
    cache_control: CacheControlParams | None = None
    context_management: ContextManagementParams | None = None
    expected_resume_seconds: ResumeSeconds | None = None

    @model_validator(mode="after")
    def _identities_agree(self) -> Self:
        if self.session_id is None:
            if self.parent_session_id is not None:
                raise PydanticCustomError(
                    "parent_without_session",
                    "is missing: parent_session_id needs a session_id beside it",
                    {"field": "session_id"},
                )
            if self.edits or self.manages:
                raise PydanticCustomError(
                    "edits_without_session",
                    "is missing: context_management needs one, since an edit applies to a session",
                    {"field": "session_id"},
                )
            if self.expected_resume_seconds is not None:
                raise PydanticCustomError(
                    "resume_without_session",
                    "is missing: expected_resume_seconds needs one, since a session comes back",
                    {"field": "session_id"},
                )
        elif self.manages and self.cache_control is not None:
            raise PydanticCustomError(
                "cache_control_of_nothing",
                "has no effect beside manage_request, which computes no prefix; send it with a "
                "request that does",
                {"field": "cache_control"},
            )
        elif self.parent_session_id == self.session_id:
            raise PydanticCustomError("own_parent", "parent_session_id must differ from session_id")
        return self

    @property
    def manages(self) -> bool:
        """Whether the request is answered without running the model."""
        return self.context_management is not None and self.context_management.manage_request

    @property
    def edits(self) -> list[ContextEdit]:
        return self.context_management.edits if self.context_management else []


class EditStatus(StrEnum):
    """The outcome of one edit."""

    APPLIED = "applied"
    PARTIAL = "partial"
    CLIPPED = "clipped"
    PENDING = "pending"
    UNSUPPORTED = "unsupported"
    MISSING = "missing"
    REJECTED = "rejected"
    FAILED = "failed"


class EditResult(_Wire):
    """What became of one edit.

    Args:
        type: The edit's own ``type``.
        status: The outcome.
        blocks: Recorded KV blocks that the edit acted on.
        tokens: The same in prompt tokens, in the KV cache group that holds most.
        beyond_range: Recorded blocks behind the range of an ``evict`` whose claim ended with it,
            since they can't be hit any more.
        reason: The outcome in words; empty where ``status`` says it all.
    """

    model_config = ConfigDict(strict=False)

    type: EditType
    status: EditStatus
    blocks: int = 0
    tokens: int = 0
    beyond_range: int = 0
    reason: str = ""


class RetentionResult(_Wire):
    """What became of the retention that an ordinary request asked for.

    Args:
        status: ``"applied"``, ``"clipped"``, ``"missing"`` (nothing of it is in the cache) or
            ``"rejected"`` (there was no room for its session).
        blocks: KV blocks recorded for its session's prompt.
        tokens: The same in prompt tokens, in the KV cache group that holds most.
        bounds: Names of the settings that have clipped it.
        reason: The outcome in words.
    """

    model_config = ConfigDict(strict=False)

    status: EditStatus
    blocks: int = 0
    tokens: int = 0
    bounds: list[str] = Field(default_factory=list)
    reason: str = ""


_CURES: Final[dict[str, str]] = {
    "extra_forbidden": "unknown field; remove it or correct its name",
    "model_type": "must be a JSON object",
    "model_attributes_type": "must be a JSON object",
}


@dataclass(frozen=True, slots=True)
class OutsideIdentity:
    """A session named beside the hint: vLLM's own ``session_id``, in one of its places.

    Args:
        value: What stood there; not validated.
        place: Where, for error messages.
    """

    value: Any
    place: str


_IDENTITY: Final = TypeAdapter[str](Identity)


def parse_agent_hint(
    value: Any,
    *,
    field: str = "agent_hint",
    settings: Settings | None = None,
    identity: OutsideIdentity | None = None,
) -> AgentHintParams:
    """Validate a hint in any of the forms in which it travels.

    Args:
        value: A mapping, the same as a JSON string (``vllm_xargs`` carries no objects), or
            an ``AgentHintParams``.
        field: Where the hint stood, for error messages.
        settings: What the server allows; this process's own by default.
        identity: Names the session of a hint that doesn't.

    Raises:
        HintError: Naming the first offending field and its cure.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise HintError(field, "must be a JSON object, or a string that holds one") from None
    if identity is not None:
        value = _with_session(value, identity)
    if isinstance(value, AgentHintParams):
        hint = value
    else:
        hint = validated(AgentHintParams, value, field=field)
    _check_allowed(hint, field, settings or load_settings())
    return hint


def _with_session(value: Any, identity: OutsideIdentity) -> Any:
    """The hint with a ``session_id``, its own one if it has any; other values are left alone."""
    if isinstance(value, AgentHintParams):
        value = value.model_dump(exclude_unset=True)
    if not isinstance(value, Mapping) or value.get("session_id") is not None:
        return value
    try:
        session_id = _IDENTITY.validate_python(identity.value, strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise HintError(identity.place, f"as the hint's session_id: {first['msg']}") from None
    return {**value, "session_id": session_id}


def validated(model: type[_Model], value: Any, *, field: str) -> _Model:
    """Validate one of the models of this module.

    Raises:
        HintError: Naming the first offending field and its cure.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise as_hint_error(first, field) from None


def as_hint_error(error: Mapping[str, Any], field: str | None = None) -> HintError:
    """One of pydantic's errors as ours.

    Args:
        error: As ``ValidationError.errors`` lists it.
        field: Where the value stood that was validated; None where its place says enough.
    """
    # A rule over several fields is reported at their object; it says which one to correct.
    own = [error["ctx"]["field"]] if "field" in error.get("ctx", {}) else []
    path = ".".join([*filter(None, [field]), *map(_printable, error["loc"]), *own])
    return HintError(path, _CURES.get(error["type"], error["msg"]))


def _check_allowed(hint: AgentHintParams, field: str, settings: Settings) -> None:
    """Refuse what the schema knows and this server does not offer."""
    control = hint.cache_control
    if control and control.block_offset is not None and not settings.ranges:
        raise HintError(f"{field}.cache_control.block_offset", _RANGES_CURE)
    check_edits_allowed(hint.edits, f"{field}.context_management.edits", settings)


def check_edits_allowed(edits: Sequence[ContextEdit], field: str, settings: Settings) -> None:
    """Refuse edits that this server does not offer.

    Raises:
        HintError: Naming the field, and the flag that decides.
    """
    if len(edits) > settings.max_edits:
        raise HintError(
            field,
            f"holds {len(edits)} edits; this server takes {settings.max_edits} per request "
            "(VLLM_AGENT_HINT_MAX_EDITS)",
        )
    for k, edit in enumerate(edits):
        if edit.has_range and not settings.ranges:
            raise HintError(f"{field}.{k}.block_start", _RANGES_CURE)


_RANGES_CURE: Final = (
    "block ranges are off; omit them to address the whole context, or start the server with "
    "VLLM_AGENT_HINT_RANGES=1"
)


def _printable(part: int | str) -> str:
    """A path element that is safe to send back: unknown field names are the client's own."""
    return ascii(part)[1:-1][:64] if isinstance(part, str) else str(part)
