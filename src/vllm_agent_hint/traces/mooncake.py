"""Mooncake's traces of a chat service: arrivals of one hour, without identities.

The ids are prefix-exact, the one of an incomplete last block included. Sessions are inferred.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np

from vllm_agent_hint.traces.inference import infer_sessions
from vllm_agent_hint.traces.line import Line
from vllm_agent_hint.traces.model import Trace, TracedRequest

BLOCK_SIZE: Final = 512
MILLISECONDS: Final = 1e-3


def read_mooncake(name: str, lines: Iterable[Line]) -> Trace:
    """See the module.

    Raises:
        TraceError: A line isn't as it should be.
    """
    arrivals: list[tuple[float, TracedRequest]] = []
    for line in lines:
        tokens = line.whole("input_length")
        ids = np.array(line.ids("hash_ids"), dtype=np.int64)
        request = TracedRequest(
            0.0,
            tokens,
            line.whole("output_length"),
            line.complete_blocks("hash_ids", ids, tokens, BLOCK_SIZE),
        )
        if tokens:
            arrivals.append((line.seconds("timestamp", scale=MILLISECONDS), request))
    arrivals.sort(key=lambda arrival: arrival[0])
    return Trace(name, BLOCK_SIZE, tuple(infer_sessions(arrivals, "chat")))
