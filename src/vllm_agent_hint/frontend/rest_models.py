"""What goes over the wire at ``/v1/agent_hint``; OpenAPI's page is made of it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from vllm_agent_hint.hints import MAX_EDITS, ContextEdit, EditResult, WaitSeconds
from vllm_agent_hint.sessions.facts import MAX_TOOL_NAME, MAX_TOOLS, Ended

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000

CacheSalt = Annotated[
    str,
    StringConstraints(min_length=1),
    Field(description="The cache_salt of the session's prompts, if any: a part of its name."),
]
SessionIdShown = Annotated[str, Field(description="The session, as it named itself.")]
HasCacheSalt = Annotated[
    bool,
    Field(description="Whether a cache_salt is a part of its name. Which one is never shown."),
]
ParentShown = Annotated[str | None, Field(description="The session that started it, if any.")]
OperationIdShown = Annotated[
    str, Field(description="32 hexadecimal digits; ask for it at `/operations`.")
]
OperationIdAsked = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
ToolName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TOOL_NAME)]
Cursor = Annotated[
    str,
    StringConstraints(min_length=1, max_length=4096),
    Field(description="`next` of the page before; omit it for the first page."),
]


class _Asked(BaseModel):
    """Closed, as the hint itself is: a misspelt field is an error, not a wish unheard."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ListQuery(_Asked):
    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT, description="Sessions per page.")] = (
        DEFAULT_LIMIT
    )
    after: Cursor | None = None


class SaltQuery(_Asked):
    cache_salt: CacheSalt | None = None


class FreeQuery(SaltQuery):
    include_children: Annotated[
        bool, Field(description="Free every session below it as well, children first.")
    ] = False


class NoQuery(_Asked):
    """Nothing can be asked for."""


class EditRequest(_Asked):
    model_config = ConfigDict(strict=True)

    edits: Annotated[
        list[ContextEdit],
        Field(max_length=MAX_EDITS, description="Run now, in this order."),
    ]
    cache_salt: CacheSalt | None = None
    wait_seconds: Annotated[
        WaitSeconds,
        Field(description="Answer once transfers have ended, or after so many seconds."),
    ] = 0.0


class TurnRequest(_Asked):
    model_config = ConfigDict(strict=True)

    ended: Annotated[
        Ended,
        Field(
            description="`tool_call`: you run a tool and come back. `final_message`: nothing is "
            "left to do for now. `cut`: it ran out of tokens. `disconnected`: you did not wait."
        ),
    ]
    tools: Annotated[
        list[ToolName],
        Field(max_length=MAX_TOOLS, description="Names of the tools called, first to last."),
    ] = []
    operation_id: Annotated[
        OperationIdAsked | None,
        Field(description="Of the turn, as in its reply; without it, the session's last."),
    ] = None
    cache_salt: CacheSalt | None = None


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True)


class EngineState(_Told):
    engine: Annotated[int, Field(description="Data-parallel index.")]
    active: Annotated[bool, Field(description="Whether hints have an effect on this engine.")]
    reason: Annotated[str, Field(description="Why they have none.")] = ""
    sessions: Annotated[
        int,
        Field(description="Your own sessions here. One on several engines counts on each."),
    ] = 0


class Features(_Told):
    sam: Annotated[bool, Field(description="Sessions and leases.")]
    ranges: Annotated[bool, Field(description="block_offset, block_start and block_end.")]
    pooling: Annotated[bool, Field(description="offload and prefetch through a KV connector.")]
    shadow: Annotated[bool, Field(description="Accounts are kept and no order changes.")]
    auto: Annotated[bool, Field(description="The server sees by itself how turns end.")]
    capture: Annotated[bool, Field(description="Traffic may be recorded.")]


class Bounds(_Told):
    max_id_length: Annotated[int, Field(description="Characters of a session id.")]
    max_ttl: Annotated[float, Field(description="Seconds; a longer ttl is clipped.")]
    max_edits: Annotated[int, Field(description="Edits per request; more are a 400.")]
    max_depth: Annotated[int, Field(description="Sessions above one another.")]
    max_sessions: Annotated[int, Field(description="Sessions per engine, of all together.")]
    max_lineages: Annotated[int, Field(description="Prompts that one session runs side by side.")]
    max_protections: Annotated[int, Field(description="Leases on one prompt.")]
    max_records: Annotated[int, Field(description="Blocks recorded, once per session.")]
    max_operations: Annotated[
        int, Field(description="Results kept per engine, of all clients together.")
    ]
    protected_share: Annotated[float, Field(description="Of the KV cache, for all sessions.")]
    tenant_share: Annotated[float, Field(description="Part of it for the sessions of one tenant.")]
    associated_seconds: Annotated[
        float, Field(description="For which a session without a lease keeps its blocks, at most.")
    ]
    idle_seconds: Annotated[float, Field(description="Until a session without a lease is freed.")]


