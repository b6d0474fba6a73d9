"""What the rooms of pooling share: the store, the GPU cache, and who has registered what."""

from vllm_agent_hint.pooling.capability import PoolingCounters
from vllm_agent_hint.pooling.fallible import FallibleStore
from vllm_agent_hint.pooling.store import LocalCache, Store
from vllm_agent_hint.pooling.tracker import SessionKeyTracker
from vllm_agent_hint.settings import Settings


class Books:
    """Kept by ``SessionAwarePoolingManager``.

    Args:
        store: The connector's adapter.
        local: The GPU cache.
        settings: Bounds.
        counters: Of what has happened.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        local: LocalCache,
        settings: Settings,
        counters: PoolingCounters,
        now: float,
    ) -> None:
        self.store = FallibleStore(store, counters)
        self.local = local
        self.settings = settings
        self.counters = counters
        self.tracker = SessionKeyTracker(settings.max_tracked)
        self.now = now
        """Monotonic seconds, when somebody last told the time. No room reads a clock."""
