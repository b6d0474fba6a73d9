"""Every environment flag of the plugin, typed and validated in one place."""

from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from typing import Final

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX: Final = "VLLM_AGENT_HINT_"
ENV_SWITCH: Final = "VLLM_AGENT_HINT"


class Placement(StrEnum):
    """Which end of its new zone a released block enters."""

    FRONT = "front"
    BACK = "back"


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
    max_sessions: int = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="Sessions remembered at once. Above it the one that was used longest ago "
        "and has no live request is freed.",
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
        "together. Above it the history of the session used longest ago is dropped.",
    )
    protected_share: float = Field(
        default=0.8,
        ge=0.0,
        le=1.0,
        description="Share of the pool's blocks that sessions may associate with themselves. "
        "Above it the lease that is due soonest gives way, then the newcomer is clipped from "
        "its tail.",
    )
    idle_seconds: float = Field(
        default=1800.0,
        gt=0.0,
        le=3600.0,
        description="Seconds after which a session that has no lease and sends nothing is freed.",
    )
    renew: bool = Field(
        default=True,
        description="Whether a turn without cache_control renews the session's lease with its "
        "last TTL.",
    )
    expired_enters: Placement = Field(
        default=Placement.BACK,
        description="Where a block whose lease has expired enters its new zone: back keeps its "
        "turn behind the blocks that are there, front makes it the next to be reused.",
    )
    release_slice: int = Field(
        default=1024,
        ge=1,
        le=1_000_000,
        description="Blocks that an expiry may release in one scheduling step; the rest follows "
        "in the next steps.",
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
