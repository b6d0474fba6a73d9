"""vLLM's real KV cache manager under a virtual clock: stock, segmented LRU, and ours with SAM."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from vllm_agent_hint.cli.bench.replay.arms import Arm, key_of
from vllm_agent_hint.cli.bench.replay.segments import slots_of
from vllm_agent_hint.cli.bench.replay.slru import lay_under
from vllm_agent_hint.cli.bench.replay.taught import taught_policy
from vllm_agent_hint.cli.bench.replay.workload import Arrival, Workload
from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.kvcache.manager import TrackedRequest, agent_kv_cache_manager
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.sessions.manager import SessionAwareManager
from vllm_agent_hint.sessions.session import LiveRequest
from vllm_agent_hint.settings import load_settings

HASH_BYTES: Final = 16
CLOCK_STARTS_AT: Final = 1_000.0
"""Monotonic seconds at the start of a workload; a deadline of 0.0 would mean none."""


class ChainHashes:
    """The hash of each chain id, made once."""

    def __init__(self, num_ids: int) -> None:
        packed = np.random.default_rng(0).bytes(HASH_BYTES * num_ids)
        self._hashes = np.empty(num_ids, dtype=object)
        self._hashes[:] = [
            packed[k : k + HASH_BYTES] for k in range(0, HASH_BYTES * num_ids, HASH_BYTES)
        ]

    def of(self, ids: Any) -> list[bytes]:
        """Of a prompt's blocks."""
        hashes: list[bytes] = self._hashes[ids].tolist()
        return hashes


@dataclass(slots=True)
class Running:
    """A request that holds its blocks.

    Args:
        arrival: What it is.
        request: What vLLM sees of it.
        hit_tokens: Prompt tokens that it was served from the cache.
    """

    arrival: Arrival
    request: Any
    hit_tokens: int


