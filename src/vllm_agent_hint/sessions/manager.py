"""SessionAwareManager: the only object of the session core that the engine talks to."""

import math
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from vllm_agent_hint.hints import MAX_TTL_SECONDS, EditResult, EditStatus, EditType
from vllm_agent_hint.sessions.agenda import Agenda
from vllm_agent_hint.sessions.blockmeta import BlockMetaPort
from vllm_agent_hint.sessions.heirs import Heirs
from vllm_agent_hint.sessions.history import History
from vllm_agent_hint.sessions.intent import Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.ledger import Ledger, Newcomer
from vllm_agent_hint.sessions.lineage import (
    LOST,
    ChainDiff,
    GroupLayout,
    Lease,
    Lineage,
    RecordedPrefix,
    compare,
    eviction_order,
)
from vllm_agent_hint.sessions.policy import ReleasePolicy
from vllm_agent_hint.sessions.session import IdleLimit, LiveRequest, Session
from vllm_agent_hint.sessions.ttl import WheelEntry
from vllm_agent_hint.settings import Settings


@dataclass(slots=True)
class SessionCounters:
    """Events since the last time that they were taken."""

    expired: int = 0
    clipped: Counter[str] = field(default_factory=Counter)
    edits: Counter[tuple[str, str]] = field(default_factory=Counter)
    superseded_blocks: int = 0
    superseded_tokens: int = 0
    superseded_regret_tokens: int = 0
    links_rejected: int = 0


