"""What one request asks for, whatever dialect it was written in."""

from dataclasses import dataclass
from typing import NamedTuple, Self

from vllm_agent_hint.hints import AgentHintParams, ContextEdit, EditType
from vllm_agent_hint.stamp import digest_of


class SessionKey(NamedTuple):
    """The full name of a session; equal ids of other tenants or salts are other sessions."""

    tenant: str
    cache_salt: str | None
    session_id: str

    def __repr__(self) -> str:
        """The same for the same session, and no more: an exception can carry it into a log."""
        salted = () if self.cache_salt is None else (self.cache_salt,)
        return f"<session {digest_of('session', self.tenant, self.session_id, *salted)[:12]}>"


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
class Edit:
    """One operation on the recorded context of a session.

    Args:
        type: What to do.
        start_token: First token of the range; 0 for the whole context.
        end_token: First token behind the range; None for no end.
        include_children: Of an evict: free the session and all sessions below it.
    """

    type: EditType
    start_token: int = 0
    end_token: int | None = None
    include_children: bool = False

    @classmethod
    def from_wire(cls, edit: ContextEdit, block_size: int) -> Self:
        """Lower the native wire form; ``block_size`` is that of a logical block, in tokens."""
        return cls(
            EditType(edit.type),
            (edit.block_start or 0) * block_size,
            None if edit.block_end is None else edit.block_end * block_size,
            edit.include_children,
        )

    @property
    def has_range(self) -> bool:
        return self.end_token is not None


@dataclass(frozen=True, slots=True)
class SessionIntent:
    """One request's hints, lowered.

    Args:
        key: The session, or None for an anonymous one that ends with its lease.
        parent_session_id: The session that started this one, in the same tenant and salt.
        protections: What to keep, and how long. Empty: keep to the session's last TTL.
        edits: What to do to the session's context once the request has succeeded.
        is_sibling: One of several engine requests that one HTTP request became. It says nothing
            about what its session goes on with.
        tenant: Of an anonymous session; a named one has it in its key.
        resumes_in: Seconds from the request's end until the session is expected back; None if
            nothing is known.
    """

    key: SessionKey | None
    parent_session_id: str | None = None
    protections: tuple[Protection, ...] = ()
    edits: tuple[Edit, ...] = ()
    is_sibling: bool = False
    tenant: str = ""
    resumes_in: float | None = None

    @classmethod
    def from_agent_hint(
        cls,
        hint: AgentHintParams,
        *,
        tenant: str = "",
        cache_salt: str | None = None,
        block_size: int = 1,
        is_sibling: bool = False,
    ) -> Self:
        """Lower the native wire form.

        Args:
            hint: A validated hint.
            tenant: Whose sessions these are; never taken from what a client can write.
            cache_salt: The request's own cache salt.
            block_size: Tokens in a logical block, in which ranges count.
            is_sibling: See the class.
        """
        control = hint.cache_control
        protections: tuple[Protection, ...] = ()
        if control is not None:
            offset = control.block_offset
            end_token = None if offset is None else offset * block_size
            protections = (Protection(control.ttl, end_token),)
        return cls(
            key=SessionKey(tenant, cache_salt, hint.session_id) if hint.session_id else None,
            parent_session_id=hint.parent_session_id,
            protections=protections,
            edits=tuple(Edit.from_wire(edit, block_size) for edit in hint.edits),
            is_sibling=is_sibling,
            tenant=tenant,
            resumes_in=hint.expected_resume_seconds,
        )

    @property
    def is_empty(self) -> bool:
        """Whether the request asks for nothing, as ``agent_hint: {}`` does."""
        return self.key is None and not self.protections
