"""Every environment flag of the plugin, typed and validated in one place."""

from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from typing import Final

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX: Final = "VLLM_AGENT_HINT_"
ENV_SWITCH: Final = "VLLM_AGENT_HINT"


class Placement(StrEnum):
    """Which end of its new zone a released block enters."""

    FRONT = "front"
    BACK = "back"


class GiveWay(StrEnum):
    """Who gives way first when there is not room for all."""

    REUSE = "reuse"
    DEADLINE = "deadline"
    LRU = "lru"


class Settings(BaseSettings):
    """Read once per process from ``VLLM_AGENT_HINT`` and ``VLLM_AGENT_HINT_*``."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="ignore", populate_by_name=True
    )

    enabled: bool = Field(
        default=True,
        validation_alias=ENV_SWITCH,
        description="0 leaves vLLM untouched: nothing is replaced, and nothing of the plugin but "
        "its settings is imported.",
    )
    sam: bool = Field(
        default=True,
        description="0 runs vLLM's own scheduler: hints are validated and then ignored, edits "
        "answer unsupported.",
    )
    ranges: bool = Field(
        default=False,
        description="1 takes block_offset, block_start and block_end. Otherwise they are a 400.",
    )
    pooling: bool = Field(
        default=True,
        description="0 answers offload and prefetch with unsupported, whatever KV connector is "
        "in use, and leaves it alone.",
    )
    shadow: bool = Field(
        default=False,
        description="1 keeps every account (sessions, leases, zones, metrics) and changes no "
        "order: blocks are reused exactly as without hints.",
    )
    auto: bool = Field(
        default=False,
        description="1 learns from what the server itself sees of a session's turns: how an answer "
        "ended, and which tool it called. A hint always wins.",
    )
    capture: bool = Field(
        default=False,
        description="1 lets whoever may call this server's API record its traffic with "
        "`vllm-agent-hint capture`: hashes and times of all tenants' requests, never text.",
    )
    max_sessions: int = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="Sessions remembered at once. Above it the one that was used longest ago "
        "and has no live request is freed.",
    )
    max_lineages: int = Field(
        default=8,
        ge=1,
        le=256,
        description="Prompts that one session may run side by side. Above it the one used "
        "longest ago is released.",
    )
    max_protections: int = Field(
        default=8,
        ge=1,
        le=64,
        description="Leases on one prompt. Above it those that fall due soonest are dropped.",
    )
    max_depth: int = Field(
        default=8,
        ge=1,
        le=64,
        description="Sessions above one another, parent over child. A link that would go deeper "
        "is rejected and the request runs.",
    )
    max_edits: int = Field(
        default=16,
        ge=1,
        le=16,
        description="Edits in one request. More are a 400.",
    )
    max_ttl: float = Field(
        default=3600.0,
        gt=0.0,
        le=3600.0,
        description="Seconds that a lease may run. A longer ttl is clipped to it.",
    )
    max_records: int = Field(
        default=4_000_000,
        ge=0,
        le=100_000_000,
        description="(session, block) associations held at once. Above it a newcomer is clipped "
        "from its tail.",
    )
    max_history: int = Field(
        default=1_000_000,
        ge=0,
        le=100_000_000,
        description="Block digests remembered of contexts that have expired, all sessions "
        "together. Above it the oldest is dropped.",
    )
    max_operations: int = Field(
        default=100_000,
        ge=1,
        le=10_000_000,
        description="Results of operations with edits that are remembered at once, and as many of "
        "hinted requests without, each for ten minutes after its end. Above it the oldest of the "
        "tenant that has most is forgotten.",
    )
    protected_share: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="Share of the pool's blocks that sessions may associate with themselves. "
        "Above it others give way (see GIVE_WAY), then the newcomer is clipped from its tail.",
    )
    give_way: GiveWay = Field(
        default=GiveWay.REUSE,
        description="Who gives way first when blocks run out or the protected share is full: "
        "reuse, the session that is least likely to come back soon (docs/policy.md); deadline, "
        "the lease due soonest; lru, the one that has rested longest. Sessions without a lease "
        "always go before those with one.",
    )
    given_way_enters: Placement = Field(
        default=Placement.FRONT,
        description="Where a block that has given way to the protected share enters: front makes "
        "it the next to be reused, back the last of the ordinary ones.",
    )
    tenant_share: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="Part of the protected share that the sessions of one tenant may hold.",
    )
    associated_seconds: float = Field(
        default=300.0,
        gt=0.0,
        le=3600.0,
        description="Seconds for which the blocks of a session that has no lease and sends nothing "
        "go after ordinary ones; at most IDLE_SECONDS. Then they are ordinary themselves, and the "
        "session is remembered.",
    )
    idle_seconds: float = Field(
        default=1800.0,
        gt=0.0,
        le=3600.0,
        description="Seconds after which a session that has no lease and sends nothing is freed.",
    )
    leader_wait_seconds: float = Field(
        default=1800.0,
        ge=0.0,
        le=3600.0,
        description="Seconds for which a session's last lease outlasts its end while a child of "
        "it has a request alive or a lease running. 0 lets it end.",
    )
    conversations: bool = Field(
        default=True,
        description="Beside hinted sessions, requests without a hint are recognised that go on "
        "with one another: what a conversation holds goes after other ordinary blocks, like that "
        "of a session without a lease. 0 leaves them in vLLM's own order.",
    )
    max_conversations: int = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="Conversations remembered at once. Above it the one that came longest ago is "
        "forgotten.",
    )
    renew: bool = Field(
        default=True,
        description="Whether a turn without cache_control renews the session's lease with its "
        "last TTL. 0 leaves the lease its old deadline.",
    )
    expired_enters: Placement = Field(
        default=Placement.BACK,
        description="Where a block whose lease has expired enters its new zone: back keeps its "
        "turn behind the blocks that are there, front makes it the next to be reused.",
    )
    superseded_enters: Placement = Field(
        default=Placement.FRONT,
        description="Where a block enters that a later turn of its session does not repeat: front "
        "makes it the next to be reused, back the last of the ordinary ones.",
    )
    release_slice: int = Field(
        default=128,
        ge=1,
        le=1_000_000,
        description="Blocks that expiry, evict and free may release in one scheduling step, all "
        "together; the rest follows in the next steps.",
    )
    max_tracked: int = Field(
        default=4_000_000,
        ge=0,
        le=100_000_000,
        description="Block hashes remembered of what sessions have in a KV connector, counted "
        "once per context. Above it the session that was used longest ago is forgotten there.",
    )
    max_prefetches: int = Field(
        default=2,
        ge=1,
        le=1024,
        description="Prefetches that load at once. Others wait.",
    )
    max_prefetches_queued: int = Field(
        default=1_000,
        ge=1,
        le=100_000,
        description="Prefetches that wait. More are rejected.",
    )
    prefetch_reserve: float = Field(
        default=0.2,
        ge=0.0,
        le=1.0,
        description="Share of the pool's blocks that a prefetch leaves free for requests. What a "
        "TTL protects is left alone as well.",
    )
    prefetch_patience_seconds: float = Field(
        default=30.0,
        gt=0.0,
        le=3600.0,
        description="Seconds for which a prefetch waits for room; then it is rejected.",
    )
    prefetch_wait_seconds: float = Field(
        default=5.0,
        ge=0.0,
        le=3600.0,
        description="Seconds for which a request may wait for a prefetch that brings its own "
        "prefix; then it computes it.",
    )
    transfer_seconds: float = Field(
        default=60.0,
        gt=0.0,
        le=3600.0,
        description="Seconds after which an offload that the KV connector has not confirmed fails.",
    )
    keep_alive_seconds: float = Field(
        default=60.0,
        gt=0.0,
        le=3600.0,
        description="Seconds between two rounds in which what sessions have in a KV connector is "
        "refreshed there.",
    )
    tenant_header: str = Field(
        default="",
        max_length=256,
        description="Request header in which a trusted gateway names the tenant. Empty: none. "
        "Set it only where clients can't reach vLLM past the gateway.",
    )
    secret: SecretStr = Field(
        default=SecretStr(""),
        description="Key with which the front ends sign hints and tenants for the engines. "
        "Empty: the launcher makes one, and every process that it starts inherits it. Engines "
        "that another machine launches need it set.",
    )


def flag_names() -> list[str]:
    """The environment variable of each setting, in their order."""
    return [
        ENV_SWITCH if field.validation_alias else ENV_PREFIX + name.upper()
        for name, field in Settings.model_fields.items()
    ]


def unknown_flags(environment: Iterable[str]) -> list[str]:
    """Names that look like ours and are not: a flag that is misspelt has no effect."""
    return sorted(
        name
        for name in environment
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in flag_names()
    )


@cache
def load_settings() -> Settings:
    """The settings of this process.

    Raises:
        pydantic.ValidationError: A flag holds a value that is out of range or of another type.
    """
    return Settings()
