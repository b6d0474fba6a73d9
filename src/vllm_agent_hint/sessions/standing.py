"""Resting sessions in the order in which they give way."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from itertools import chain, islice

from vllm_agent_hint.sessions.ledger import Ledger
from vllm_agent_hint.sessions.policy import RetentionPolicy
from vllm_agent_hint.sessions.session import Session
from vllm_agent_hint.sessions.tail import Record, iter_tail_first


class _Place:
    """Where a session stands.

    Args:
        queue: With the others of its class.
        leased: Whether it has a lease.
        since: Monotonic seconds at which it began to rest.
        tail: Its records, tail first; as far as they have been offered they are gone from it.
    """

    __slots__ = ("leased", "queue", "since", "tail")

    def __init__(self, queue: "_Queue", leased: bool, since: float, tail: Iterator[Record]) -> None:
        self.queue = queue
        self.leased = leased
        self.since = since
        self.tail = tail


_Queue = dict[Session, _Place]
"""The sessions of one class, in the order in which they began to rest."""


class Standing:
    """Who rests, with a lease and without, by the policy's classes.

    Args:
        policy: Names the classes, says what a session of each is worth, and learns.
        ledger: Which block is whose.
    """

    def __init__(self, policy: RetentionPolicy, ledger: Ledger) -> None:
        self._policy = policy
        self._ledger = ledger
        self._places: dict[Session, _Place] = {}
        self._classes: tuple[dict[Hashable, _Queue], dict[Hashable, _Queue]] = ({}, {})
        """Without a lease, with one."""

    def __len__(self) -> int:
        return len(self._places)

    # -- who rests -------------------------------------------------------------------------------

    def rest(self, session: Session, now: float) -> None:
        """A session rests, or more has become known of the turn after which it does. O(leases)."""
        self.leave(session)
        if session.rested_at is None:
            session.rested_at = now
        ttl = max((lease.ttl for lease in session.leases), default=None)
        session.turn = replace(session.turn, ttl=ttl)
        turns = self._policy.class_of(session.turn)
        leased = ttl is not None
        queue = self._classes[leased].setdefault(turns, {})
        tail = chain.from_iterable(
            iter_tail_first(self._ledger.layouts, lineage.chains) for lineage in session.lineages
        )
        self._places[session] = queue[session] = _Place(queue, leased, session.rested_at, tail)

    def leave(self, session: Session) -> None:
        """A session goes on, or has nothing left to give; no-op if it does not stand. O(1)."""
        place = self._places.pop(session, None)
        if place is not None:
            del place.queue[session]

    def come_back(self, session: Session, now: float) -> float | None:
        """A request of a session has come.

        Returns:
            Seconds for which the session had rested; None if it had not.
        """
        if session.rested_at is None:
            return None
        gap = now - session.rested_at
        session.rested_at = None
        self._policy.observe(self._policy.class_of(session.turn), gap)
        return gap

    def stay_away(self, session: Session) -> None:
        """A session ends without having come back."""
        if session.rested_at is not None:
            self._policy.observe(self._policy.class_of(session.turn), None)

    # -- who gives way ---------------------------------------------------------------------------

    def next_to_give_way(
        self,
        now: float,
        *,
        leased: bool,
        counts: Callable[[Session], bool] | None = None,
    ) -> Session | None:
        """The session that is worth least; a leader that waits for its workers goes after them.

        O(classes with a session in them), and the sessions that don't count.

        Args:
            now: Monotonic seconds.
            leased: Among those with a lease, or those without.
            counts: Leave out the others.
        """
        least: tuple[float, float] | None = None
        chosen: Session | None = None
        classes = self._classes[leased]
        for turns in [turns for turns, queue in classes.items() if not queue]:
            del classes[turns]
        for turns, queue in classes.items():
            for end in (iter(queue), reversed(queue)):
                session = next(filter(counts, end), None) if counts else next(end)
                if session is None:
                    continue
                since = queue[session].since
                worth = (self._policy.worth(turns, max(0.0, now - since)), since)
                if least is None or worth < least:
                    least, chosen = worth, session
        return chosen and self._last_of_family(chosen, leased=leased)

    def _last_of_family(self, session: Session, *, leased: bool) -> Session:
        for child in session.children:
            place = self._places.get(child)
            if place is not None and place.leased is leased:
                return self._last_of_family(child, leased=leased)
        return session

    def bring_to_front(self, now: float, num_blocks: int, *, leased: bool) -> int:
        """Bring the blocks that are worth least to the front of their zone.

        What several lineages hold is left where it is. O(num_blocks + classes) per session.

        Args:
            now: Monotonic seconds.
            num_blocks: How many are wanted.
            leased: From sessions with a lease (zone C), or those without (zone B).

        Returns:
            How many were found.
        """
        found: list[tuple[int, bytes]] = []
        budget = 4 * num_blocks + 64
        while len(found) < num_blocks and budget > 0:
            session = self.next_to_give_way(now, leased=leased)
            if session is None:
                break
            wanted = min(num_blocks - len(found), budget)
            offered = list(islice(self._places[session].tail, wanted))
            budget -= len(offered)
            found += self._ledger.free_alone(offered, leased=leased)
            if len(offered) < wanted:
                self.leave(session)
        self._ledger.port.reuse_next(found)
        return len(found)
