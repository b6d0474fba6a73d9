"""Resting sessions in the order in which they give way."""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import chain, count, islice
from operator import attrgetter

from vllm_agent_hint.sessions.ledger import Ledger
from vllm_agent_hint.sessions.lineage import Lineage
from vllm_agent_hint.sessions.policy import RetentionPolicy
from vllm_agent_hint.sessions.session import Session
from vllm_agent_hint.sessions.tail import Record, iter_tail_first


class _Kind(Enum):
    """What of a session can go."""

    UNLEASED = "all that it holds, without a lease"
    REMAINDER = "what a session with a lease holds beside it"
    LEASED = "what it holds under a lease"


class _Place:
    """Where a session stands.

    Args:
        session: Whose it is.
        kind: What of it can go.
        queue: With the others of its class.
        order: Monotonic seconds since when it rests, and a number of its own.
        tail: Its records, tail first; as far as they have been offered they are gone from it.
    """

    __slots__ = ("is_left", "is_spent", "kind", "order", "queue", "session", "tail")

    def __init__(
        self,
        session: Session,
        kind: _Kind,
        queue: "_Queue",
        order: tuple[float, int],
        tail: Iterator[Record],
    ) -> None:
        self.session = session
        self.kind = kind
        self.queue = queue
        self.order = order
        self.tail = tail
        self.is_left = False
        """Whether it is in its queue no more."""
        self.is_spent = False
        """Whether that is because all of it has been offered."""


_End = tuple[float, tuple[float, int], bool, _Place]
"""What the session at an end of a class is worth, its order, whether it is the last, its place."""

_order: Callable[[_Place], tuple[float, int]] = attrgetter("order")


class _Queue:
    """The sessions of one class, in the order in which they began to rest.

    Args:
        turns: The class.
    """

    __slots__ = ("places", "turns")

    def __init__(self, turns: Hashable) -> None:
        self.turns = turns
        self.places: list[_Place] = []

    def add(self, place: _Place) -> None:
        """At the end; further ahead if more has become known of it after others came. O(log n)."""
        insort(self.places, place, key=_order)

    def remove(self, place: _Place) -> None:
        del self.places[bisect_left(self.places, place.order, key=_order)]


