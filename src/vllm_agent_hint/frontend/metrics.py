"""Prometheus metrics on vLLM's own ``/metrics``.

Gauges are absolute, everything else arrives as deltas, like vLLM's own counters: an engine sends
its statistics of a step to exactly one API server. Never a session id as a label.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from prometheus_client import REGISTRY, Counter, Gauge

from vllm_agent_hint.frontend.fail_open import name_once
from vllm_agent_hint.hints import EditStatus, EditType

PREFIX: Final = "vllm:agent_hint_"
ZONES: Final = ("ordinary", "session", "ttl")
PROTECTED_ZONES: Final = ("session", "ttl")

_ATTRIBUTE: Final = "agent_hint_metrics"


class AgentHintMetrics:
    """The collectors of one ``StatLoggerManager``.

    A new object takes the names over from an earlier one in the same process, as vLLM's own
    collectors do.

    Args:
        model_name: vLLM's ``model_name`` label.
        engines: Data-parallel indexes. Each has its series at zero from the start.
    """

    def __init__(self, model_name: str, engines: Iterable[int]) -> None:
        self._model_name = model_name
        _unregister_ours()
        self._sessions = _gauge("sessions", "Agent sessions that the engine remembers.")
        self._blocks = _gauge(
            "blocks",
            "KV cache blocks by zone: ordinary, associated with a session, or protected by a TTL.",
            "zone",
        )
        self._pressure_overrides = _counter(
            "pressure_overrides",
            "Blocks that were reused although a session (or its TTL) asked to keep them, because "
            "nothing else was free.",
            "zone",
        )
        self._expired = _counter("expired", "Leases whose TTL ran out.")
        self._clipped = _counter(
            "clipped",
            "Blocks that a bound kept from being associated (sessions, for max_sessions).",
            "bound",
        )
        self._edits = _counter(
            "edits", "Context-management edits by operation and outcome.", "operation", "status"
        )
        for engine in engines:
            self._start_at_zero(engine)

    def _start_at_zero(self, engine: int) -> None:
        labels = self._engine_labels(engine)
        self._sessions.labels(*labels).set(0)
        self._expired.labels(*labels)
        for zone in ZONES:
            self._blocks.labels(*labels, zone).set(0)
        for zone in PROTECTED_ZONES:
            self._pressure_overrides.labels(*labels, zone)
        for operation in EditType:
            for status in EditStatus:
                self._edits.labels(*labels, operation.value, status.value)

    def take(self, engine: int, stats: dict[str, Any]) -> None:
        """Apply one engine's statistics: gauges absolute, the others since the last time."""
        labels = self._engine_labels(engine)
        self._sessions.labels(*labels).set(stats["sessions"])
        for zone, blocks in stats["blocks"].items():
            self._blocks.labels(*labels, zone).set(blocks)
        for zone, overrides in stats["pressure_overrides"].items():
            self._pressure_overrides.labels(*labels, zone).inc(overrides)
        self._expired.labels(*labels).inc(stats["expired"])
        for bound, clipped in stats["clipped"].items():
            self._clipped.labels(*labels, bound).inc(clipped)
        for operation, status, edits in stats["edits"]:
            self._edits.labels(*labels, operation, status).inc(edits)

    def _engine_labels(self, engine: int) -> tuple[str, str]:
        return self._model_name, str(engine)


def init_stat_loggers(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """``StatLoggerManager.__init__(vllm_config, engine_idxs=None, ...)``.

    Stock: builds the loggers; building the Prometheus one drops every collector named ``vllm:``.
    Ours: registers our collectors afterwards and keeps them on the manager.
    If it moves: no ``vllm:agent_hint_`` metrics.
    """
    wrapped(*args, **kwargs)
    try:
        vllm_config = args[0] if args else kwargs["vllm_config"]
        ours = AgentHintMetrics(vllm_config.model_config.served_model_name, instance.engine_indexes)
        setattr(instance, _ATTRIBUTE, ours)
    except Exception:
        name_once("registering vllm:agent_hint_ metrics failed; there are none")


def record(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """``StatLoggerManager.record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)``.

    Called once per step. Stock: hands the step's statistics to every logger. Ours: takes the
    field ``agent_hint`` of the scheduler's statistics, where there is one; a look-up otherwise.
    If it moves: metrics only move with management requests.
    """
    wrapped(*args, **kwargs)
    scheduler_stats = args[0] if args else kwargs.get("scheduler_stats")
    stats = getattr(scheduler_stats, "agent_hint", None)
    if stats is not None:
        engine = args[3] if len(args) > 3 else kwargs.get("engine_idx")
        take(instance, engine or 0, stats)


def take(manager: Any, engine: int, stats: dict[str, Any]) -> None:
    """Apply statistics to a manager's metrics; nothing where it has none (statistics are off)."""
    ours = getattr(manager, _ATTRIBUTE, None)
    if ours is None:
        return
    try:
        ours.take(engine, stats)
    except Exception:
        name_once("updating vllm:agent_hint_ metrics failed; they may be stale")


def _gauge(name: str, documentation: str, *labels: str) -> Gauge:
    return Gauge(
        PREFIX + name,
        documentation,
        ["model_name", "engine", *labels],
        multiprocess_mode="mostrecent",
    )


def _counter(name: str, documentation: str, *labels: str) -> Counter:
    return Counter(PREFIX + name, documentation, ["model_name", "engine", *labels])


def _unregister_ours() -> None:
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(PREFIX):
            REGISTRY.unregister(collector)
