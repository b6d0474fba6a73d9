"""vLLM's ``MultiConnector``: saves to each of its connectors, loads from the first that can."""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm_agent_hint.pooling.capability import Content, Operation
from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.pooling.manifest import SessionManifest
from vllm_agent_hint.pooling.store import Store
from vllm_agent_hint.sessions.intent import SessionKey


class MultiStore:
    """See ``Store``. Asks those of its connectors for which there is an adapter.

    Loads go through the outer connector, which chooses for itself.

    Args:
        stores: Adapters of the connectors within, at least one.
        others: Names of those for which there is none.
    """

    def __init__(self, stores: Sequence[Store], others: Sequence[str]) -> None:
        self._stores = stores
        self._others = others

    @property
    def name(self) -> str:
        """See ``Store``."""
        return "MultiConnector of " + ", ".join([*(s.name for s in self._stores), *self._others])

    @property
    def needs_tokens(self) -> bool:
        """See ``Store``."""
        return any(store.needs_tokens for store in self._stores)

    @property
    def manifest(self) -> SessionManifest | None:
        """See ``Store``."""
        return next((s.manifest for s in self._stores if s.manifest is not None), None)

    def why_not(self, operation: Operation) -> str:
        """See ``Store``. One that can is enough, but for a delete: that has to reach every copy."""
        reasons = [store.why_not(operation) for store in self._stores]
        if operation is Operation.EVICT:
            reasons += [f"there is no adapter for {name}" for name in self._others]
            return "; ".join(filter(None, reasons))
        return "" if not all(reasons) else "; ".join(reasons)

    def start_save(self, save_id: str, content: Content, blocks: Sequence[Sequence[int]]) -> None:
        """See ``Store``."""
        for store in self._able(Operation.OFFLOAD):
            store.start_save(save_id, content, blocks)

    def is_saving(self, save_id: str) -> bool:
        """See ``Store``."""
        return any(store.is_saving(save_id) for store in self._able(Operation.OFFLOAD))

    def loadable_tokens(self, content: Content) -> int | None:
        """See ``Store``. Of the connector that has most."""
        found = [store.loadable_tokens(content) for store in self._able(Operation.PREFETCH)]
        known = [tokens for tokens in found if tokens is not None]
        return max(known) if known else None

    def refresh(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        """See ``Store``. Of the connector that has most."""
        hashes = list(hashes)
        return max(
            (store.refresh(hashes) for store in self._able(Operation.KEEP_ALIVE)), default=(0, 0)
        )

    def claim(self, hashes: Iterable[bytes], claim: Claim) -> None:
        """See ``Store``."""
        hashes = list(hashes)
        for store in self._stores:
            store.claim(hashes, claim)

    def delete(self, hashes: Iterable[bytes], session: SessionKey | None = None) -> int:
        """See ``Store``."""
        hashes = list(hashes)
        return max((store.delete(hashes, session) for store in self._stores), default=0)

    def _able(self, operation: Operation) -> list[Store]:
        return [store for store in self._stores if not store.why_not(operation)]


def multi_store(connectors: Iterable[Any], adapter_of: Any) -> MultiStore | None:
    """The adapter for a ``MultiConnector``; None if none of its connectors has one.

    Args:
        connectors: Those within.
        adapter_of: Gives the adapter of one, or None.
    """
    stores: list[Store] = []
    others: list[str] = []
    for connector in connectors:
        store = adapter_of(connector)
        if store is None:
            others.append(type(connector).__name__)
        else:
            stores.append(store)
    return MultiStore(stores, others) if stores else None
