"""Finding the sessions of requests that carry no identity."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from vllm_agent_hint.traces.model import TracedRequest, TracedSession

MIN_BLOCKS = 2
"""Complete blocks that a prompt needs before another can be said to go on from it."""


def infer_sessions(
    arrivals: Iterable[tuple[float, TracedRequest]], prefix: str = "inferred"
) -> Iterator[TracedSession]:
    """Put requests together that go on from one another.

    A request belongs to the session whose last prompt, of two complete blocks at least, is a
    prefix of its own; to the longest, if there are several. A conversation that returns after the
    end of the trace, or that rewrites its prompt, is another session.

    Args:
        arrivals: ``(seconds since the start of the trace, request)`` by time.
        prefix: Of the sessions' names.
    """
    members: list[list[tuple[float, TracedRequest]]] = []
    latest: dict[int, int] = {}
    """Session by the last chain id of its latest prompt: ids are prefix-exact."""
    for at, request in arrivals:
        ids = request.blocks.tolist()
        found = None
        for chain_id in reversed(ids[MIN_BLOCKS - 1 :]):
            found = latest.pop(chain_id, None)
            if found is not None:
                break
        if found is None:
            found = len(members)
            members.append([])
        members[found].append((at, request))
        if len(ids) >= MIN_BLOCKS:
            latest[ids[-1]] = found
    for number, requests in enumerate(members):
        start = requests[0][0]
        yield TracedSession(
            f"{prefix}-{number}",
            tuple(replace(request, at=at - start) for at, request in requests),
            starts_at=start,
            is_named=False,
        )
