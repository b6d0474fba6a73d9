"""What a KV connector may offer so that sessions can be parked, brought back and let go of.

RFC #52113, "Planned direct connector integration". Whoever implements it speaks of sessions and
content hashes; what the connector calls its keys stays its own business. A connector that is an
instance of ``SupportsSessionAwareKVManagement``, or for which a plugin answers the hook
``agent_hint_kv_management``, is asked directly. For any other one ``SessionAwarePoolingManager``
gives the same meaning to what the connector can do.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final, Protocol, Self, runtime_checkable

from vllm_agent_hint.hints import EditStatus
from vllm_agent_hint.sessions.intent import SessionKey

MAX_TIMES: Final = 1_000
"""Times of a kind kept for a report; the oldest go where nobody asks for one."""


class Operation(StrEnum):
    """What can be asked of a connector."""

    OFFLOAD = "offload"
    PREFETCH = "prefetch"
    EVICT = "evict"
    KEEP_ALIVE = "keep_alive"


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A context by what it holds, wherever it lies.

    Args:
        hashes: vLLM's hash of each complete hash block, first to last. Each stands for all tokens
            up to its end, for the cache salt and for the LoRA adapter.
        tokens_per_hash: Tokens in a hash block.
        cache_salt: As the request said.
        lora_request: vLLM's, if any.
        token_ids: The tokens themselves, for connectors that make their keys of them; else None.
        servable_tokens: The longest prefix that a cache could serve: models with states or
            windows keep them at some boundaries only. None: all of it.
    """

    hashes: Sequence[bytes]
    tokens_per_hash: int
    cache_salt: str | None = None
    lora_request: Any = None
    token_ids: "array[int] | None" = None
    servable_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.hashes) * self.tokens_per_hash

    @property
    def num_servable(self) -> int:
        return self.num_tokens if self.servable_tokens is None else self.servable_tokens

    def up_to(self, end_token: int | None) -> "Content":
        """The part before a token, in whole hash blocks; all of it for None."""
        if end_token is None or end_token >= self.num_tokens:
            return self
        count = end_token // self.tokens_per_hash
        tokens = self.token_ids
        return Content(
            self.hashes[:count],
            self.tokens_per_hash,
            self.cache_salt,
            self.lora_request,
            None if tokens is None else tokens[: count * self.tokens_per_hash],
            None
            if self.servable_tokens is None
            else min(self.servable_tokens, count * self.tokens_per_hash),
        )


@dataclass(frozen=True, slots=True)
class Span:
    """Which part of a context; the whole of it by default.

    Args:
        start_token: First token.
        end_token: First token behind it; None for no end.
    """

    start_token: int = 0
    end_token: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.start_token == 0 and self.end_token is None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transfer ended.

    Args:
        status: As in the result of an edit.
        tokens: Of the context, that are now where they were wanted.
        blocks: The same in KV blocks.
        reason: In words; empty where the status says it all.
        has_back_pressure: The store had no room, or was too busy: try again later.
    """

    status: EditStatus
    tokens: int = 0
    blocks: int = 0
    reason: str = ""
    has_back_pressure: bool = False

    @classmethod
    def refused(cls, reason: str) -> Self:
        """It was not done, for a reason that may be over soon."""
        return cls(EditStatus.REJECTED, reason=reason, has_back_pressure=True)


class OperationHandle:
    """One transfer, which may end at once or much later."""

    __slots__ = ("_callbacks", "outcome")

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        """How it ended; None while it goes on."""
        self._callbacks: list[Callable[[Outcome], object]] = []

    @classmethod
    def ended(cls, outcome: Outcome) -> "OperationHandle":
        """One that is over before it began."""
        handle = cls()
        handle.finish(outcome)
        return handle

    @property
    def is_done(self) -> bool:
        return self.outcome is not None

    def finish(self, outcome: Outcome) -> None:
        """It has ended. The first end counts."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(outcome)

    def when_done(self, callback: Callable[[Outcome], object]) -> None:
        """Call back with the outcome, now or later."""
        if self.outcome is not None:
            callback(self.outcome)
        else:
            self._callbacks.append(callback)


@dataclass(frozen=True, slots=True)
class Residency:
    """Where a session's contexts are, in tokens. They may be in several places at once.

    Args:
        tokens: All of them.
        local: A prefix that the GPU cache would serve now.
        remote: A prefix that the connector could load now; None if it can't be told without
            waiting.
    """

    tokens: int = 0
    local: int = 0
    remote: int | None = 0


@runtime_checkable
class SupportsSessionAwareKVManagement(Protocol):
    """The capability. All methods run on the scheduler's thread, between two steps.

    None may block for longer than a look-up, and none may raise for what a client can ask.
    """

    def why_not(self, operation: Operation) -> str:
        """Why an operation is never possible with this connector; empty if it is."""

    def register_cache(
        self, session: SessionKey, request_id: str, content: Content, ttl: float
    ) -> None:
        """A request has ended and left this context, the latest of its session.

        Args:
            session: Whose.
            request_id: vLLM's.
            content: The cacheable prefix.
            ttl: Seconds for which it is worth keeping; 0.0 for no promise.
        """

    def offload(self, session: SessionKey, span: Span) -> OperationHandle:
        """Save what the session has in the GPU cache. Done once it could be loaded again."""

    def prefetch(self, session: SessionKey, span: Span) -> OperationHandle:
        """Bring a context to where the next request finds it."""

    def evict(self, session: SessionKey, span: Span) -> OperationHandle:
        """Delete what nobody but this session has registered."""

    def release(self, session: SessionKey) -> None:
        """The session has ended: what it alone has registered may go first."""

    def query_residency(self, session: SessionKey) -> Residency:
        """Where the session's latest context is."""


@dataclass(slots=True)
class PoolingCounters:
    """Events since they were last taken."""

    keep_alives: int = 0
    """Keys refreshed in the store."""
    keep_alive_losses: int = 0
    """Keys that were to be refreshed and were gone."""
    remote_evictions: int = 0
    """Keys deleted in the store."""
    orphaned_keys: int = 0
    """Keys that the last session which had registered them has given up."""
    saved_tokens: int = 0
    loaded_tokens: int = 0
    failures: int = 0
    """Transfers that failed."""
    back_pressure: int = 0
    """Transfers that the store had no room for."""
    queue_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    """From the wish for a prefetch until it could begin."""
    transfer_seconds: deque[tuple[str, float]] = field(
        default_factory=lambda: deque(maxlen=MAX_TIMES)
    )
    """``(operation, seconds)`` from its begin to its end."""

    def take(self) -> Self:
        """What has happened, and begin anew. Everybody who counts goes on with this one."""
        taken, new = replace(self), type(self)()
        for each in fields(self):
            setattr(self, each.name, getattr(new, each.name))
        return taken
