"""What a turn of a long session costs beside stock."""

import itertools
import random
import time
from typing import Any, Final

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_agent_hint.cli.bench.engine import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    build_request,
    build_scheduler,
    full_attention,
)
from vllm_agent_hint.cli.bench.figure import Measured
from vllm_agent_hint.cli.bench.paired import compare_in_pairs, seconds
from vllm_agent_hint.cli.bench.pools import TTL, key_of
from vllm_agent_hint.engine.scheduler import agent_scheduler
from vllm_agent_hint.kvcache.manager import TrackedRequest
from vllm_agent_hint.sessions.intent import Protection, SessionIntent

POOL_BLOCKS: Final = 20_000
TURN_BLOCKS: Final = 131_072 // BLOCK_SIZE
NEW_BLOCKS: Final = 128
OTHER_SESSIONS: Final = 100
OTHER_BLOCKS: Final = 8


def hinted_turn(*, pairs: int) -> Measured:
    """A turn of 131,072 tokens with 128 new blocks, of a session known from the turn before."""
    return Measured.of(compare_in_pairs(_StockTurn(), _HintedTurn(), pairs=pairs, unit_count=1))


class _StockTurn:
    """Plays turns on a KV cache manager: a long known context, and a new tail each time."""

    def __init__(self) -> None:
        self._rng = random.Random(3)
        self._known = [self._rng.randrange(1_000) for _ in range(MAX_MODEL_LEN)]
        self._known = self._known[: (TURN_BLOCKS - NEW_BLOCKS) * BLOCK_SIZE]
        self._numbers = itertools.count()
        self.scheduler = build_scheduler(
            self.scheduler_cls(),
            full_attention(),
            num_blocks=POOL_BLOCKS,
            max_num_seqs=1,
            max_num_batched_tokens=8_192,
        )
        self.manager = self.scheduler.kv_cache_manager
        self._prepare()

    def scheduler_cls(self) -> Any:
        return Scheduler

    def _prepare(self) -> None:
        self._turn(self._request([]))

    def __call__(self) -> float:
        self._forget_session()
        self._turn(self._request([]))  # the turn before
        request = self._request(
            [self._rng.randrange(1_000) for _ in range(NEW_BLOCKS * BLOCK_SIZE)]
        )
        return seconds(lambda: self._turn(request))

    def _forget_session(self) -> None:
        """Each measured turn follows a first one that knows no other tail."""

    def _request(self, tail: list[int]) -> Any:
        return build_request(f"turn-{next(self._numbers)}", self._known + tail, max_tokens=1)

    def _turn(self, request: Any) -> None:
        blocks, num_cached, _ = self.manager.get_computed_blocks(request)
        self.manager.allocate_slots(request, request.num_tokens - num_cached, num_cached, blocks)
        self.manager.free(request)


class _HintedTurn(_StockTurn):
    """The same through our manager and SAM."""

    def scheduler_cls(self) -> Any:
        return agent_scheduler(Scheduler)

    def _prepare(self) -> None:
        self._sam = self.scheduler.agent_hint.sam
        self._intent = SessionIntent(key_of("agent"), None, (Protection(TTL),))
        for number in range(OTHER_SESSIONS):
            prompt = [self._rng.randrange(1_000) for _ in range(OTHER_BLOCKS * BLOCK_SIZE)]
            intent = SessionIntent(key_of(f"other-{number}"), None, (Protection(TTL),))
            self._hinted(build_request(f"other-{number}", prompt, max_tokens=1), intent)
        super()._prepare()

    def _forget_session(self) -> None:
        assert self._intent.key is not None
        self._sam.free_session(self._intent.key)
        self._sam.finish_releases()

    def _turn(self, request: Any) -> None:
        self._hinted(request, self._intent)

    def _hinted(self, request: Any, intent: SessionIntent) -> None:
        manager = self.manager
        live = self._sam.request_added(intent, time.monotonic())
        assert live is not None
        self._sam.request_scheduled(live, manager.prompt_hashes(request))
        manager.tracked[request.request_id] = TrackedRequest(live)
        blocks, num_cached, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - num_cached, num_cached, blocks)
        self._sam.request_finished(
            live, manager.recorded_prefixes(request), time.monotonic(), succeeded=True
        )
        manager.free(request)
        del manager.tracked[request.request_id]
