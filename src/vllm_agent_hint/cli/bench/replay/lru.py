"""An LRU of our own, written from its description and not from vLLM's code.

Stock vLLM must serve what this serves, to the last token: if not, one of the two is not what we
take it for, and no figure beside them means anything.
"""

import heapq

from vllm_agent_hint.cli.bench.replay.segments import Segmentation


def replay_lru(cut: Segmentation, capacity: int) -> list[int]:
    """Blocks of each request's prompt that LRU serves from a cache of ``capacity`` blocks.

    A request uses its blocks all at once; the tail of a prompt goes before what lies before it. A
    request that doesn't fit at all passes without effect. Where a prompt is served up to its last
    block, which must be computed again, the new copy lies beside the old one.
    """
    lengths, depths = cut.lengths, cut.depths
    resident = [0] * len(lengths)
    last_use = [-1] * len(lengths)
    copies: dict[int, list[int]] = {}
    """Of segments of one block: when copies beside the first were made."""
    order: list[tuple[int, int, int]] = []
    """Heap of ``(use, -depth, segment)``; an entry whose use is not the segment's is stale."""
    used = 0
    served: list[int] = []
    for now, request in enumerate(cut.requests):
        if request.slots > capacity:
            served.append(0)
            continue
        hits = 0
        reached = 0
        for segment in request.segments[: request.hittable]:
            hits += resident[segment]
            if resident[segment]:
                last_use[segment] = now
            if resident[segment] < lengths[segment]:
                break
            reached += 1
        served.append(hits)
        used -= _free_oldest(
            request.slots - hits - (capacity - used), now, order, resident, last_use, copies
        )
        for segment in request.segments:
            is_copy = (
                reached == request.hittable < len(request.segments)
                and segment == request.segments[-1]
                and resident[segment]
            )
            if is_copy:
                copies.setdefault(segment, []).append(now)
                used += 1
            else:
                used += lengths[segment] - resident[segment]
                resident[segment] = lengths[segment]
                last_use[segment] = now
            heapq.heappush(order, (now, -depths[segment], segment))
    return served


def _free_oldest(
    wanted: int,
    now: int,
    order: list[tuple[int, int, int]],
    resident: list[int],
    last_use: list[int],
    copies: dict[int, list[int]],
) -> int:
    """Free the blocks that were used longest ago, the present request's excepted.

    Returns:
        How many, at most ``wanted``.
    """
    freed = 0
    while freed < wanted:
        entry = heapq.heappop(order)
        use, _, segment = entry
        if use == last_use[segment] and resident[segment] and use != now:
            taken = min(wanted - freed, resident[segment])
            resident[segment] -= taken
            freed += taken
            if resident[segment]:
                heapq.heappush(order, entry)
            elif copies.get(segment):
                # The copy that was made first is now the one that is found.
                resident[segment] = 1
                last_use[segment] = copies[segment].pop(0)
        elif use in copies.get(segment, ()):
            copies[segment].remove(use)
            freed += 1
    return freed