class StockCache:
    """vLLM's own manager, as it comes.

    Args:
        workload: Whose requests it will see.
        hashes: Of its blocks.
        capacity: Blocks that it can hold.
    """

    manager_cls: Any = KVCacheManager

    def __init__(self, workload: Workload, hashes: ChainHashes, capacity: int) -> None:
        self.block_size = workload.block_size
        self.capacity = capacity
        self._hashes = hashes
        self._sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        spec = FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        tokens = max(a.request.prompt_tokens + a.request.output_tokens for a in workload.arrivals)
        self.manager = self.manager_cls(
            # The null block is one more.
            KVCacheConfig(
                num_blocks=capacity + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            max_model_len=tokens + 1,
            scheduler_block_size=self.block_size,
            hash_block_size=self.block_size,
            enable_caching=True,
        )

    def can_ever_hold(self, arrival: Arrival) -> bool:
        """Whether a request fits into the cache when nothing else runs."""
        return self._slots(arrival) <= self.capacity

    def advance(self, now: float) -> None:
        """Time passes: what falls due does so. Never goes back."""

    def begin(self, arrival: Arrival, now: float) -> Running | None:
        """A request comes to run: it gets its blocks, also those of what it will generate.

        Returns:
            None if it has to wait until others end.
        """
        request = self._request(arrival)
        blocks, hit_tokens, _ = self.manager.get_computed_blocks(request)
        prompt = arrival.request.prompt_tokens
        got = self.manager.allocate_slots(
            request,
            prompt - hit_tokens,
            hit_tokens,
            blocks,
            num_lookahead_tokens=max(arrival.request.output_tokens - 1, 0),
        )
        if got is None:
            return None
        request.num_computed_tokens = prompt
        return Running(arrival, request, hit_tokens)

    def end(self, running: Running, now: float) -> None:
        """A request has ended: its blocks are free, and stay cached until they are reused."""
        self.manager.free(running.request)

    def figures(self) -> dict[str, Any]:
        """What there is to report beside hits."""
        return {}

    def _slots(self, arrival: Arrival) -> int:
        request = arrival.request
        return slots_of(request.prompt_tokens, request.output_tokens, self.block_size)

    def _request(self, arrival: Arrival) -> Any:
        request = Request(
            f"{arrival.session.number}.{arrival.turn}",
            [0] * arrival.request.prompt_tokens,
            self._sampling,
            None,
            arrival_time=arrival.at,
        )
        request.block_hashes = self._hashes.of(arrival.request.blocks)
        return request


class SegmentedCache(StockCache):
    """vLLM's own manager over a segmented LRU."""

    def __init__(self, workload: Workload, hashes: ChainHashes, capacity: int) -> None:
        super().__init__(workload, hashes, capacity)
        lay_under(self.manager.block_pool)


class HintedCache(StockCache):
    """Our manager and SAM, told what an arm knows.

    Stands where ``engine.hooks`` stands in a server, with a clock of its own. Also the observer of
    the block pool.

    Args:
        workload: Whose requests it will see.
        hashes: Of its blocks.
        capacity: Blocks that it can hold.
        arm: What is told.
    """

    manager_cls = agent_kv_cache_manager(KVCacheManager)

    def __init__(self, workload: Workload, hashes: ChainHashes, capacity: int, arm: Arm) -> None:
        super().__init__(workload, hashes, capacity)
        settings = load_settings().model_copy(update={"give_way": arm.give_way})
        self._now = CLOCK_STARTS_AT
        self._arm = arm
        self._ends: list[tuple[float, SessionKey]] = []
        """Heap of the ends of sessions that are still to be told."""
        self._held_shares: list[float] = []
        self.sam = SessionAwareManager(
            self.manager.block_pool,
            self.manager.group_layouts(),
            settings,
            self._now,
            taught_policy(workload, arm, settings),
        )
        self.manager.on_served = self._served
        self.manager.block_pool.observer = self

    # -- time ----------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """See ``StockCache``. The steps that a server makes meanwhile are made here at once."""
        now += CLOCK_STARTS_AT
        while self._ends and self._ends[0][0] <= now:
            at, key = heapq.heappop(self._ends)
            self._tick(at)
            self.sam.free_session(key)
        self._tick(now)

    def _tick(self, now: float) -> None:
        self._now = max(self._now, now)
        while self.sam.next_tick_at <= self._now:
            self.sam.tick(self._now)

    # -- requests ------------------------------------------------------------------------------

    def begin(self, arrival: Arrival, now: float) -> Running | None:
        """See ``StockCache``."""
        tracked = self.manager.tracked
        name = f"{arrival.session.number}.{arrival.turn}"
        if name not in tracked:
            live = self._added(arrival)
            if live is not None:
                tracked[name] = TrackedRequest(live)
        return super().begin(arrival, now)

    def _added(self, arrival: Arrival) -> LiveRequest | None:
        intent = self._arm.intent(arrival)
        if intent is not None:
            return self.sam.request_added(intent, self._now)
        if self.sam.recognizes:
            return self.sam.unhinted_added(self._hashes.of(arrival.request.blocks), self._now)
        return None

    def end(self, running: Running, now: float) -> None:
        """See ``StockCache``. The session rests from then on, also if that is yet to come."""
        arrival, request = running.arrival, running.request
        ended_at = max(self._now, CLOCK_STARTS_AT + now)
        tracked = self.manager.tracked.get(request.request_id)
        if tracked is not None:
            self.sam.request_finished(
                tracked.live,
                self.manager.recorded_prefixes(request),
                ended_at,
                succeeded=True,
                output_tokens=arrival.request.output_tokens,
            )
        super().end(running, now)
        self.manager.tracked.pop(request.request_id, None)
        self._count()
        if tracked is None or tracked.live.session.is_conversation:
            return
        facts = self._arm.facts(arrival)
        if facts is not None:
            self.sam.turn_ended(key_of(arrival), "", facts.ended, facts.tools, self._now)
        if arrival.is_last and self._arm.end_delay is not None:
            heapq.heappush(self._ends, (ended_at + self._arm.end_delay, key_of(arrival)))

    def _served(self, request: Any, groups: Sequence[Sequence[Any]]) -> None:
        if not self.sam.sessions:
            return
        tracked = self.manager.tracked.get(request.request_id)
        if tracked is not None and not tracked.live.is_placed:
            self.sam.request_scheduled(tracked.live, self.manager.prompt_hashes(request))
        self.manager.note_hits(self.sam, request, groups)

    # -- what the pool reports (``PoolObserver``) ------------------------------------------------

    def blocks_reused(self, block_ids: Sequence[int]) -> None:
        """See ``PoolObserver``."""
        self.sam.ledger.blocks_reused(block_ids)

    def block_moved(self, old_id: int, new_id: int) -> None:
        """See ``PoolObserver``."""
        self.sam.ledger.block_moved(old_id, new_id)

    def pool_short(self, num_blocks: int) -> None:
        """See ``PoolObserver``."""
        self.sam.release_due(self._now, num_blocks)

    def blocks_wanted(self, zone: Zone, num_blocks: int) -> int:
        """See ``PoolObserver``."""
        return self.sam.give_way(self._now, num_blocks, leased=zone is Zone.TTL)

    def pool_reset(self) -> None:
        """See ``PoolObserver``."""
        self.sam.reset(self._now)

    # -- figures -------------------------------------------------------------------------------

    def _count(self) -> None:
        self._held_shares.append(self.manager.block_pool.num_retained_blocks / self.capacity)

    def figures(self) -> dict[str, Any]:
        """What SAM and the pool have counted."""
        counters = self.sam.counters
        superseded = counters.superseded_tokens
        regretted = counters.superseded_regret_tokens
        return {
            "knows": list(self._arm.knows),
            "protected_share": fmean(self._held_shares) if self._held_shares else 0.0,
            "overrides": sum(self.manager.block_pool.pressure_overrides.values()),
            "expired": counters.expired,
            "superseded": superseded,
            "superseded_regret_tokens": regretted,
            "superseded_regret": regretted / superseded if superseded else 0.0,
            "clipped": dict(counters.clipped),
        }
