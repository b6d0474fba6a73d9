"""From records to figures. Shares are of 1, times are seconds."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Self

from vllm_agent_hint.cli.demo.client import RequestRecord, Traffic
from vllm_agent_hint.cli.demo.columns import Column
from vllm_agent_hint.cli.demo.metrics import Metrics, Sample

HINT_METRICS: Final = "vllm:agent_hint_"
LABELS_OF_EVERY_SAMPLE: Final = frozenset({"engine", "model_name"})


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """What the clients of one kind of traffic saw.

    Args:
        recomputed_tokens: Prompt tokens that were not served from the prefix cache.
        tpot_mean: Seconds per output token after the first.
        tokens_per_second: Prompt and output tokens, from the first request to the last answer.
        prompts_digest: Equal where every prompt was the same, token for token.
    """

    requests: int
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    cached_share: float
    ttft_mean: float
    ttft_p50: float
    ttft_p95: float
    tpot_mean: float
    tpot_p50: float
    tokens_per_second: float
    prompts_digest: str

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> Self:
        prompt_tokens = sum(record.prompt_tokens for record in records)
        cached_tokens = sum(record.cached_tokens for record in records)
        output_tokens = sum(record.completion_tokens for record in records)
        began = min(record.sent for record in records)
        ended = max(record.finished for record in records)
        ttfts = [record.ttft for record in records]
        tpots = [record.tpot for record in records]
        prompts = sorted((record.name, record.prompt_digest) for record in records)
        return cls(
            requests=len(records),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            recomputed_tokens=prompt_tokens - cached_tokens,
            cached_share=cached_tokens / prompt_tokens,
            ttft_mean=fmean(ttfts),
            ttft_p50=quantile(ttfts, 0.5),
            ttft_p95=quantile(ttfts, 0.95),
            tpot_mean=fmean(tpots),
            tpot_p50=quantile(tpots, 0.5),
            tokens_per_second=(prompt_tokens + output_tokens) / (ended - began),
            prompts_digest=hashlib.sha256(repr(prompts).encode()).hexdigest()[:16],
        )


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """What the server counted while the load ran.

    Args:
        queue_mean: Seconds that a request waited to be scheduled, all traffic together.
        prefill_seconds: Summed over all requests.
        hints_active: Whether the plugin's own metrics are there.
        hint_metrics: Those that are not zero at the end, such as ``blocks{zone=ordinary}``.
    """

    start_seconds: float
    queue_mean: float
    prefill_seconds: float
    preemptions: int
    hints_active: bool
    hint_metrics: dict[str, float]

    @classmethod
    def between(cls, before: Metrics, after: Metrics, start_seconds: float) -> Self:
        def grown(name: str) -> float:
            return after.total(name) - before.total(name)

        queue = "vllm:request_queue_time_seconds"
        own = {
            _name_in_report(sample): sample.value
            for sample in after.samples
            if sample.name.startswith(HINT_METRICS)
            and not sample.name.endswith(("_created", "_bucket"))
        }
        return cls(
            start_seconds=start_seconds,
            queue_mean=grown(f"{queue}_sum") / max(1.0, grown(f"{queue}_count")),
            prefill_seconds=grown("vllm:request_prefill_time_seconds_sum"),
            preemptions=round(grown("vllm:num_preemptions_total")),
            hints_active=bool(own),
            hint_metrics={name: value for name, value in own.items() if value},
        )


@dataclass(frozen=True, slots=True)
class ColumnResult:
    column: Column
    records: tuple[RequestRecord, ...]
    agents: TrafficFigures
    one_shot: TrafficFigures | None
    server: ServerFigures

    @classmethod
    def of(cls, column: Column, records: Sequence[RequestRecord], server: ServerFigures) -> Self:
        one_shots = of_traffic(records, Traffic.ONE_SHOT)
        return cls(
            column=column,
            records=tuple(records),
            agents=TrafficFigures.of(of_traffic(records, Traffic.AGENTS)),
            one_shot=TrafficFigures.of(one_shots) if one_shots else None,
            server=server,
        )

    def figures(self, traffic: Traffic) -> TrafficFigures | None:
        return self.agents if traffic is Traffic.AGENTS else self.one_shot


def _name_in_report(sample: Sample) -> str:
    labels = ",".join(
        f"{name}={value}"
        for name, value in sorted(sample.labels.items())
        if name not in LABELS_OF_EVERY_SAMPLE
    )
    name = sample.name.removeprefix(HINT_METRICS)
    return f"{name}{{{labels}}}" if labels else name


def of_traffic(records: Sequence[RequestRecord], traffic: Traffic) -> list[RequestRecord]:
    return [record for record in records if record.traffic is traffic]


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest values."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
