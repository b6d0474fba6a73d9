"""Prometheus metrics of what sessions have in a KV connector; all zero where there is none."""

from collections.abc import Iterable
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram

_GAUGES: Final = {
    "remote_tracked_keys": "Block hashes that sessions have registered in a KV connector.",
    "remote_shared_keys": "Registrations of them beyond the first of each.",
    "prefetches_waiting": "Prefetches that wait for their session, their prompts, or room.",
    "prefetches_loading": "Prefetches that hold blocks.",
}
_COUNTERS: Final = {
    "remote_orphaned_keys": "Block hashes that the last session to register them has given up.",
    "keep_alives": "Keys refreshed in the KV connector's store.",
    "keep_alive_losses": "Keys that were to be refreshed and were gone.",
    "remote_evictions": "Keys deleted in the store.",
    "transfer_failures": "Offloads and prefetches that failed, and calls to the store that did.",
    "transfer_back_pressure": "Offloads for which the store had no room.",
}
_OPERATIONS: Final = ("offload", "prefetch")
_SECONDS: Final = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class PoolingMetrics:
    """The collectors; see ``AgentHintMetrics``.

    Args:
        prefix: Of every name.
        model_name: vLLM's ``model_name`` label.
        engines: Data-parallel indexes.
    """

    def __init__(self, prefix: str, model_name: str, engines: Iterable[int]) -> None:
        self._model_name = model_name
        own = ["model_name", "engine"]
        self._gauges = {
            name: Gauge(prefix + name, text, own, multiprocess_mode="mostrecent")
            for name, text in _GAUGES.items()
        }
        self._counters = {
            name: Counter(prefix + name, text, own) for name, text in _COUNTERS.items()
        }
        self._bytes = Counter(
            prefix + "transfer_bytes",
            # vLLM's connector reports bytes per step, of all its transfers in one sum.
            "KV cache bytes that offloads have saved and prefetches have loaded, reckoned from "
            "their tokens; what the connector has moved for whomever is "
            "vllm:kv_offload_load_bytes and vllm:kv_offload_store_bytes.",
            [*own, "operation"],
        )
        self._queued = Histogram(
            prefix + "prefetch_queue_seconds",
            "Seconds from the wish for a prefetch until it could begin.",
            own,
            buckets=_SECONDS,
        )
        self._transfers = Histogram(
            prefix + "transfer_seconds",
            "Seconds from the begin of an offload or a prefetch to its end.",
            [*own, "operation"],
            buckets=_SECONDS,
        )
        for engine in engines:
            labels = (model_name, str(engine))
            for series in (*self._gauges.values(), *self._counters.values(), self._queued):
                series.labels(*labels)
            for operation in _OPERATIONS:
                self._bytes.labels(*labels, operation)
                self._transfers.labels(*labels, operation)

    def take(self, engine: int, stats: dict[str, Any]) -> None:
        """Apply one engine's statistics: gauges absolute, the others since the last time."""
        labels = (self._model_name, str(engine))
        for name, gauge in self._gauges.items():
            gauge.labels(*labels).set(stats[name])
        for name, counter in self._counters.items():
            counter.labels(*labels).inc(stats[name])
        for operation, count in stats["transfer_bytes"].items():
            self._bytes.labels(*labels, operation).inc(count)
        for seconds in stats["queue_seconds"]:
            self._queued.labels(*labels).observe(seconds)
        for operation, seconds in stats["transfer_seconds"]:
            self._transfers.labels(*labels, operation).observe(seconds)
