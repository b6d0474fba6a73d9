"""What one session among a thousand pays for the prefix that all of them share."""

import statistics
from collections.abc import Callable
from typing import Final

from vllm_agent_hint.cli.bench.engine import BLOCK_SIZE
from vllm_agent_hint.cli.bench.figure import Measured
from vllm_agent_hint.cli.bench.paired import quiet_collector, seconds
from vllm_agent_hint.cli.bench.pools import (
    fill,
    fresh_hashes,
    key_of,
    new_sam,
    prefix_of,
    record,
)
from vllm_agent_hint.kvcache.pool import AgentBlockPool
from vllm_agent_hint.sessions.lineage import RecordedPrefix

POOL_BLOCKS: Final = 20_000
SHARERS: Final = 1_000
SHARED_BLOCKS: Final = 1_000

NOW: Final = 1_000.25
ALL: Final = 600.0
LONGER, SHORTER = 900.0, 300.0


def shared_release_slice(*, rounds: int) -> Measured:
    """The worst step of a free, or of a turn with another TTL, in milliseconds.

    A step is one call of SAM: the free or the end of the turn, and each tick after it. The worst
    of each round counts, and of those the median, for each of the three.
    """
    with quiet_collector():
        crowd = _Crowd()
        worst: dict[str, list[float]] = {"free": [], "longer_ttl": [], "shorter_ttl": []}
        for number in range(rounds):
            name = f"session-{number * SHARERS // rounds}"
            worst["longer_ttl"].append(max(crowd.turn(name, LONGER)))
            # The others have to be asked now: this one alone protects the prefix for longest.
            worst["shorter_ttl"].append(max(crowd.turn(name, SHORTER)))
            crowd.turn(name, LONGER)
            worst["free"].append(max(crowd.free(name)))
            crowd.turn(name, ALL)
    parts = {name: statistics.median(steps) * 1e3 for name, steps in worst.items()}
    return Measured(max(parts.values()), parts=parts)


class _Crowd:
    """A thousand sessions that share a thousand blocks."""

    def __init__(self) -> None:
        pool = AgentBlockPool(POOL_BLOCKS, True, BLOCK_SIZE)
        fill(pool, fresh_hashes())
        self._sam = new_sam(pool, NOW)
        self._prefix = prefix_of(pool.free_block_queue.get_all_free_blocks()[:SHARED_BLOCKS])
        for number in range(SHARERS):
            # No two leases end at the same time.
            self.turn(f"session-{number}", ALL + number / SHARERS)

    def turn(self, name: str, ttl: float) -> list[float]:
        prefix = RecordedPrefix(list(self._prefix.block_ids), list(self._prefix.hashes))
        return self._steps(lambda: record(self._sam, name, prefix, NOW, ttl=ttl))

    def free(self, name: str) -> list[float]:
        return self._steps(lambda: self._sam.free_session(key_of(name)))

    def _steps(self, first: Callable[[], object]) -> list[float]:
        """Seconds of a call and of each tick that goes on with it."""
        steps = [seconds(first)]
        while self._sam.next_tick_at <= NOW:
            steps.append(seconds(lambda: self._sam.tick(NOW)))
        return steps
