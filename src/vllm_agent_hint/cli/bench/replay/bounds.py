"""What no policy can beat: Belady's optimum, and the optimum that knows next turns only.

Both evict the block whose next use is furthest, the tail of a prompt first, and never a block that
the present request is served from.
"""

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from vllm_agent_hint.cli.bench.replay.segments import Segmentation
from vllm_agent_hint.cli.bench.replay.workload import Traffic, Workload

NEVER: Final = 1 << 60


class NextUse(Protocol):
    """What an oracle knows."""

    def passes(self, now: int) -> list[int]:
        """Request ``now`` has come: segments, beside its own, whose next use is now known."""

    def of(self, segment: int) -> int:
        """Number of the request that uses a segment next; ``NEVER`` if none is known of."""


class Everything:
    """Belady's oracle: knows the whole future."""

    def __init__(self, cut: Segmentation) -> None:
        self._uses: list[list[int]] = [[] for _ in cut.lengths]
        """Of each segment, the requests that are still to come, the next one last."""
        self._requests = cut.requests
        for number in reversed(range(len(cut.requests))):
            request = cut.requests[number]
            for place, segment in enumerate(request.segments):
                # Who computes a block anew in any case has no use for what is there.
                self._uses[segment].append(number if place < request.hittable else -number - 1)

    def passes(self, now: int) -> list[int]:
        for segment in self._requests[now].segments:
            self._uses[segment].pop()
        return []

    def of(self, segment: int) -> int:
        uses = self._uses[segment]
        return uses[-1] if uses and uses[-1] >= 0 else NEVER


class NextTurns:
    """Knows when each session that has begun, and says who it is, comes next, and with what."""

    def __init__(self, workload: Workload, cut: Segmentation) -> None:
        self._requests = cut.requests
        self._next_turn: list[int | None] = [None] * len(cut.requests)
        self._known: list[list[int]] = [[] for _ in cut.lengths]
        """Of each segment, a heap of the next turns that will use it."""
        latest: dict[int, int] = {}
        for number in reversed(range(len(cut.requests))):
            session = workload.arrivals[number].session
            if session.traffic is Traffic.AGENTS and cut.requests[number].segments:
                self._next_turn[number] = latest.get(session.number)
                latest[session.number] = number

    def passes(self, now: int) -> list[int]:
        for segment in self._requests[now].segments:
            known = self._known[segment]
            while known and known[0] <= now:
                heapq.heappop(known)
        turn = self._next_turn[now]
        if turn is None:
            return []
        request = self._requests[turn]
        for segment in request.segments[: request.hittable]:
            heapq.heappush(self._known[segment], turn)
        return request.segments

    def of(self, segment: int) -> int:
        known = self._known[segment]
        return known[0] if known else NEVER


def replay_min(cut: Segmentation, capacity: int) -> list[int]:
    """Blocks of each request's prompt that Belady's optimum serves."""
    return _replay(cut, capacity, Everything)


def replay_session_min(workload: Workload, cut: Segmentation, capacity: int) -> list[int]:
    """Blocks of each request's prompt that are served by who knows next turns only."""
    return _replay(cut, capacity, lambda fitting: NextTurns(workload, fitting))


def _replay(
    cut: Segmentation, capacity: int, oracle_over: Callable[[Segmentation], NextUse]
) -> list[int]:
    """Evict what the oracle names.

    What it knows nothing of goes first, the least recently used of it first of all. A request that
    doesn't fit at all passes without effect, so nobody waits for it.
    """
    fitting = [
        request if request.slots <= capacity else replace(request, segments=[], hittable=0)
        for request in cut.requests
    ]
    oracle = oracle_over(replace(cut, requests=fitting))
    lengths, depths = cut.lengths, cut.depths
    resident = [0] * len(lengths)
    last_use = [-1] * len(lengths)
    order: list[tuple[int, int, int, int]] = []
    """Heap of ``(-next use, last use, -depth, segment)``; stale where one of them has changed."""
    used = 0
    served: list[int] = []

    def enqueue(segments: list[int]) -> None:
        for segment in segments:
            if resident[segment]:
                use = last_use[segment]
                heapq.heappush(order, (-oracle.of(segment), use, -depths[segment], segment))

    for now, request in enumerate(fitting):
        enqueue(oracle.passes(now))
        if request.slots > capacity:
            served.append(0)
            continue
        hits = 0
        for segment in request.segments[: request.hittable]:
            hits += resident[segment]
            if resident[segment] < lengths[segment]:
                break
        served.append(hits)
        for segment in request.segments[request.hittable :]:
            # It is computed again: what is there of it need not stay beside that.
            used -= resident[segment]
            resident[segment] = 0
        for segment in request.segments:
            last_use[segment] = now
        wanted = request.slots - hits - (capacity - used)
        while wanted > 0:
            entry = heapq.heappop(order)
            next_use, use, _, segment = entry
            is_stale = use != last_use[segment] or -next_use != oracle.of(segment)
            if is_stale or not resident[segment]:
                continue
            taken = min(wanted, resident[segment])
            resident[segment] -= taken
            used -= taken
            wanted -= taken
            if resident[segment]:
                heapq.heappush(order, entry)
        for segment in request.segments:
            used += lengths[segment] - resident[segment]
            resident[segment] = lengths[segment]
        enqueue(request.segments)
    return served
