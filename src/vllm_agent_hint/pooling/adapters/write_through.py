"""Connectors that save what requests compute, as they compute it, and can't be told to save more.

An offload can then only be confirmed: what such a connector has by itself is what there is.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Final

from vllm_agent_hint.pooling.capability import Content, Operation
from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.pooling.manifest import SessionManifest
from vllm_agent_hint.pooling.probe import PROBE_ID, request_of
from vllm_agent_hint.sessions.intent import SessionKey

_LOOK_AGAIN_SECONDS: Final = 0.05


class WriteThroughStore(ABC):
    """See ``Store``. Keys are made of hashes; whether they are there says the connector's look-up.

    Args:
        scheduler: vLLM's.
        connector: Its scheduler side.
    """

    needs_tokens = False
    manifest: SessionManifest | None = None

    def __init__(self, scheduler: Any, connector: Any) -> None:
        self._scheduler = scheduler
        self._connector = connector
        self._matched_tokens = connector.get_num_new_matched_tokens
        self._saves: dict[str, tuple[Content, float]] = {}

    @property
    def name(self) -> str:
        """See ``Store``."""
        return type(self._connector).__name__

    def why_not(self, operation: Operation) -> str:
        """See ``Store``."""
        if operation is Operation.EVICT:
            return f"{self.name} has no delete: its copy goes when it is old"
        return ""

    def start_save(self, save_id: str, content: Content, blocks: Sequence[Sequence[int]]) -> None:
        """See ``Store``. Nothing to begin: it is under way, or has been."""
        self._saves[save_id] = (content, 0.0)

    def is_saving(self, save_id: str) -> bool:
        """See ``Store``. As long as the connector writes and what is wanted is not there."""
        if save_id not in self._saves:
            return False
        content, look_at = self._saves[save_id]
        if self._is_writing:
            now = time.monotonic()
            if now < look_at:
                return True
            self._saves[save_id] = (content, now + _LOOK_AGAIN_SECONDS)
            if (self.loadable_tokens(content) or 0) < content.num_servable:
                return True
        del self._saves[save_id]
        return False

    @property
    def _is_writing(self) -> bool:
        """Whether the connector has something to save that is not saved.

        A request that has ended stays with vLLM for as long as its connector reads its blocks.
        """
        if self._connector.has_pending_push_work():
            return True
        return any(request.is_finished() for request in self._scheduler.requests.values())

    def loadable_tokens(self, content: Content) -> int | None:
        """See ``Store``. Asks as for a request, and leaves nothing behind."""
        request = request_of(content, self._next_probe_id())
        try:
            found, _ = self._matched_tokens(request, 0)
        finally:
            self._forget(request)
        return None if found is None else int(found)

    def _next_probe_id(self) -> str:
        return PROBE_ID

    def _forget(self, request: Any) -> None:  # noqa: B027 - most have noted nothing
        """Take back what a look-up has noted for a request that will never come."""

    def refresh(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        """See ``Store``. The look-up refreshes what it finds."""
        hashes = list(hashes)
        unit = self._tokens_per_hash
        found = (self.loadable_tokens(Content(hashes, unit)) or 0) // unit
        return found, len(hashes) - found

    @property
    @abstractmethod
    def _tokens_per_hash(self) -> int:
        """Tokens for which one hash stands."""

    def claim(self, hashes: Iterable[bytes], claim: Claim) -> None:  # noqa: B027 - no claims here
        """See ``Store``. Such a store goes by use alone."""

    def delete(self, hashes: Iterable[bytes], session: SessionKey | None = None) -> int:
        """See ``Store``. Such a store can't, and says so where it is asked what it can."""
        return 0