class SessionAwareManager:
    """Sessions, their contexts and leases, and the edits on them.

    The engine reports requests at boundaries that exist anyway (added, preempted, finished,
    blocks reused) and calls ``tick`` once per scheduling step. SAM answers by marking blocks.
    It never reads a clock: every method that needs one takes monotonic seconds.

    Args:
        port: Marks the blocks.
        layouts: One per KV cache group.
        settings: Bounds.
        now: Monotonic seconds.
        policy: Where released blocks go; None for what the settings say.
    """

    def __init__(
        self,
        port: BlockMetaPort,
        layouts: Sequence[GroupLayout],
        settings: Settings,
        now: float,
        policy: ReleasePolicy | None = None,
    ) -> None:
        self._port = port
        self._layouts = tuple(layouts)
        self._settings = settings
        self._policy = policy or ReleasePolicy(expired=settings.expired_enters)
        self._max_retained = int(settings.protected_share * (port.num_gpu_blocks - 1))
        self.ledger = Ledger(port, layouts)
        self.sessions: dict[Hashable, Session] = {}
        """Least recently used first."""
        self.counters = SessionCounters()
        self.next_tick_at = math.inf
        """When ``tick`` has something to do next. An attribute: every scheduling step reads it."""
        self.agenda = Agenda(now)
        self._trimming: deque[Lineage] = deque()
        """Lineages whose expired records are being let go, a slice at a time."""
        self.history = History(settings.max_history)
        self._serial = count()
        self._heirs = Heirs(
            self.sessions, self.ledger, self.agenda, self._serial, settings.idle_seconds
        )

    @property
    def num_records(self) -> int:
        """(session, block) associations."""
        return self.ledger.index.num_records

    @property
    def num_leases(self) -> int:
        """Leases that run."""
        return len(self.agenda.leases)

    @property
    def num_heirs(self) -> int:
        """Anonymous sessions that evicts have left behind."""
        return len(self._heirs)

    # -- the life of a request -----------------------------------------------------------------

    def request_added(self, intent: SessionIntent) -> LiveRequest | None:
        """A hinted request has arrived. Its session's leases stop until it has ended.

        Returns:
            A handle for the other calls, or None if there is no room for another session.
        """
        session = self._use_session(next(self._serial) if intent.key is None else intent.key)
        if session is None:
            return None
        if not session.live:
            self._suspend(session)
        live = LiveRequest(session, intent)
        session.live.add(live)
        self._reschedule()
        return live

    def request_preempted(
        self, live: LiveRequest, prefixes: Sequence[RecordedPrefix], now: float
    ) -> None:
        """A request loses its blocks for now: hold what it has computed until it has ended.

        It replaces nothing in its session.
        """
        if live.session.is_freed:
            return
        before, live.held = live.held, Lineage(live.session, len(self._layouts))
        protections = live.intent.protections or live.session.protections
        self._record(live.held, prefixes, protections, now, replaces=True)
        if before is not None:
            self._dissolve(before)
        self._reschedule()

    def request_finished(
        self,
        live: LiveRequest,
        prefixes: Sequence[RecordedPrefix],
        now: float,
        *,
        succeeded: bool,
    ) -> None:
        """A request has ended and still holds its blocks: record its context.

        Args:
            live: The handle from ``request_added``.
            prefixes: One per KV cache group; with empty lists if it never ran.
            now: Monotonic seconds.
            succeeded: Whether it came to a regular end. Otherwise, or while other requests of the
                session are alive, it may extend the recorded context but never ends any of it.
        """
        session = live.session
        session.live.discard(live)
        if session.is_freed:
            return
        asked = live.intent.protections
        if asked and (succeeded or not session.protections):
            session.protections = asked
        renewed = session.protections if asked or self._settings.renew else None
        self._record(
            session.lineage, prefixes, renewed, now, replaces=succeeded and not session.live
        )
        if live.held is not None:
            self._dissolve(live.held)
        if succeeded:
            # What had expired is recorded again, or superseded.
            self.history.forget(session)
        if not session.live:
            self._resume(session, now)
        self._reschedule()

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Expire what has fallen due, a slice at a time. Call when ``next_tick_at`` has passed."""
        self._expire_all(self.agenda.advance(now))
        self._trim(self._settings.release_slice)
        self._reschedule()

    def release_due(self, now: float, num_blocks: int) -> int:
        """Zone A has run dry: release due leases, tail first, until it holds enough again.

        O(num_blocks), whatever has piled up.

        Args:
            now: Monotonic seconds.
            num_blocks: Free blocks wanted in zone A.

        Returns:
            How many it got.
        """
        self._expire_all(self.agenda.take_due_claims(now))
        budget = 4 * num_blocks + 64
        gained = 0
        while self._trimming and gained < num_blocks and budget > 0:
            step = min(num_blocks - gained, budget)
            gained += self._trim(step)
            budget -= step
        self._reschedule()
        return gained

    def reset(self, now: float) -> None:
        """The prefix cache was emptied and every scalar is zero: only the sessions stay."""
        self.agenda.clear()
        self._trimming.clear()
        self.ledger.clear()
        for session in list(self.sessions.values()):
            session.lineages = [Lineage(session, len(self._layouts))]
            self.history.forget(session)
            for live in session.live:
                live.held = None
            if not session.live:
                self._resume(session, now)
        self._reschedule()

    # -- edits ---------------------------------------------------------------------------------

    def apply_edits(
        self, key: SessionKey, edits: Sequence[EditType], now: float
    ) -> list[EditResult]:
        """Run edits on a session's recorded context, in order."""
        results = [self._apply_edit(key, edit, now) for edit in edits]
        self._reschedule()
        return [self._counted(result) for result in results]

    def reject_edits(self, edits: Sequence[EditType], reason: str) -> list[EditResult]:
        """Account for edits that must not run, such as those of an aborted request."""
        return [
            self._counted(EditResult(type=edit, status=EditStatus.REJECTED, reason=reason))
            for edit in edits
        ]

    def free_session(self, key: SessionKey) -> bool:
        """Forget a session. Requests of it that are still running leave nothing behind.

        Returns:
            Whether there was such a session.
        """
        session = self.sessions.get(key)
        if session is None:
            return False
        self.ledger.release_all(session.lineage, placement=self._policy.evicted)
        self._free(session)
        self._reschedule()
        return True

    def free_all_sessions(self) -> None:
        """Forget every session, the anonymous ones included."""
        for session in list(self.sessions.values()):
            self._free(session)
        self._reschedule()

    def _apply_edit(self, key: SessionKey, edit: EditType, now: float) -> EditResult:
        if edit is not EditType.EVICT:
            return EditResult(
                type=edit,
                status=EditStatus.UNSUPPORTED,
                reason="no KV connector that could do it is in use"
                if self._settings.pooling
                else "offload and prefetch are off (VLLM_AGENT_HINT_POOLING=0)",
            )
        session = self.sessions.get(key)
        if session is None:
            return EditResult(
                type=edit,
                status=EditStatus.MISSING,
                reason="nothing is recorded for this session",
            )
        return self._evict(session, now)

    def _counted(self, result: EditResult) -> EditResult:
        self.counters.edits[result.type.value, result.status.value] += 1
        return result

    def _evict(self, session: Session, now: float) -> EditResult:
        lineage = session.lineage
        resident = [sum(b != LOST for b in chain.block_ids) for chain in lineage.chains]
        had_expired = bool(session.history)
        spared = self._heirs.inherit(session, now)
        self.ledger.release_all(lineage, placement=self._policy.evicted)
        lineage.end_leases()
        self.history.forget(session)
        if not session.live:
            self._resume(session, now)
        if not any(resident):
            return EditResult(
                type=EditType.EVICT,
                status=EditStatus.APPLIED if had_expired else EditStatus.MISSING,
                reason="its context had expired"
                if had_expired
                else "none of its context is in the cache",
            )
        return EditResult(
            type=EditType.EVICT,
            status=EditStatus.APPLIED,
            blocks=sum(resident),
            tokens=max(
                n * layout.block_size for n, layout in zip(resident, self._layouts, strict=True)
            ),
            reason=f"{spared} of the blocks stay cached for others that use them" if spared else "",
        )

    # -- sessions ------------------------------------------------------------------------------

    def _use_session(self, key: Hashable) -> Session | None:
        session = self.sessions.pop(key, None)
        if session is None:
            if not self._make_room():
                return None
            session = Session(key, len(self._layouts))
        self.sessions[key] = session
        return session

    def _make_room(self) -> bool:
        """Make room for one session more; the one used longest ago goes, unless it is alive.

        Heirs don't count: they are as many as the contexts that others share, at most.

        Returns:
            Whether there is room.
        """
        if len(self.sessions) - self.num_heirs < self._settings.max_sessions:
            return True
        self.counters.clipped["max_sessions"] += 1
        idle = (s for s in self.sessions.values() if not s.live and not s.is_heir)
        victim = next(idle, None)
        if victim is None:
            return False
        self._free(victim)
        return True

    def _suspend(self, session: Session) -> None:
        """A request of the session is alive: nothing of it falls due."""
        session.idle.disarm()
        session.lineage.trim_to = None
        for lease in session.lineage.leases:
            lease.disarm()

    def _resume(self, session: Session, now: float) -> None:
        """No request of the session is alive any more: its leases run."""
        if session.lineage.leases:
            self.agenda.arm_leases(session.lineage)
            return
        if session.is_anonymous:
            self._free(session)
            return
        self.agenda.arm_idle_limit(session, now + self._settings.idle_seconds)

    def _free(self, session: Session) -> None:
        session.is_freed = True
        del self.sessions[session.key]
        self._heirs.forget(session)
        session.idle.disarm()
        self._dissolve(session.lineage)
        for live in session.live:
            if live.held is not None:
                self._dissolve(live.held)
                live.held = None
        self.history.forget(session)
        if not self.sessions:
            self.ledger.forget_hits()

    def _dissolve(self, lineage: Lineage) -> None:
        self.ledger.release_all(lineage)
        lineage.end_leases()

    def _reschedule(self) -> None:
        if self._trimming:
            self.next_tick_at = -math.inf
        else:
            self.next_tick_at = self.agenda.next_at

    # -- recording -----------------------------------------------------------------------------

    def _record(
        self,
        lineage: Lineage,
        prefixes: Sequence[RecordedPrefix],
        protections: Sequence[Protection] | None,
        now: float,
        *,
        replaces: bool,
    ) -> None:
        """Make a lineage hold a request's blocks, under leases that begin now.

        With ``protections`` None, under the leases that it has.
        """
        diffs = [compare(chain, new) for chain, new in zip(lineage.chains, prefixes, strict=True)]
        diverged = any(diff.diverged for diff in diffs)
        if replaces and not diverged:
            # A prompt that ends early says nothing about what lies behind its end.
            replaces = not self._falls_short(lineage, prefixes)
        if not replaces and diverged:
            diffs = [ChainDiff((), (), (), diverged=True) for _ in diffs]
        newcomers = [
            self.ledger.newcomers(diff, new) for diff, new in zip(diffs, prefixes, strict=True)
        ]
        # The old leases stand until what they alone protect has been released.
        for chain, new, diff in zip(lineage.chains, prefixes, diffs, strict=True):
            self.ledger.drop_replaced(chain, new, diff, replaces=replaces)
        self._clip_to_records(newcomers)
        self._clip_to_share(newcomers)
        if protections is not None:
            lineage.end_leases()
            lineage.leases = _lay_leases(lineage, protections, now)
        lineage.trim_to = None
        for chain, fresh in zip(lineage.chains, newcomers, strict=True):
            self.ledger.add(chain, fresh, lineage.deadline)
        self.ledger.write_deadlines(lineage)

    def _falls_short(self, lineage: Lineage, prefixes: Sequence[RecordedPrefix]) -> bool:
        return any(
            len(new.block_ids) < len(chain)
            for chain, new, layout in zip(lineage.chains, prefixes, self._layouts, strict=True)
            if not layout.is_checkpoint
        )

    def _clip_to_records(self, newcomers: list[list[Newcomer]]) -> None:
        """Drop newcomers that the bound on records has no room for; the tail goes first."""
        room = self._settings.max_records - self.ledger.index.num_records
        excess = sum(map(len, newcomers)) - max(0, room)
        if excess > 0:
            clipped = self._clip(newcomers, excess, {})
            self.counters.clipped["max_records"] += clipped

    def _clip_to_share(self, newcomers: list[list[Newcomer]]) -> None:
        """Keep sessions within the protected share: soonest leases give way, then newcomers."""
        excess, _ = self._beyond_share(newcomers)
        if excess > 0:
            self._give_way(excess)
            # What gave way may have been shared with the newcomers: weigh them again.
            excess, weight = self._beyond_share(newcomers)
            if excess > 0:
                clipped = self._clip(newcomers, excess, weight)
                self.counters.clipped["protected_share"] += clipped

    def _beyond_share(self, newcomers: list[list[Newcomer]]) -> tuple[int, dict[int, int]]:
        """Blocks over the protected share if all newcomers came, and what each would add to it."""
        weight = {
            new.block_id: 0 if self.ledger.index.is_held(new.block_id) else 1
            for group in newcomers
            for new in group
        }
        return self._port.num_retained_blocks + sum(weight.values()) - self._max_retained, weight

    def _clip(self, newcomers: list[list[Newcomer]], excess: int, weight: dict[int, int]) -> int:
        """Remove newcomers, tail first, until their weight has fallen by ``excess``."""
        order = eviction_order(self._layouts, [[new.logical for new in g] for g in newcomers])
        lengths = [len(group) for group in newcomers]
        clipped = 0
        for group, k in order:
            if excess <= 0:
                break
            excess -= weight.get(newcomers[group][k].block_id, 1)
            lengths[group] = k
            clipped += 1
        for group, length in enumerate(lengths):
            del newcomers[group][length:]
        return clipped

    def _give_way(self, num_blocks: int) -> int:
        """Release what has no lease, then the leases that fall due soonest, tail first.

        Returns:
            How many retained blocks fewer there are.
        """
        before = self._port.num_retained_blocks
        budget = 4 * num_blocks + 64
        while budget > 0:
            gained = before - self._port.num_retained_blocks
            step = min(num_blocks - gained, budget)
            if step <= 0:
                break
            if self._trimming:
                self._trim(step)
                budget -= step
                continue
            entry = self.agenda.next_to_give_way()
            if entry is None:
                break
            session = _session_of(entry)
            held = len(session.lineage)
            self.ledger.release_tail(session.lineage, step)
            budget -= max(1, held - len(session.lineage))
            if not len(session.lineage):
                self._settle_without_records(session, entry.deadline)
        return before - self._port.num_retained_blocks

    def _settle_without_records(self, session: Session, deadline: float) -> None:
        session.lineage.end_leases()
        session.idle.disarm()
        if session.is_anonymous:
            self._free(session)
        else:
            self.agenda.arm_idle_limit(session, deadline + self._settings.idle_seconds)

    # -- expiry --------------------------------------------------------------------------------

    def _expire_all(self, entries: Iterable[WheelEntry]) -> None:
        for entry in entries:
            if isinstance(entry, Lease):
                self.counters.expired += 1
                self._expire_lease(entry)
            elif isinstance(entry, IdleLimit):
                self._expire_idle(entry)

    def _expire_lease(self, lease: Lease) -> None:
        lineage = lease.lineage
        where = lineage.leases.index(lease)
        for shorter in lineage.leases[where:]:
            shorter.disarm()
        del lineage.leases[where:]
        lineage.trim_to = (lineage.leases[-1].end_token or 0) if lineage.leases else 0
        lineage.expired_deadline = lease.deadline
        self._trimming.append(lineage)

    def _expire_idle(self, limit: IdleLimit) -> None:
        lineage = limit.session.lineage
        if len(lineage):
            lineage.trim_to = 0
            self._trimming.append(lineage)
        else:
            self._free(limit.session)

    def _trim(self, budget: int) -> int:
        """Let go of what has expired, at most ``budget`` records.

        Returns:
            Blocks that became ordinary and free.
        """
        gained = 0
        while self._trimming and budget > 0:
            lineage = self._trimming[0]
            if lineage.trim_to is None:
                self._trimming.popleft()
                continue
            hashes: list[bytes] = []
            gained += self.ledger.release_tail(
                lineage,
                budget,
                floor_token=lineage.trim_to,
                placement=self._policy.expired,
                history=hashes,
            )
            self.history.remember(lineage.session, hashes)
            budget -= len(hashes)
            if budget > 0:
                self._trimming.popleft()
                lineage.trim_to = None
                if not lineage.leases:
                    self._settle_without_records(lineage.session, lineage.expired_deadline)
        return gained


def _session_of(entry: WheelEntry) -> Session:
    if isinstance(entry, Lease):
        return entry.lineage.session
    assert isinstance(entry, IdleLimit)
    return entry.session


def _lay_leases(lineage: Lineage, protections: Sequence[Protection], now: float) -> list[Lease]:
    """Leases that begin now, rising in their end and falling in their deadline."""
    leases: list[Lease] = []
    for asked in sorted(
        protections, key=lambda p: math.inf if p.end_token is None else p.end_token
    ):
        ttl = min(asked.ttl, MAX_TTL_SECONDS)
        lease = Lease(lineage, ttl, asked.end_token, now + ttl)
        while leases and leases[-1].deadline <= lease.deadline:
            leases.pop()
        reaches_further = not leases or leases[-1].end_token != lease.end_token
        if ttl > 0 and reaches_further:
            leases.append(lease)
    return leases
