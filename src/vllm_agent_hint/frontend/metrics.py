"""Prometheus metrics on vLLM's own ``/metrics``.

Gauges are absolute, everything else arrives as deltas, like vLLM's own counters: an engine sends
its statistics of a step to exactly one API server, so that the sum over the servers is right.
Never a session id or a tenant as a label.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from vllm_agent_hint.frontend.fail_open import name_once
from vllm_agent_hint.frontend.pooling_metrics import PoolingMetrics
from vllm_agent_hint.hints import EditStatus, EditType
from vllm_agent_hint.settings import load_settings

PREFIX: Final = "vllm:agent_hint_"
ZONES: Final = ("ordinary", "session", "ttl")
PROTECTED_ZONES: Final = ("session", "ttl")
BOUNDS: Final = (
    "max_sessions",
    "max_lineages",
    "max_protections",
    "max_records",
    "max_ttl",
    "protected_share",
    "tenant_share",
)

_GAUGES: Final = {
    "active": "1 while the engine acts on hints: 0 before its first step, and after a fault.",
    "sessions": "Agent sessions that the engine remembers.",
    "conversations": "Conversations of requests without a hint that the engine has recognised.",
    "records": "(session, block) associations that the engine remembers.",
    "leases": "Leases that run; those of sessions with a request alive are stopped.",
}
_COUNTERS: Final = {
    "expired": "Leases whose TTL ran out.",
    "superseded_blocks": "Blocks released because a later turn of the session replaced them.",
    "superseded_tokens": "The same in tokens.",
    "superseded_regret_tokens": "Tokens released as superseded and then asked for again.",
    "links_rejected": "Links to a parent session that would have closed a cycle or gone too deep.",
}
_SLICE_BUCKETS: Final = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1)

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
        self._gauges = {name: _gauge(name, text) for name, text in _GAUGES.items()}
        self._counters = {name: _counter(name, text) for name, text in _COUNTERS.items()}
        self._blocks = _gauge(
            "blocks",
            "KV cache blocks by zone: ordinary, associated with a session, or protected by a TTL.",
            "zone",
        )
        self._pressure_overrides = _counter(
            "pressure_overrides",
            "Blocks that were reused although a session (or its TTL) asked to keep them, because "
            "nothing else was free; in shadow mode, because stock's order says so.",
            "zone",
        )
        self._clipped = _counter(
            "clipped",
            "What a bound, named as its setting, has cut off: blocks; for bounds on something else "
            "(sessions, leases, seconds) how often.",
            "bound",
        )
        self._edits = _counter(
            "edits", "Context-management edits by operation and outcome.", "operation", "status"
        )
        self._prompt_tokens = _counter(
            "prompt_tokens",
            "Prompt tokens looked up in the prefix cache, by whether the request carried a hint. "
            "Together they are vllm:prefix_cache_queries.",
            "hinted",
        )
        self._cached_prompt_tokens = _counter(
            "cached_prompt_tokens",
            "Those of agent_hint_prompt_tokens that were found there. Together they are "
            "vllm:prefix_cache_hits.",
            "hinted",
        )
        self._slices = Histogram(
            PREFIX + "slice_seconds",
            "Seconds that one scheduling step spent on letting go of what has expired.",
            ["model_name", "engine"],
            buckets=_SLICE_BUCKETS,
        )
        engines = list(engines)
        self._pooling = PoolingMetrics(PREFIX, model_name, engines)
        for engine in engines:
            self._start_at_zero(engine)

    def _start_at_zero(self, engine: int) -> None:
        labels = self._engine_labels(engine)
        for gauge in self._gauges.values():
            gauge.labels(*labels).set(0)
        for counter in self._counters.values():
            counter.labels(*labels)
        for zone in ZONES:
            self._blocks.labels(*labels, zone).set(0)
        for zone in PROTECTED_ZONES:
            self._pressure_overrides.labels(*labels, zone)
        for bound in BOUNDS:
            self._clipped.labels(*labels, bound)
        for operation in EditType:
            for status in EditStatus:
                self._edits.labels(*labels, operation.value, status.value)
        for hinted in ("yes", "no"):
            self._prompt_tokens.labels(*labels, hinted)
            self._cached_prompt_tokens.labels(*labels, hinted)
        self._slices.labels(*labels)

    def take(self, engine: int, stats: dict[str, Any]) -> None:
        """Apply one engine's statistics: gauges absolute, the others since the last time."""
        labels = self._engine_labels(engine)
        for name, gauge in self._gauges.items():
            gauge.labels(*labels).set(stats[name])
        for zone, blocks in stats["blocks"].items():
            self._blocks.labels(*labels, zone).set(blocks)
        for name, counter in self._counters.items():
            counter.labels(*labels).inc(stats[name])
        for zone, overrides in stats["pressure_overrides"].items():
            self._pressure_overrides.labels(*labels, zone).inc(overrides)
        for bound, clipped in stats["clipped"].items():
            self._clipped.labels(*labels, bound).inc(clipped)
        for operation, status, edits in stats["edits"]:
            self._edits.labels(*labels, operation, status).inc(edits)
        for seconds in stats["slices"]:
            self._slices.labels(*labels).observe(seconds)
        if stats.get("remote") is not None:
            self._pooling.take(engine, stats["remote"])

    def take_prompt_tokens(self, engine: int, hinted: tuple[int, int], total: Any) -> None:
        """Count the prompt tokens of the requests that a step has admitted.

        Args:
            engine: Which.
            hinted: Tokens, and cached ones among them, of hinted requests.
            total: vLLM's ``PrefixCacheStats`` of the same step, which cover all requests.
        """
        labels = self._engine_labels(engine)
        for counter, everyone, ours in (
            (self._prompt_tokens, total.queries, hinted[0]),
            (self._cached_prompt_tokens, total.hits, hinted[1]),
        ):
            counter.labels(*labels, "yes").inc(ours)
            counter.labels(*labels, "no").inc(everyone - ours)

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
        if not load_settings().sam:
            return
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
    field ``agent_hint`` of the scheduler's statistics, where there is one, and the prompt tokens
    of the requests that the step has admitted; two look-ups otherwise.
    If it moves: metrics only move with management requests.
    """
    wrapped(*args, **kwargs)
    scheduler_stats = args[0] if args else kwargs.get("scheduler_stats")
    stats = getattr(scheduler_stats, "agent_hint", None)
    total = getattr(scheduler_stats, "prefix_cache_stats", None)
    if stats is not None or (total is not None and total.queries):
        engine = args[3] if len(args) > 3 else kwargs.get("engine_idx")
        take(instance, engine or 0, stats, total)


def take(
    manager: Any, engine: int, stats: dict[str, Any] | None, prompt_tokens: Any = None
) -> None:
    """Apply statistics to a manager's metrics; nothing where it has none (statistics are off).

    Args:
        manager: vLLM's ``StatLoggerManager``.
        engine: Whose statistics.
        stats: From ``engine.statistics``, if there is any news.
        prompt_tokens: vLLM's ``PrefixCacheStats`` of the same step.
    """
    ours = getattr(manager, _ATTRIBUTE, None)
    if ours is None:
        return
    try:
        if stats is not None:
            ours.take(engine, stats)
        if prompt_tokens is not None:
            hinted = (stats or {}).get("prompt_tokens", (0, 0))
            ours.take_prompt_tokens(engine, hinted, prompt_tokens)
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
