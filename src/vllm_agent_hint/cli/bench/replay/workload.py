"""Traffic that is put together from traces: which request arrives when."""

import heapq
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from vllm_agent_hint.traces.model import Trace, TracedRequest, TracedSession, TraceError

STAGGER_SECONDS = 600.0
"""Users who play sessions begin within so many seconds, unless other traffic keeps its own time."""


class Traffic(StrEnum):
    """A class of traffic."""

    AGENTS = "agents"
    """Sessions that name themselves."""
    ONE_SHOT = "one_shot"
    """Requests that carry no identity, and so no hint."""


@dataclass(frozen=True, slots=True, eq=False)
class PlayedSession:
    """A session in a workload.

    Args:
        number: Its place in ``Workload.sessions``.
        name: Unique in the workload.
        traffic: Its class.
        starts_at: Seconds from the start of the workload to its first request.
        requests: Block ids are the workload's.
        parent: Name of the session that started it.
        user: Who plays it, one session after another; None for traffic with times of its own.
        after_parent: As in the trace: seconds from the parent's first request to its own.
    """

    number: int
    name: str
    traffic: Traffic
    starts_at: float
    requests: tuple[TracedRequest, ...]
    parent: str | None = None
    user: int | None = None
    after_parent: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request at its time.

    Args:
        at: Seconds from the start of the workload.
        session: Whose.
        turn: Its place in the session, from 0.
    """

    at: float
    session: PlayedSession
    turn: int

    @property
    def request(self) -> TracedRequest:
        return self.session.requests[self.turn]

    @property
    def is_last(self) -> bool:
        """Whether the session is over with it."""
        return self.turn == len(self.session.requests) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """What is replayed.

    Args:
        block_size: Tokens in a block.
        sessions: All of them.
        arrivals: By time.
        num_ids: One more than the highest block id.
        unplayed: What would arrive of the sessions of its traces that it leaves out, by time.
    """

    block_size: int
    sessions: tuple[PlayedSession, ...]
    arrivals: tuple[Arrival, ...]
    num_ids: int
    unplayed: tuple[Arrival, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return sum(arrival.request.prompt_tokens for arrival in self.arrivals)


def compose(
    traces: Sequence[Trace],
    *,
    users: int,
    seed: int,
    share: float = 1.0,
    block_size: int | None = None,
    stagger: float | None = None,
) -> Workload:
    """Put a workload together.

    A trace whose sessions have no common clock is played by users, each of whom plays whole
    sessions one after another, with the pauses that they had. Traffic with a clock keeps it, and
    where there is some, nothing arrives after its end: up to there the mix is the same throughout.

    Args:
        traces: The first is the main one, each other one a class of traffic of its own.
        users: How many play at once.
        seed: Of the order of the sessions, the users' starts and the part that is taken.
        share: Of the sessions of the second trace and those after it.
        block_size: Tokens in a block; None for that of the first trace.
        stagger: Seconds within which users start; None for 600, or 0 beside traffic with a clock.

    Raises:
        TraceError: Block sizes don't go into one another.
    """
    block_size = block_size or traces[0].block_size
    has_clock = [any(s.starts_at is not None for s in trace.sessions) for trace in traces]
    if stagger is None:
        stagger = 0.0 if any(has_clock) else STAGGER_SECONDS
    played: list[PlayedSession] = []
    left_out: list[PlayedSession] = []
    next_id = 0
    ends_at = float("inf")
    for number, trace in enumerate(traces):
        rng = random.Random(f"{seed}/{number}")
        sessions, next_id = _with_blocks_of(trace, block_size, next_id)
        families = _families(sessions)
        rng.shuffle(families)
        if number:
            taken = max(1, round(share * len(families)))
            left_out += _at_their_time(families[taken:])
            families = families[:taken]
        if has_clock[number]:
            new = _at_their_time(families)
            ends_at = min(ends_at, max(s.starts_at + s.requests[-1].at for s in new))
        else:
            new = [*_play(families, range(number * users, (number + 1) * users), stagger, rng)]
        played += _numbered(new, len(played), f"{number}/" if number else "")
    left_out += [session for session in played if session.starts_at > ends_at]
    arrivals = [arrival for arrival in _by_time(played) if arrival.at <= ends_at]
    return Workload(block_size, tuple(played), tuple(arrivals), next_id, tuple(_by_time(left_out)))


def _by_time(sessions: Iterable[PlayedSession]) -> list[Arrival]:
    arrivals = [
        Arrival(session.starts_at + request.at, session, turn)
        for session in sessions
        for turn, request in enumerate(session.requests)
    ]
    return sorted(arrivals, key=lambda arrival: (arrival.at, arrival.session.number, arrival.turn))


def _at_their_time(families: Iterable[Iterable[TracedSession]]) -> list[PlayedSession]:
    return [
        _played(session, session.starts_at or 0.0, None)
        for family in families
        for session in family
    ]


def _families(sessions: Iterable[TracedSession]) -> list[list[TracedSession]]:
    """Sessions with those that they started, parents first."""
    families: dict[str, list[TracedSession]] = {}
    root_of: dict[str, str] = {}
    waiting = list(sessions)
    while waiting:
        left = []
        names = {session.name for session in waiting}
        for session in waiting:
            parent = session.parent
            if parent in names and parent not in root_of and parent != session.name:
                left.append(session)
                continue
            root = root_of.get(parent or "", session.name)
            root_of[session.name] = root
            families.setdefault(root, []).append(session)
        if len(left) == len(waiting):
            # Parents in a circle: nobody is first.
            left = [replace(left[0], parent=None), *left[1:]]
        waiting = left
    return list(families.values())


def _play(
    families: Sequence[Sequence[TracedSession]],
    users: Iterable[int],
    stagger: float,
    rng: random.Random,
) -> Iterator[PlayedSession]:
    free = [(rng.random() * stagger, user) for user in users]
    heapq.heapify(free)
    for family in families:
        start, user = heapq.heappop(free)
        starts: dict[str, float] = {}
        end = start
        for session in family:
            begins = start
            if session.parent in starts:
                begins = starts[session.parent] + session.after_parent
            starts[session.name] = begins
            yield _played(session, begins, user)
            last = session.requests[-1]
            end = max(end, begins + last.at + (last.service_seconds or 0.0))
        heapq.heappush(free, (end, user))


def _played(session: TracedSession, starts_at: float, user: int | None) -> PlayedSession:
    traffic = Traffic.AGENTS if session.is_named else Traffic.ONE_SHOT
    return PlayedSession(
        -1,
        session.name,
        traffic,
        starts_at,
        session.requests,
        session.parent,
        user,
        session.after_parent,
    )


def _numbered(
    sessions: Sequence[PlayedSession], first: int, prefix: str
) -> Iterator[PlayedSession]:
    for number, session in enumerate(sessions, start=first):
        parent = None if session.parent is None else prefix + session.parent
        yield replace(session, number=number, name=prefix + session.name, parent=parent)


def _with_blocks_of(
    trace: Trace, block_size: int, first_id: int
) -> tuple[list[TracedSession], int]:
    """Sessions whose blocks have another size, and ids from ``first_id`` on.

    Of a coarser block the id is that of its last part; a finer one's is made of the id that it is
    a part of. What a prompt has beyond its last complete coarse block is nobody else's.

    Returns:
        The sessions, and the first id that is free.
    """
    size = trace.block_size
    if block_size % size and size % block_size:
        raise TraceError(
            f"{trace.name}: its blocks of {size} tokens and {block_size} don't go into one "
            "another; give a --block-size that divides both or is a multiple of both"
        )
    split = max(1, size // block_size)
    join = max(1, block_size // size)
    arrays = [request.blocks for session in trace.sessions for request in session.requests]
    highest = max((int(ids.max()) for ids in arrays if len(ids)), default=-1)
    dense: np.ndarray | None = None
    if highest > 1_000_000 + 4 * sum(map(len, arrays)):
        dense = np.unique(np.concatenate(arrays))
        highest = len(dense) - 1
    next_id = first_id + (highest + 1) * split
    parts = np.arange(split, dtype=np.int64)
    sessions: list[TracedSession] = []
    for session in trace.sessions:
        requests = []
        for request in session.requests:
            ids = request.blocks if dense is None else np.searchsorted(dense, request.blocks)
            ids = ids[join - 1 :: join]
            if split > 1:
                ids = (ids[:, None] * split + parts).ravel()
            if first_id:
                ids = ids + first_id
            alone = request.prompt_tokens // block_size - len(ids)
            if alone > 0:
                ids = np.concatenate((ids, np.arange(next_id, next_id + alone)))
                next_id += alone
            requests.append(replace(request, blocks=ids))
        sessions.append(replace(session, requests=tuple(requests)))
    return sessions, next_id