class State(_Told):
    version: Annotated[str, Field(description="Of vllm-agent-hint.")]
    vllm_version: Annotated[str | None, Field(description="Null where it can't be told.")]
    active: Annotated[bool, Field(description="Whether hints have an effect on every engine.")]
    engines: Annotated[list[EngineState], Field(description="One per data-parallel engine.")]
    features: Annotated[Features, Field(description="What is switched on.")]
    bounds: Annotated[Bounds, Field(description="The server's settings, for all clients.")]
    block_size: Annotated[
        int | None,
        Field(description="Tokens per logical block; null where no engine is active."),
    ]


class SessionSummary(_Told):
    session_id: SessionIdShown
    has_cache_salt: HasCacheSalt
    parent_session_id: ParentShown
    live_requests: Annotated[int, Field(description="Requests that have not ended.")]
    lineages: Annotated[int, Field(description="Prompts that it runs side by side.")]
    blocks: Annotated[int, Field(description="Recorded KV cache blocks.")]
    tokens: Annotated[int, Field(description="Recorded prompt tokens.")]


class SessionPage(_Told):
    sessions: Annotated[
        list[SessionSummary], Field(description="By session_id, in the order of code points.")
    ]
    next: Annotated[
        str | None, Field(description="Send it as `after` for the next page; null on the last.")
    ]


class LeaseView(_Told):
    ttl: Annotated[float, Field(description="Seconds that it was given.")]
    remaining: Annotated[
        float | None,
        Field(description="Seconds left; null while a live request of the session holds it."),
    ]
    end_token: Annotated[
        int | None, Field(description="First token not protected; null for the whole context.")
    ]


class LineageView(_Told):
    engine: Annotated[int, Field(description="Data-parallel index of the engine that has it.")]
    tokens: Annotated[int, Field(description="Recorded prompt tokens.")]
    blocks: Annotated[int, Field(description="Recorded KV cache blocks.")]
    resident_blocks: Annotated[int, Field(description="Those whose content is still cached.")]
    leases: Annotated[list[LeaseView], Field(description="What keeps it, the shortest first.")]


class ResidencyView(_Told):
    engine: Annotated[int, Field(description="Data-parallel index.")]
    tokens: Annotated[int, Field(description="Of the session's latest context, whole blocks.")]
    local: Annotated[int, Field(description="A prefix of it that the engine's cache would serve.")]
    remote: Annotated[
        int | None,
        Field(
            description="A prefix of it that the KV connector could load now; null if it is busy."
        ),
    ]


class SessionView(_Told):
    session_id: SessionIdShown
    has_cache_salt: HasCacheSalt
    parent_session_id: ParentShown
    children: Annotated[list[str], Field(description="Ids of the sessions that it started.")]
    live_requests: Annotated[int, Field(description="Requests that have not ended.")]
    lineages: Annotated[
        list[LineageView], Field(description="Prompts that it runs side by side, on each engine.")
    ]
    residency: Annotated[
        list[ResidencyView],
        Field(description="Where its context is, on each engine with a KV connector."),
    ] = []


class EditReport(_Told):
    session_id: SessionIdShown
    operation_id: OperationIdShown
    results: Annotated[list[EditResult], Field(description="One per edit, in their order.")]


class TurnReport(_Told):
    session_id: SessionIdShown
    used: Annotated[
        bool,
        Field(
            description="Whether it says something of the turn after which your session rests. "
            "False where you have no such session, or it runs, or has had another turn since."
        ),
    ]


class OperationReport(_Told):
    operation_id: OperationIdShown
    status: Annotated[
        Literal["pending", "done"],
        Field(description="`pending` while it is so on any engine."),
    ]
    results: Annotated[list[EditResult], Field(description="One per edit, in their order.")]
    retention: Annotated[
        dict[str, Any] | None,
        Field(description="What is kept of the request's own context."),
    ]