class Standing:
    """Who rests, with a lease and without, by the policy's classes.

    Args:
        policy: Names the classes, says what a session of each is worth, and learns.
        ledger: Which block is whose.
    """

    def __init__(self, policy: RetentionPolicy, ledger: Ledger) -> None:
        self._policy = policy
        self._ledger = ledger
        self._places: dict[Session, list[_Place]] = {}
        self._classes: dict[_Kind, dict[Hashable, _Queue]] = {kind: {} for kind in _Kind}
        self._spent: dict[_Kind, dict[Session, None]] = {kind: {} for kind in _Kind}
        """Those of which all has been offered, first to last: what is left of them goes next."""
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, session: Session) -> bool:
        return session in self._places

    # -- who rests -------------------------------------------------------------------------------

    def rest(self, session: Session, now: float) -> None:
        """A session rests. O(leases)."""
        if session.rested_at is None:
            session.rested_at = now
        self.stand_again(session)

    def stand_again(self, session: Session) -> None:
        """More has become known of a session that may rest, or a lease of it has ended.

        One that does not rest, or has nothing to give, stands nowhere.
        """
        self.leave(session)
        if session.rested_at is None:
            return
        giving = [lineage for lineage in session.lineages if _has_something_to_give(lineage)]
        if not giving:
            return
        ttl = max((lease.ttl for lease in session.leases), default=None)
        session.turn = replace(session.turn, ttl=ttl)
        turns = self._policy.class_of(session.turn)
        self._places[session] = []
        if ttl is None:
            self._take_place(session, _Kind.UNLEASED, turns)
            return
        self._take_place(session, _Kind.LEASED, turns)
        if any(not x.leases or x.leases[-1].end_token is not None for x in giving):
            self._take_place(session, _Kind.REMAINDER, turns)

    def _take_place(self, session: Session, kind: _Kind, turns: Hashable) -> None:
        assert session.rested_at is not None
        queue = self._classes[kind].get(turns)
        if queue is None:
            queue = self._classes[kind][turns] = _Queue(turns)
        layouts = self._ledger.layouts
        tail = chain.from_iterable(
            iter_tail_first(layouts, lineage.chains) for lineage in tuple(session.lineages)
        )
        order = (session.rested_at, next(self._numbers))
        place = _Place(session, kind, queue, order, tail)
        queue.add(place)
        self._places[session].append(place)

    def leave(self, session: Session) -> None:
        """A session goes on, or has nothing left to give; no-op if it does not stand. O(log n)."""
        for place in self._places.pop(session, ()):
            if place.is_spent:
                del self._spent[place.kind][session]
            else:
                self._step_out(place)

    def _step_out(self, place: _Place) -> None:
        place.is_left = True
        place.queue.remove(place)
        if not place.queue.places:
            del self._classes[place.kind][place.queue.turns]

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

    def in_order(
        self,
        now: float,
        *,
        leased: bool,
        counts: Callable[[Session], bool] | None = None,
    ) -> Iterator[Session]:
        """Sessions, those first that are worth least; each again and again, until it has left.

        A leader that waits for its workers comes after them. O(classes with a session in them)
        to begin, and the sessions that don't count; O(log classes) for each that leaves.

        Args:
            now: Monotonic seconds.
            leased: Those with a lease, or those without.
            counts: Leave out the others.
        """
        kind = _Kind.LEASED if leased else _Kind.UNLEASED
        for session in list(self._spent[kind]):
            while (counts is None or counts(session)) and session in self._spent[kind]:
                yield session
        for place in self._in_order((kind,), now, counts):
            yield place.session

    def bring_to_front(self, now: float, num_blocks: int, *, leased: bool) -> int:
        """Bring the blocks that are worth least to the front of their zone.

        What several lineages hold is left where it is. O(num_blocks + classes).

        Args:
            now: Monotonic seconds.
            num_blocks: How many are wanted.
            leased: From sessions with a lease (zone C), or those without (zone B).

        Returns:
            How many were found.
        """
        kinds = (_Kind.LEASED,) if leased else (_Kind.UNLEASED, _Kind.REMAINDER)
        found: list[tuple[int, bytes]] = []
        budget = 4 * num_blocks + 64
        for place in self._in_order(kinds, now):
            wanted = min(num_blocks - len(found), budget)
            offered = list(islice(place.tail, wanted))
            budget -= max(1, len(offered))
            found += self._ledger.free_alone(offered, leased=leased)
            if len(offered) < wanted:
                self._step_out(place)
                place.is_spent = True
                self._spent[place.kind][place.session] = None
            if len(found) >= num_blocks or budget <= 0:
                break
        self._ledger.port.reuse_next(found)
        return len(found)

    def _in_order(
        self,
        kinds: Sequence[_Kind],
        now: float,
        counts: Callable[[Session], bool] | None = None,
    ) -> Iterator[_Place]:
        """As ``in_order``. Only the ends of a class are asked what they are worth."""
        heap: list[_End] = []
        for kind in kinds:
            for queue in self._classes[kind].values():
                ends = (False,) if len(queue.places) == 1 else (False, True)
                for last in ends:
                    end = self._end(queue, now, counts, last=last)
                    if end is not None:
                        heap.append(end)
        heapify(heap)
        while heap:
            _, _, last, place = heap[0]
            if place.is_left:
                heappop(heap)
                following = self._end(place.queue, now, counts, last=last)
                if following is not None:
                    heappush(heap, following)
            else:
                yield self._last_of_family(place)

    def _end(
        self,
        queue: _Queue,
        now: float,
        counts: Callable[[Session], bool] | None,
        *,
        last: bool,
    ) -> "_End | None":
        """The first or the last of a class that counts, behind what it is worth."""
        if counts is None:
            place = queue.places[-last] if queue.places else None
        else:
            places = reversed(queue.places) if last else iter(queue.places)
            place = next((place for place in places if counts(place.session)), None)
        if place is None:
            return None
        order = place.order
        resting = now - order[0]
        return (
            self._policy.worth(queue.turns, resting if resting > 0.0 else 0.0),
            order,
            last,
            place,
        )

    def _last_of_family(self, place: _Place) -> _Place:
        for child in place.session.children:
            for below in self._places.get(child, ()):
                is_alike = (below.kind is _Kind.LEASED) is (place.kind is _Kind.LEASED)
                if is_alike and not below.is_left:
                    return self._last_of_family(below)
        return place


def _has_something_to_give(lineage: Lineage) -> bool:
    """Whether it holds records that are not all being let go."""
    return len(lineage) > 0 and lineage.trim_to != 0
