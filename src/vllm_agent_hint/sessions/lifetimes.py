"""The life of a session: its leases stop and run with its requests, and one day it ends."""

from collections.abc import Hashable, Iterable
from functools import partial

from vllm_agent_hint.sessions import family
from vllm_agent_hint.sessions.books import Books
from vllm_agent_hint.sessions.conversations import ConversationKey
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.sessions.lineage import Lease, Lineage
from vllm_agent_hint.sessions.releases import Release
from vllm_agent_hint.sessions.session import IdleLimit, Session
from vllm_agent_hint.sessions.ttl import WheelEntry
from vllm_agent_hint.settings import Placement


class Lifetimes:
    """Begins sessions, stops and starts their leases, lets them expire, and ends them.

    Args:
        books: Shared with the rooms beside this one.
    """

    def __init__(self, books: Books) -> None:
        self._books = books

    def use(self, key: Hashable, tenant: str) -> Session | None:
        """The session of a key, a new one if there is none; None if there is no room for it."""
        session = self._books.sessions.pop(key, None)
        if session is None:
            if not self._make_room():
                return None
            session = Session(key, len(self._books.layouts), tenant=tenant)
        self._books.sessions[key] = session
        return session

    def use_conversation(self, key: ConversationKey, tenant: str) -> Session:
        """The session of a conversation, a new one if there is none."""
        session = self._books.sessions.pop(key, None)
        if session is None:
            session = Session(key, len(self._books.layouts), tenant=tenant)
            self._books.num_conversations += 1
        self._books.sessions[key] = session
        return session

    def _make_room(self) -> bool:
        """Make room for one session more; the one used longest ago goes, unless it is alive.

        Heirs don't count: they are as many as the contexts that others share, at most. Nor do
        conversations, which have a bound of their own.

        Returns:
            Whether there is room.
        """
        if self._books.num_hinted_sessions < self._books.settings.max_sessions:
            return True
        self._books.counters.clipped["max_sessions"] += 1
        idle = (
            s
            for s in self._books.sessions.values()
            if not (s.live or s.is_heir or s.is_conversation)
        )
        victim = next(idle, None)
        if victim is None:
            return False
        self.free(victim)
        return True

    def suspend(self, session: Session) -> None:
        """A request of the session is alive: nothing of it falls due."""
        self._books.standing.leave(session)
        session.idle.disarm()
        self.stop_expiring(session)
        for lease in session.leases:
            lease.disarm()

    def stop_expiring(self, session: Session) -> None:
        """A request has come that may go on with any prompt of the session, while others run."""
        for lineage in session.lineages:
            self._books.releases.interrupt(lineage)

    def resume(self, session: Session, now: float) -> None:
        """No request of the session is alive any more: its leases run."""
        session.idle.disarm()
        self.go_on_expiring(session)
        self._books.standing.rest(session, now)
        if any(lineage.leases for lineage in session.lineages):
            for lineage in session.lineages:
                self._books.agenda.arm_leases(lineage)
            return
        self._rest(session, now)
        self.child_rests(session.parent)

    def go_on_expiring(self, session: Session) -> None:
        """Take up the expiries that a request has interrupted, of what none may go on with."""
        if not all(live.is_placed for live in session.live):
            return
        wanted = [live.nearest for live in session.live]
        for lineage in session.lineages:
            if lineage.interrupted_at is not None and lineage not in wanted:
                self._let_expire(lineage, lineage.interrupted_at)

    def _rest(self, session: Session, since: float) -> None:
        """A session has neither a request alive nor a lease."""
        if session.is_anonymous:
            self.free(session)
            return
        holds = session.num_records > 0 or session.is_conversation
        idle = self._books.associated_seconds if holds else self._books.settings.idle_seconds
        self._books.agenda.arm_idle_limit(session, since + idle)

    def free(self, session: Session, *, placement: Placement = Placement.BACK) -> None:
        """Forget a session. What it holds is let go of, a slice at a time."""
        session.is_freed = True
        self._books.standing.leave(session)
        del self._books.sessions[session.key]
        self._books.heirs.forget(session)
        self._books.num_conversations -= session.is_conversation
        session.idle.disarm()
        # An edit of one that comes to its end takes an empty one out of the list.
        for lineage in tuple(session.lineages):
            self._books.releases.let_go(lineage, placement=placement)
        for live in session.live:
            if live.held is not None:
                self._books.releases.let_go(live.held)
                live.held = None
        self._books.history.forget_all(session)
        family.disband(session)
        self.child_rests(family.leave_parent(session))
        if isinstance(session.key, SessionKey):
            self._books.remote.session_ended(session.key)

    def child_rests(self, parent: Session | None) -> None:
        """A child has nothing alive any more: a lease that outlasted its end for it ends."""
        if parent is None:
            return
        parked = [x for x in parent.leases if x.is_armed and x.due_at > x.deadline]
        if parked and not family.waits_for_children(parent):
            for lease in parked:
                lease.disarm()
                self._expire_lease(lease)

    # -- expiry --------------------------------------------------------------------------------

    def expire_all(self, entries: Iterable[WheelEntry], now: float) -> None:
        """Expire leases and idle limits that have fallen due."""
        for entry in entries:
            if isinstance(entry, Lease):
                if not self._waits_for_workers(entry, now):
                    self._expire_lease(entry)
            elif isinstance(entry, IdleLimit):
                self._expire_idle(entry, now)

    def _waits_for_workers(self, lease: Lease, now: float) -> bool:
        """Let the last lease of a leader outlast its end while a worker is at it, for a while."""
        session = lease.lineage.session
        limit = lease.deadline + self._books.settings.leader_wait_seconds
        if max(lease.due_at, now) >= limit or not family.waits_for_children(session):
            return False
        if sum(1 for _ in session.leases) > 1:
            return False
        self._books.agenda.leases.register(lease, limit)
        return True

    def _expire_lease(self, lease: Lease) -> None:
        self._books.counters.expired += 1
        lineage = lease.lineage
        where = lineage.leases.index(lease)
        for shorter in lineage.leases[where:]:
            shorter.disarm()
        del lineage.leases[where:]
        lineage.expired_deadline = lease.deadline
        from_token = (lineage.leases[-1].end_token or 0) if lineage.leases else 0
        self._let_expire(lineage, from_token)
        # Another lease of it may run on.
        self._books.standing.stand_again(lineage.session)
        if not lineage.session.is_busy:
            self.child_rests(lineage.session.parent)

    def _expire_idle(self, limit: IdleLimit, now: float) -> None:
        session = limit.session
        self._books.standing.leave(session)
        if session.is_conversation:
            # Most never come back, which is to be known no later than who does.
            self._books.standing.stay_away(session)
            self.free(session, placement=self._books.policy.expired)
        elif session.num_records:
            for lineage in list(session.lineages):
                lineage.expired_deadline = limit.due_at - self._books.associated_seconds
                self._let_expire(lineage, 0)
        elif family.waits_for_children(session) or self._is_kept_elsewhere(session, limit.due_at):
            until = max(limit.due_at + self._books.settings.idle_seconds, now)
            self._books.agenda.idle.register(limit, until)
        else:
            self._books.standing.stay_away(session)
            self.free(session)

    def _is_kept_elsewhere(self, session: Session, now: float) -> bool:
        key = session.key
        return isinstance(key, SessionKey) and self._books.remote.keeps(key, now)

    def _let_expire(self, lineage: Lineage, from_token: int) -> None:
        release = Release(
            lineage, self._books.policy.expired, partial(self._has_expired, lineage), is_expiry=True
        )
        self._books.releases.add(release, from_token=from_token)

    def _has_expired(self, lineage: Lineage) -> None:
        """Nothing is left of what a lease has protected to its end."""
        if not lineage.leases and lineage in lineage.session.lineages:
            self.settle_without_records(lineage, lineage.expired_deadline)

    def settle_without_records(self, lineage: Lineage, ended_at: float) -> None:
        """A lineage holds nothing any more, and its session may be at rest."""
        session = lineage.session
        lineage.end_leases()
        lineage.base_tokens = 0
        if len(session.lineages) > 1:
            session.lineages.remove(lineage)
        self._rest_without_lease(session, ended_at)

    def lease_has_gone(self, session: Session, since: float) -> None:
        """A lease has ended before its time; it may have been the session's last."""
        if not session.is_freed:
            self._books.standing.stand_again(session)
        self._rest_without_lease(session, since)

    def _rest_without_lease(self, session: Session, since: float) -> None:
        if session.is_freed or session.is_busy:
            return
        session.idle.disarm()
        parent = session.parent
        self._rest(session, since)
        self.child_rests(parent)
