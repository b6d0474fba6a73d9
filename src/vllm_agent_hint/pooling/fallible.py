"""A store that may be dead: sessions go on without it, and it is asked again later."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from vllm_agent_hint.pooling.capability import Content, Operation, PoolingCounters
from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.pooling.manifest import IncompatibleError, Page, SessionManifest
from vllm_agent_hint.pooling.store import Store
from vllm_agent_hint.sessions.intent import SessionKey

logger = logging.getLogger("vllm.agent_hint")

T = TypeVar("T")


class FallibleStore:
    """Asks a store. What it can't answer is what it does not have; each failure is counted.

    Args:
        store: The connector's adapter.
        counters: Of what has happened.
    """

    def __init__(self, store: Store, counters: PoolingCounters) -> None:
        self._store = store
        self._counters = counters
        self._has_named_fault = False

    @property
    def manifest(self) -> SessionManifest | None:
        """See ``Store``; whoever asks it directly sees its own errors."""
        return self._store.manifest

    def why_not(self, operation: Operation) -> str:
        """See ``Store``."""
        return self._store.why_not(operation)

    def start_save(self, save_id: str, content: Content, blocks: Sequence[Sequence[int]]) -> None:
        """See ``Store``."""
        self._ask(self._store.start_save, save_id, content, blocks, otherwise=None)

    def is_saving(self, save_id: str) -> bool:
        """See ``Store``."""
        return self._ask(self._store.is_saving, save_id, otherwise=False)

    def loadable_tokens(self, content: Content, *, if_it_fails: int | None = None) -> int | None:
        """See ``Store``."""
        return self._ask(self._store.loadable_tokens, content, otherwise=if_it_fails)

    def refresh(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        """See ``Store``."""
        return self._ask(self._store.refresh, hashes, otherwise=(0, 0))

    def claim(self, hashes: Iterable[bytes], claim: Claim) -> None:
        """See ``Store``."""
        self._ask(self._store.claim, hashes, claim, otherwise=None)

    def delete(self, hashes: Iterable[bytes], session: SessionKey | None = None) -> int | None:
        """See ``Store``; None if it can't be told."""
        ask: Callable[..., int | None] = self._store.delete
        return self._ask(ask, hashes, session, otherwise=None)

    def write_page(self, session: SessionKey, contents: Sequence[Content], ttl: float) -> None:
        """Note in the manifest, if there is one, what a session has."""
        if self.manifest is not None:
            self._ask(self.manifest.write, session, list(contents), ttl, otherwise=None)

    def has_page(self, session: SessionKey) -> bool:
        """Whether the manifest, if there is one, names a session; False where it can't tell."""
        if self.manifest is None:
            return False
        return self._ask(self.manifest.holds, session, otherwise=False)

    def read_page(self, session: SessionKey) -> Page | None:
        """What the manifest, if there is one, says of a session; None if it can't be read.

        Raises:
            IncompatibleError: It is of no use to this server.
        """
        if self.manifest is None:
            return None
        return self._ask(self.manifest.read, session, otherwise=None, but=(IncompatibleError,))

    def forget_page(self, session: SessionKey) -> None:
        """Take a session out of the manifest, if there is one."""
        if self.manifest is not None:
            self._ask(self.manifest.forget, session, otherwise=None)

    def _ask(
        self,
        call: Callable[..., T],
        *args: object,
        otherwise: T,
        but: tuple[type[Exception], ...] = (),
    ) -> T:
        """An error that is an answer, one of ``but``, is none of the store's faults."""
        try:
            return call(*args)
        except but:
            raise
        except Exception:
            self._counters.failures += 1
            if not self._has_named_fault:
                self._has_named_fault = True
                logger.exception(
                    "vllm-agent-hint: asking %s failed; sessions go on without it (said once)",
                    self._store.name,
                )
            return otherwise
