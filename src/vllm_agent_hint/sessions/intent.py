"""What one request asks for, whatever dialect it was written in."""

from dataclasses import dataclass
from typing import NamedTuple, Self

from vllm_agent_hint.hints import AgentHintParams, EditType


class SessionKey(NamedTuple):
    """The full name of a session; equal ids of other tenants or salts are other sessions."""

    tenant: str
    cache_salt: str | None
    session_id: str


@dataclass(frozen=True, slots=True)
class Protection:
    """Keep a prefix for a while.

    Args:
        ttl: Seconds from the end of the request; 0 drops the lease.
        end_token: First token that is not protected; None protects the whole context.
    """

    ttl: float
    end_token: int | None = None


@dataclass(frozen=True, slots=True)
class SessionIntent:
    """One request's hints, lowered.

    Args:
        key: The session, or None for an anonymous one that ends with its lease.
        parent_session_id: The session that started this one, in the same tenant and salt.
        protections: What to keep, and how long. Empty: keep to the session's last TTL.
        edits: What to do to the session's context once the request has succeeded.
    """

    key: SessionKey | None
    parent_session_id: str | None = None
    protections: tuple[Protection, ...] = ()
    edits: tuple[EditType, ...] = ()

    @classmethod
    def from_agent_hint(
        cls, hint: AgentHintParams, *, tenant: str = "", cache_salt: str | None = None
    ) -> Self:
        """Lower the native wire form.

        Args:
            hint: A validated hint.
            tenant: Whose sessions these are; never taken from what a client can write.
            cache_salt: The request's own cache salt.
        """
        control = hint.cache_control
        return cls(
            key=SessionKey(tenant, cache_salt, hint.session_id) if hint.session_id else None,
            parent_session_id=hint.parent_session_id,
            protections=(Protection(control.ttl),) if control else (),
            edits=tuple(EditType(edit.type) for edit in hint.edits),
        )

    @property
    def is_empty(self) -> bool:
        """Whether the request asks for nothing, as ``agent_hint: {}`` does."""
        return self.key is None and not self.protections
