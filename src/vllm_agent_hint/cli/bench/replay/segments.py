"""Runs of blocks that every request uses together, so that simulators need not look at blocks.

Chain ids are prefix-exact: whoever uses a block uses all before it. So two neighbours that are
used equally often are used by the same requests, and stay or go together, from the tail.
"""

from dataclasses import dataclass

import numpy as np

from vllm_agent_hint.cli.bench.replay.workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class SegmentedRequest:
    """A request's prompt.

    Args:
        segments: Numbers of its segments, first to last.
        hittable: How many of them it can be served from: never its last token, so not its last
            block either where the prompt ends with it. That block is then a segment of its own.
        blocks: Complete blocks of the prompt.
        slots: Blocks that it holds in the end: prompt, and what it generates.
    """

    segments: list[int]
    hittable: int
    blocks: int
    slots: int


@dataclass(frozen=True, slots=True, eq=False)
class Segmentation:
    """A workload in segments.

    Args:
        requests: One per arrival.
        lengths: Blocks of each segment.
        depths: Blocks before each segment in a prompt.
    """

    requests: list[SegmentedRequest]
    lengths: list[int]
    depths: list[int]


def slots_of(prompt_tokens: int, output_tokens: int, block_size: int) -> int:
    """Blocks that a request holds when it ends: its last token is sampled and never computed."""
    return -(-(prompt_tokens + max(output_tokens - 1, 0)) // block_size)


def segment(workload: Workload) -> Segmentation:
    """Cut a workload's prompts into segments. O(blocks), at numpy's speed."""
    size = workload.block_size
    requests = [arrival.request for arrival in workload.arrivals]
    uses = np.zeros(workload.num_ids, dtype=np.int32)
    begins = np.zeros(workload.num_ids, dtype=bool)
    for request in requests:
        uses[request.blocks] += 1
        if len(request.blocks) and request.prompt_tokens % size == 0:
            begins[request.blocks[-1]] = True
    number_of = np.full(workload.num_ids, -1, dtype=np.int32)
    lengths: list[int] = []
    depths: list[int] = []
    cut: list[SegmentedRequest] = []
    for request in requests:
        ids = request.blocks
        count = len(ids)
        starts = np.empty(0, dtype=np.int64)
        if count:
            used = uses[ids]
            starts = np.flatnonzero((used[1:] != used[:-1]) | begins[ids[1:]]) + 1
            starts = np.concatenate(([0], starts))
        numbers = number_of[ids[starts]]
        if (numbers < 0).any():
            ends = np.concatenate((starts[1:], [count]))
            for k in np.flatnonzero(numbers < 0).tolist():
                number_of[ids[starts[k]]] = numbers[k] = len(lengths)
                lengths.append(int(ends[k] - starts[k]))
                depths.append(int(starts[k]))
        ends_whole = count > 0 and request.prompt_tokens % size == 0
        cut.append(
            SegmentedRequest(
                numbers.tolist(),
                len(starts) - ends_whole,
                count,
                slots_of(request.prompt_tokens, request.output_tokens, size),
            )
        )
    return Segmentation(cut, lengths, depths)
