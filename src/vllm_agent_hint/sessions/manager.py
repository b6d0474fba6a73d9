"""SessionAwareManager: the only object of the session core that the engine talks to."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from vllm_agent_hint.hints import EditResult, EditStatus, EditType, RetentionResult
from vllm_agent_hint.sessions import continuation, family
from vllm_agent_hint.sessions.agenda import Agenda
from vllm_agent_hint.sessions.blockmeta import BlockMetaPort
from vllm_agent_hint.sessions.capacity import Capacity, Clipping
from vllm_agent_hint.sessions.continuation import Prompt
from vllm_agent_hint.sessions.evictions import EditRun, Eviction
from vllm_agent_hint.sessions.heirs import Estate, Heirs
from vllm_agent_hint.sessions.history import History
from vllm_agent_hint.sessions.intent import Edit, Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.leases import end_leases_at, lay_leases
from vllm_agent_hint.sessions.ledger import Ledger
from vllm_agent_hint.sessions.lineage import (
    ChainDiff,
    GroupLayout,
    Lease,
    Lineage,
    RecordedPrefix,
    compare,
)
from vllm_agent_hint.sessions.policy import RestingTurn, RetentionPolicy, policy_of
from vllm_agent_hint.sessions.releases import Release, Releases
from vllm_agent_hint.sessions.remote import RemoteKV
from vllm_agent_hint.sessions.session import IdleLimit, LiveRequest, Session
from vllm_agent_hint.sessions.standing import Standing
from vllm_agent_hint.sessions.ttl import WheelEntry
from vllm_agent_hint.settings import Placement, Settings


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

    The engine reports requests at boundaries that exist anyway (added, first scheduled,
    preempted, finished, blocks reused) and calls ``tick`` once per scheduling step. SAM answers by
    marking blocks. It never reads a clock: every method that needs one takes monotonic seconds.

    Args:
        port: Marks the blocks.
        layouts: One per KV cache group.
        settings: Bounds.
        now: Monotonic seconds.
        policy: Who gives way, and where released blocks go; None for what the settings say.
    """

    def __init__(
        self,
        port: BlockMetaPort,
        layouts: Sequence[GroupLayout],
        settings: Settings,
        now: float,
        policy: RetentionPolicy | None = None,
    ) -> None:
        self._layouts = tuple(layouts)
        self._settings = settings
        self._policy = policy or policy_of(settings)
        self.ledger = Ledger(port, layouts)
        self.sessions: dict[Hashable, Session] = {}
        """Least recently used first."""
        self.counters = SessionCounters()
        self.next_tick_at = math.inf
        """When ``tick`` has something to do next. An attribute: every scheduling step reads it."""
        self.agenda = Agenda(now)
        self.history = History(settings.max_history)
        self.remote: RemoteKV | None = None
        """Keeps contexts elsewhere; None if nobody can."""
        self.why_no_remote = "no KV connector that could do it is in use"
        """Why nobody can."""
        self._serial = count()
        self.num_open_edits = 0
        """Calls of ``start_edits`` that are not done."""
        self._associated_seconds = min(settings.associated_seconds, settings.idle_seconds)
        self._heirs = Heirs(
            self.sessions, self.ledger, self.agenda, self._serial, self._associated_seconds
        )
        self.releases = Releases(self.ledger, self._heirs, self.history)
        self.standing = Standing(self._policy, self.ledger)
        self._capacity = Capacity(
            self.ledger,
            self.agenda,
            self.standing,
            self.releases,
            settings,
            self._policy.given_way,
            self._settle_without_records,
        )

    @property
    def num_heirs(self) -> int:
        """Anonymous sessions that evicts have left behind."""
        return len(self._heirs)

    @property
    def num_records(self) -> int:
        """(session, block) associations."""
        return self.ledger.index.num_records

    @property
    def num_leases(self) -> int:
        """Leases that run."""
        return len(self.agenda.leases)

    # -- the life of a request -----------------------------------------------------------------

    def request_added(self, intent: SessionIntent, now: float) -> LiveRequest | None:
        """A hinted request has arrived. Its session's leases stop until it has ended.

        Returns:
            A handle for the other calls, or None if there is no room for another session.
        """
        session = (
            self._use_session(next(self._serial), intent.tenant)
            if intent.key is None
            else self._use_session(intent.key, intent.key.tenant)
        )
        if session is None:
            return None
        if session.live:
            session.had_company = True
        else:
            self._suspend(session)
        live = LiveRequest(session, intent)
        live.gap = self.standing.come_back(session, now)
        session.live.add(live)
        if intent.parent_session_id is not None:
            self._become_child(live, intent.parent_session_id, now)
        for above in family.ancestors(session):
            self.sessions[above.key] = self.sessions.pop(above.key)
        self._reschedule()
        return live

    def request_scheduled(self, live: LiveRequest, prompt: Prompt) -> None:
        """A hinted request comes to run, for the first time or again.

        Args:
            live: The handle from ``request_added``.
            prompt: Hashes of its complete blocks.
        """
        if live.is_placed or live.session.is_freed:
            return
        continuation.place(live, prompt, self._layouts)
        self._go_on_expiring(live.session)
        for group, blocks in self.history.asked_again(live.session, prompt):
            self.counters.superseded_regret_tokens += blocks * self._layouts[group].block_size
        self._reschedule()

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
            self._let_go(before)
        self._reschedule()

    def request_finished(
        self,
        live: LiveRequest,
        prefixes: Sequence[RecordedPrefix],
        now: float,
        *,
        succeeded: bool,
        output_tokens: int = 0,
        operation_id: str = "",
    ) -> RetentionResult:
        """A request has ended and still holds its blocks: record its context.

        Args:
            live: The handle from ``request_added``.
            prefixes: One per KV cache group; with empty lists if it never ran.
            now: Monotonic seconds.
            succeeded: Whether it came to a regular end. Otherwise it may extend a recorded context
                but never ends any of it.
            output_tokens: That it made.
            operation_id: What names the turn in ``turn_ended``.

        Returns:
            What has become of its retention.
        """
        session = live.session
        session.live.discard(live)
        continuation.leave(live)
        if session.is_freed:
            return RetentionResult(
                status=EditStatus.MISSING, reason="its session was freed while it ran"
            )
        session.turn = RestingTurn(session.tenant, last_gap=live.gap, output_tokens=output_tokens)
        session.last_operation = operation_id
        session.is_told = False
        asked = live.intent.protections or self._protections_by_policy(session)
        if asked and (succeeded or not session.protections):
            session.protections = asked
        renewed = session.protections if asked or self._settings.renew else None
        lineage, replaces = self._lineage_for(live, prefixes, succeeded=succeeded)
        clipping = Clipping()
        if lineage is not None:
            if succeeded and not session.had_company and not live.intent.is_sibling:
                for other in continuation.passed_by(session, lineage):
                    self._supersede(other, prefixes)
            clipping = self._record(lineage, prefixes, renewed, now, replaces=replaces)
            if succeeded:
                self._go_on_with(live, lineage)
        if live.held is not None:
            self._let_go(live.held)
        if not session.live:
            self._resume(session, now)
        self._reschedule()
        return self._retention_of(live, lineage, clipping)

    def turn_ended(
        self,
        key: SessionKey,
        operation_id: str,
        ended: str,
        tools: Sequence[str],
        now: float,
        *,
        told: bool = False,
    ) -> bool:
        """More has become known of how a turn ended. It may come late, twice or never.

        Args:
            key: The session.
            operation_id: The turn; empty for the session's last.
            ended: See ``TurnFacts``.
            tools: Names of the tools called, first to last.
            now: Monotonic seconds.
            told: Whether the client says so itself. What the server has seen never changes that.

        Returns:
            Whether it says something of the turn after which the session rests.
        """
        session = self.sessions.get(key)
        if session is None or session.live or session.rested_at is None:
            return False
        if operation_id and operation_id != session.last_operation:
            return False
        if session.is_told and not told:
            return False
        session.is_told = told
        session.turn = replace(session.turn, ended=ended, tool=tools[-1] if tools else "")
        self.standing.stand_again(session)
        return True

    def _lineage_for(
        self, live: LiveRequest, prefixes: Sequence[RecordedPrefix], *, succeeded: bool
    ) -> tuple[Lineage | None, bool]:
        """Where to record a request that has ended, and whether it replaces what is there.

        A request that failed may extend what its prompt had in common with, and no more. One that
        has nothing to record, as a prompt shorter than a block, says nothing of other prompts.

        Returns:
            The lineage, None for nowhere, and whether what the request does not have ends.
        """
        session = live.session
        nearest = live.nearest if live.nearest in session.lineages else None
        lineage = session.lineage if nearest is None else nearest
        if not len(lineage):
            return lineage, succeeded
        if not any(prefix.block_ids for prefix in prefixes) or (nearest is None and not succeeded):
            return None, False
        if not succeeded or not live.is_placed:
            return lineage, False
        if nearest is not None:
            if continuation.may_replace(live):
                return lineage, True
            chains = zip(lineage.chains, prefixes, strict=True)
            if not any(compare(chain, new).diverged for chain, new in chains):
                return lineage, False
        lineage = Lineage(session, len(self._layouts))
        session.lineages.append(lineage)
        return lineage, True

    def _go_on_with(self, live: LiveRequest, lineage: Lineage) -> None:
        """A request has succeeded: its lineage is the session's latest."""
        session = live.session
        if live.continues is lineage or not lineage.base_tokens or live.nearest is not lineage:
            lineage.base_tokens = continuation.base_after(live, lineage, self._layouts)
        session.lineages.remove(lineage)
        session.lineages.append(lineage)
        # What had expired is recorded again, or superseded.
        self.history.forget(session)
        while len(session.lineages) > self._settings.max_lineages:
            oldest = session.lineages.pop(0)
            self.counters.clipped["max_lineages"] += len(oldest)
            self._let_go(oldest)

    def _retention_of(
        self, live: LiveRequest, lineage: Lineage | None, clipping: Clipping
    ) -> RetentionResult:
        blocks = [len(chain) for chain in lineage.chains] if lineage is not None else [0]
        status = EditStatus.APPLIED if any(blocks) else EditStatus.MISSING
        reasons = [live.link_problem] if live.link_problem else []
        if clipping.blocks:
            status = EditStatus.CLIPPED
            reasons.append("clipped by " + ", ".join(clipping.blocks))
        return RetentionResult(
            status=status,
            blocks=sum(blocks),
            tokens=max(n * lay.block_size for n, lay in zip(blocks, self._layouts, strict=False)),
            bounds=list(clipping.blocks),
            reason="; ".join(reasons),
        )

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Expire what has fallen due, and release a slice. Call when ``next_tick_at`` is over."""
        self._expire_all(self.agenda.advance(now), now)
        self.releases.work(self._settings.release_slice)
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
        self._expire_all(self.agenda.take_due_claims(now), now)
        budget = 4 * num_blocks + 64
        gained = 0
        while len(self.releases) and gained < num_blocks and budget > 0:
            step = min(num_blocks - gained, budget)
            gained += self.releases.work(step)
            budget -= step
        self._reschedule()
        return gained

    def give_way(self, now: float, num_blocks: int, *, leased: bool) -> int:
        """Blocks of sessions have to go: bring those of the least worth to the front of their zone.

        What several sessions or lineages hold is left out: it is in the order of its entry.

        O(num_blocks + classes), whatever the sessions hold.

        Args:
            now: Monotonic seconds.
            num_blocks: How many are wanted.
            leased: From sessions with a lease (zone C), or those without (zone B).

        Returns:
            How many were found.
        """
        return self.standing.bring_to_front(now, num_blocks, leased=leased)

    def finish_releases(self) -> None:
        """Release all that is being let go, without a pause."""
        while len(self.releases):
            self.releases.work(self._settings.max_records + 1)
        self._reschedule()

    def reset(self, now: float) -> None:
        """The prefix cache was emptied and every scalar is zero: only the sessions stay."""
        self.ledger.clear()
        for session in list(self.sessions.values()):
            for lineage in session.lineages:
                lineage.end_leases()
                self.releases.interrupt(lineage)
            session.lineages = [Lineage(session, len(self._layouts))]
            self.history.forget_all(session)
            for live in session.live:
                live.held = live.nearest = live.continues = None
                live.shared_tokens = 0
        self.releases.abandon()
        self.agenda.clear()
        for session in list(self.sessions.values()):
            if not session.live:
                self._resume(session, now)
        self._reschedule()

    # -- edits ---------------------------------------------------------------------------------

    def start_edits(
        self,
        key: SessionKey,
        edits: Sequence[Edit],
        now: float,
        on_done: Callable[[list[EditResult]], None],
    ) -> EditRun:
        """Run edits on a session's recorded context, in order.

        They count from now on. What they release is released a slice at a time, with each
        ``tick``; what they transfer takes its time. ``on_done`` gets the results when nothing is
        left of either, which may be at once.

        Returns:
            What is known of them so far.
        """
        self.num_open_edits += 1
        run = EditRun(
            [edit.type for edit in edits], self._count_results, partial(self._edits_done, on_done)
        )
        for k, edit in enumerate(edits):
            self._start_edit(key, edit, now, partial(run.settle, k))
        if len(self.releases):
            self.releases.work(self._settings.release_slice)
        self._reschedule()
        return run

    def _edits_done(
        self, on_done: Callable[[list[EditResult]], None], results: list[EditResult]
    ) -> None:
        self.num_open_edits -= 1
        on_done(results)

    def reject_edits(self, edits: Sequence[Edit], reason: str) -> list[EditResult]:
        """Account for edits that must not run, such as those of an aborted request."""
        results = [
            EditResult(type=edit.type, status=EditStatus.REJECTED, reason=reason) for edit in edits
        ]
        self._count_results(results)
        return results

    def free_session(self, key: SessionKey) -> bool:
        """Forget a session. Requests of it that are still running leave nothing behind.

        Returns:
            Whether there was such a session.
        """
        session = self.sessions.get(key)
        if session is None:
            return False
        self.standing.stay_away(session)
        self._free(session, placement=self._policy.evicted)
        self._reschedule()
        return True

    def free_all_sessions(self) -> None:
        """Forget every session, the anonymous ones included, and those that evicts still make."""
        self.finish_releases()
        for session in list(self.sessions.values()):
            self._free(session)
        self.finish_releases()

    def _count_results(self, results: Iterable[EditResult]) -> None:
        for result in results:
            self.counters.edits[result.type.value, result.status.value] += 1

    def _start_edit(
        self, key: SessionKey, edit: Edit, now: float, done: Callable[[EditResult], None]
    ) -> None:
        session = self.sessions.get(key)
        remote = self.remote
        if edit.type is not EditType.EVICT and remote is not None:
            remote.transfer(key, edit, done)
            return
        if remote is not None and not edit.include_children:
            done = remote.evict(key, edit, done)
        if edit.type is not EditType.EVICT:
            reason = self.why_no_remote
            if not self._settings.pooling:
                reason = "offload and prefetch are off (VLLM_AGENT_HINT_POOLING=0)"
            done(EditResult(type=edit.type, status=EditStatus.UNSUPPORTED, reason=reason))
        elif session is None:
            reason = "nothing is recorded for this session"
            done(EditResult(type=edit.type, status=EditStatus.MISSING, reason=reason))
        elif edit.include_children:
            eviction = Eviction(self._layouts, edit, done)
            for member in list(family.tree(session)):
                self.standing.stay_away(member)
                self._evict(member, eviction, now)
                self._free(member)
                eviction.num_freed += 1
            eviction.close()
        else:
            eviction = Eviction(self._layouts, edit, done)
            if edit.has_range:
                self._evict_from(session, edit.start_token, eviction, now)
            else:
                self._evict(session, eviction, now)
            eviction.close()

    def release_offloaded(
        self, key: SessionKey, edit: Edit, now: float, done: Callable[[], object]
    ) -> str:
        """What an offload has saved need not be kept here any more: end the claims on it.

        The session stays, and so does the claim on what lies behind a range.

        Returns:
            Why it stays as it is; empty if it ends, and ``done`` is called when it has.
        """
        session = self.sessions.get(key)
        if session is None:
            return "the session has ended"
        if session.live:
            return "a request of the session is alive"
        if edit.has_range:
            assert edit.end_token is not None
            for lineage in session.lineages:
                self.releases.finish_edit(lineage)
                self.ledger.release_range(lineage, edit.start_token, edit.end_token)
            self._reschedule()
            done()
            return ""

        def over(_: EditResult) -> None:
            done()

        eviction = Eviction(self._layouts, edit, over)
        self._evict(session, eviction, now)
        eviction.close()
        self._reschedule()
        return ""

    def _evict(self, session: Session, eviction: Eviction, now: float) -> None:
        eviction.had_expired |= bool(session.history)
        lineages, session.lineages = session.lineages, [Lineage(session, len(self._layouts))]
        for lineage in reversed(lineages):
            eviction.open()
            estate = self._heirs.estate_of(lineage, now)
            self._let_go(lineage, placement=self._policy.evicted, estate=estate, eviction=eviction)
        self.history.forget_all(session)
        if not session.live:
            self._resume(session, now)

    def _evict_from(
        self, session: Session, from_token: int, eviction: Eviction, now: float
    ) -> None:
        """End the claims in a range, and those behind it, which can't be hit any more."""
        for lineage in list(session.lineages):
            self.releases.finish_edit(lineage)
            estate = self._heirs.estate_of(lineage, now)
            lineage.latest_written = max(lineage.latest_written, lineage.deadline)
            end_leases_at(lineage, from_token)
            eviction.open()
            release = Release(
                lineage,
                self._policy.evicted,
                partial(self._range_is_gone, lineage, eviction),
                estate=estate,
                on_slice=eviction.count,
            )
            # What has expired before the range goes along.
            expired = [t for t in (lineage.trim_to, lineage.interrupted_at) if t is not None]
            self.releases.add(release, from_token=min([from_token, *expired]))
        if not session.live:
            self._resume(session, now)

    def _range_is_gone(self, lineage: Lineage, eviction: Eviction) -> None:
        session = lineage.session
        if not len(lineage):
            lineage.base_tokens = 0
            if len(session.lineages) > 1 and lineage in session.lineages:
                session.lineages.remove(lineage)
        if not session.num_records:
            self.standing.leave(session)
        eviction.close()

    # -- sessions ------------------------------------------------------------------------------

    def _use_session(self, key: Hashable, tenant: str) -> Session | None:
        session = self.sessions.pop(key, None)
        if session is None:
            if not self._make_room():
                return None
            session = Session(key, len(self._layouts), tenant=tenant)
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

    def _become_child(self, live: LiveRequest, parent_id: str, now: float) -> None:
        """Link a request's session to the parent that it names; an unknown one is made."""
        child, key = live.session, live.session.key
        assert isinstance(key, SessionKey)
        parent_key = key._replace(session_id=parent_id)
        parent = self.sessions.get(parent_key)
        is_new = parent is None
        if parent is None:
            parent = self._use_session(parent_key, child.tenant)
        if parent is None:
            live.link_problem = "there is no room for its parent (max_sessions)"
        else:
            live.link_problem = family.why_not_link(child, parent, self._settings.max_depth)
        if parent is None or live.link_problem:
            self.counters.links_rejected += 1
        else:
            before = child.parent
            family.link(child, parent)
            if before is not None and before is not parent:
                self._child_rests(before)
        if parent is not None and is_new:
            self.agenda.idle.register(parent.idle, now + self._settings.idle_seconds)

    def _child_rests(self, parent: Session | None) -> None:
        """A child has nothing alive any more: a lease that outlasted its end for it ends."""
        if parent is None:
            return
        parked = [x for x in parent.leases if x.is_armed and x.due_at > x.deadline]
        if parked and not family.waits_for_children(parent):
            for lease in parked:
                lease.disarm()
                self._expire_lease(lease)

    def _protections_by_policy(self, session: Session) -> tuple[Protection, ...]:
        """What the policy keeps of a session that has never asked for anything itself."""
        if session.protections or session.is_anonymous:
            return ()
        ttl = self._policy.ttl_for(session.turn)
        return () if ttl is None else (Protection(ttl),)

    def _suspend(self, session: Session) -> None:
        """A request of the session is alive: nothing of it falls due."""
        self.standing.leave(session)
        session.idle.disarm()
        for lineage in session.lineages:
            self.releases.interrupt(lineage)
            for lease in lineage.leases:
                lease.disarm()

    def _resume(self, session: Session, now: float) -> None:
        """No request of the session is alive any more: its leases run."""
        session.idle.disarm()
        self._go_on_expiring(session)
        self.standing.rest(session, now)
        if any(lineage.leases for lineage in session.lineages):
            for lineage in session.lineages:
                self.agenda.arm_leases(lineage)
            return
        self._rest(session, now)
        self._child_rests(session.parent)

    def _go_on_expiring(self, session: Session) -> None:
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
            self._free(session)
            return
        holds = session.num_records > 0
        idle = self._associated_seconds if holds else self._settings.idle_seconds
        self.agenda.arm_idle_limit(session, since + idle)

    def _free(self, session: Session, *, placement: Placement = Placement.BACK) -> None:
        session.is_freed = True
        self.standing.leave(session)
        del self.sessions[session.key]
        self._heirs.forget(session)
        session.idle.disarm()
        for lineage in session.lineages:
            self._let_go(lineage, placement=placement)
        for live in session.live:
            if live.held is not None:
                self._let_go(live.held)
                live.held = None
        self.history.forget_all(session)
        family.disband(session)
        self._child_rests(family.leave_parent(session))
        if self.remote is not None and isinstance(session.key, SessionKey):
            self.remote.session_ended(session.key)

    def _let_go(
        self,
        lineage: Lineage,
        *,
        placement: Placement = Placement.BACK,
        estate: Estate | None = None,
        eviction: Eviction | None = None,
    ) -> None:
        """Give a context up that no session has any more; its claims end a slice at a time."""
        self.releases.finish_edit(lineage)
        lineage.latest_written = max(lineage.latest_written, lineage.deadline)
        lineage.end_leases()
        on_slice, on_done = (eviction.count, eviction.close) if eviction else (None, _do_nothing)
        release = Release(lineage, placement, on_done, estate=estate, on_slice=on_slice)
        self.releases.add(release)

    def _supersede(self, lineage: Lineage, by: Sequence[RecordedPrefix]) -> None:
        """A session has gone on with another prompt: what that does not share may be over.

        One that shares nothing was another agent's, under the same name. And a compaction or a
        rewind is shorter than what it replaces.
        """
        session = lineage.session
        hashes = [prefix.hashes if prefix.logical is None else [] for prefix in by]
        shared = continuation.shared_tokens(lineage, hashes, self._layouts)
        is_longer = any(
            chain.logical is None and len(chain) > len(new)
            for chain, new in zip(lineage.chains, hashes, strict=True)
        )
        if len(lineage) and any(hashes) and not (shared and is_longer):
            return
        for group, chain in enumerate(lineage.chains):
            if chain.logical is None:
                first = shared // self._layouts[group].block_size
                self._note_superseded(session, group, first, chain.hashes[first:])
        session.lineages.remove(lineage)
        self._let_go(lineage)

    def _note_superseded(
        self, session: Session, group: int, first: int, hashes: Sequence[bytes]
    ) -> None:
        self.counters.superseded_blocks += len(hashes)
        self.counters.superseded_tokens += len(hashes) * self._layouts[group].block_size
        self.history.supersede(session, group, first, hashes)

    def _reschedule(self) -> None:
        if len(self.releases):
            self.next_tick_at = -math.inf
            return
        self.next_tick_at = self.agenda.next_at
        if not self.sessions:
            self.ledger.forget_hits()

    # -- recording -----------------------------------------------------------------------------

    def _record(
        self,
        lineage: Lineage,
        prefixes: Sequence[RecordedPrefix],
        protections: Sequence[Protection] | None,
        now: float,
        *,
        replaces: bool,
    ) -> Clipping:
        """Make a lineage hold a request's blocks, under leases that begin now.

        With ``protections`` None, under the leases that it has.
        """
        self.releases.finish_edit(lineage)
        self.releases.interrupt(lineage)
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
            if replaces and diff.diverged and chain.logical is None:
                tail = chain.hashes[diff.common :]
                self._note_superseded(lineage.session, chain.group, diff.common, tail)
            self.ledger.drop_replaced(
                chain, new, diff, replaces=replaces, placement=self._policy.superseded
            )
        clipping = self._capacity.make_room(lineage.session.tenant, newcomers, now)
        if protections is not None:
            lineage.end_leases()
            lineage.leases = lay_leases(lineage, protections, now, self._settings, clipping)
        lineage.interrupted_at = None
        for chain, fresh in zip(lineage.chains, newcomers, strict=True):
            self.ledger.add(chain, fresh, lineage.deadline)
        self.ledger.write_deadlines(lineage)
        self.counters.clipped.update(clipping.blocks)
        return clipping

    def _falls_short(self, lineage: Lineage, prefixes: Sequence[RecordedPrefix]) -> bool:
        return any(
            len(new.block_ids) < len(chain)
            for chain, new, layout in zip(lineage.chains, prefixes, self._layouts, strict=True)
            if not layout.is_checkpoint
        )

    # -- expiry --------------------------------------------------------------------------------

    def _expire_all(self, entries: Iterable[WheelEntry], now: float) -> None:
        for entry in entries:
            if isinstance(entry, Lease):
                if not self._waits_for_workers(entry, now):
                    self._expire_lease(entry)
            elif isinstance(entry, IdleLimit):
                self._expire_idle(entry, now)

    def _waits_for_workers(self, lease: Lease, now: float) -> bool:
        """Let the last lease of a leader outlast its end while a worker is at it, for a while."""
        session = lease.lineage.session
        limit = lease.deadline + self._settings.leader_wait_seconds
        if max(lease.due_at, now) >= limit or not family.waits_for_children(session):
            return False
        if sum(1 for _ in session.leases) > 1:
            return False
        self.agenda.leases.register(lease, limit)
        return True

    def _expire_lease(self, lease: Lease) -> None:
        self.counters.expired += 1
        lineage = lease.lineage
        where = lineage.leases.index(lease)
        for shorter in lineage.leases[where:]:
            shorter.disarm()
        del lineage.leases[where:]
        lineage.expired_deadline = lease.deadline
        from_token = (lineage.leases[-1].end_token or 0) if lineage.leases else 0
        self._let_expire(lineage, from_token)
        # Another lease of it may run on.
        self.standing.stand_again(lineage.session)
        if not lineage.session.is_busy:
            self._child_rests(lineage.session.parent)

    def _expire_idle(self, limit: IdleLimit, now: float) -> None:
        session = limit.session
        self.standing.leave(session)
        if session.num_records:
            for lineage in list(session.lineages):
                lineage.expired_deadline = limit.due_at - self._associated_seconds
                self._let_expire(lineage, 0)
        elif family.waits_for_children(session) or self._is_kept_elsewhere(session, limit.due_at):
            until = max(limit.due_at + self._settings.idle_seconds, now)
            self.agenda.idle.register(limit, until)
        else:
            self.standing.stay_away(session)
            self._free(session)

    def _is_kept_elsewhere(self, session: Session, now: float) -> bool:
        key = session.key
        return (
            self.remote is not None and isinstance(key, SessionKey) and self.remote.keeps(key, now)
        )

    def _let_expire(self, lineage: Lineage, from_token: int) -> None:
        release = Release(
            lineage, self._policy.expired, partial(self._has_expired, lineage), is_expiry=True
        )
        self.releases.add(release, from_token=from_token)

    def _has_expired(self, lineage: Lineage) -> None:
        """Nothing is left of what a lease has protected to its end."""
        if not lineage.leases and lineage in lineage.session.lineages:
            self._settle_without_records(lineage, lineage.expired_deadline)

    def _settle_without_records(self, lineage: Lineage, ended_at: float) -> None:
        """A lineage holds nothing any more, and its session may be at rest."""
        session = lineage.session
        lineage.end_leases()
        lineage.base_tokens = 0
        if len(session.lineages) > 1:
            session.lineages.remove(lineage)
        if session.is_freed or session.is_busy:
            return
        session.idle.disarm()
        parent = session.parent
        self._rest(session, ended_at)
        self._child_rests(parent)


def _do_nothing() -> None:
    """For a context that nobody asks about once it is gone."""
