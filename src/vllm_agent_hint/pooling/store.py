"""What ``SessionAwarePoolingManager`` needs: of a connector, and of the GPU cache beside it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_agent_hint.pooling.capability import Content, Operation, OperationHandle, Span
from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.pooling.manifest import SessionManifest
from vllm_agent_hint.sessions.intent import SessionKey


class Store(Protocol):
    """One connector, seen from a session. Its own errors may come out of any method."""

    @property
    def name(self) -> str:
        """Of the connector, for messages."""

    @property
    def needs_tokens(self) -> bool:
        """Whether its keys are made of tokens, so that contents must hold them."""

    @property
    def manifest(self) -> SessionManifest | None:
        """Where sessions are named for other servers; None where nobody can be told."""

    def why_not(self, operation: Operation) -> str:
        """Why an operation is never possible; empty if it is."""

    def start_save(self, save_id: str, content: Content, blocks: Sequence[Sequence[int]]) -> None:
        """Begin to save blocks of the GPU cache.

        Args:
            save_id: A request id that nobody else uses.
            content: What the blocks hold.
            blocks: Per KV cache group and logical block, its id; 0 for what is not to be saved.
        """

    def is_saving(self, save_id: str) -> bool:
        """Whether a save goes on."""

    def loadable_tokens(self, content: Content) -> int | None:
        """How long a prefix could be loaded now; None if that can't be told without waiting."""

    def refresh(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        """Make content the most recently used in the store.

        Returns:
            Keys found, and keys that are gone.
        """

    def claim(self, hashes: Iterable[bytes], claim: Claim) -> None:
        """Say who wants content, whether it is there or not."""

    def delete(self, hashes: Iterable[bytes], session: SessionKey | None = None) -> int:
        """Delete content, which is never to cost anybody else a hit.

        Args:
            hashes: Of what nobody but the session has registered.
            session: What others have used all the same stays, and is no longer protected. None:
                all of it goes.

        Returns:
            Keys that were there.
        """


class LocalCache(Protocol):
    """The GPU cache, and what sessions hold in it."""

    def blocks_of(self, content: Content, span: Span) -> list[list[int]]:
        """Per KV cache group and logical block of the span, the block that holds it; 0: none."""

    def prefix_tokens(self, content: Content) -> int:
        """How long a prefix of it a request would find cached."""

    def has_session(self, session: SessionKey) -> bool:
        """Whether a session is here; then somebody will say when it ends."""

    def release(self, session: SessionKey, span: Span, done: Callable[[], object]) -> str:
        """End a session's retention of a part of its context; ``done`` when nothing is left.

        Returns:
            Why it stays; empty if it ends.
        """


@dataclass(eq=False, slots=True)
class Wish:
    """A load that somebody wants.

    Args:
        session: For whom.
        content: What; no longer than it could be loaded, since a checkpoint is cached at the very
            end of a prompt only.
        wanted_tokens: What was asked for, which may be more.
        ttl: Seconds for which the session keeps it afterwards, if it keeps nothing yet.
        handle: Finished when it is over.
        wanted_at: Monotonic seconds.
        give_up_at: Monotonic seconds; it ends then if it has not begun.
        is_guess: Nobody has asked for it yet: it goes behind all that somebody has asked for.
    """

    session: SessionKey
    content: Content
    wanted_tokens: int
    ttl: float
    handle: OperationHandle
    wanted_at: float
    give_up_at: float
    is_guess: bool = False
    missing_blocks: int = 0
    """Blocks that have to be free for it, when somebody last looked."""
    looked_at: float = -math.inf


class Loads(Protocol):
    """Loads content into the GPU cache through the scheduler; see ``engine.loads``."""

    @property
    def num_waiting(self) -> int:
        """Wishes that have not begun."""

    def ask(self, wish: Wish) -> None:
        """Queue a load. Whoever asks minds the bound."""

    def give_up_a_guess(self) -> bool:
        """Make room for what somebody has asked for.

        Returns:
            Whether a guess was waiting.
        """
