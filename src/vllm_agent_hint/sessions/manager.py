"""SessionAwareManager: the only object of the session core that the engine talks to."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_agent_hint.hints import EditResult, EditStatus, RetentionResult
from vllm_agent_hint.sessions import continuation, family
from vllm_agent_hint.sessions.blockmeta import BlockMetaPort
from vllm_agent_hint.sessions.books import Books
from vllm_agent_hint.sessions.capacity import Capacity, Clipping
from vllm_agent_hint.sessions.continuation import Prompt
from vllm_agent_hint.sessions.edits import Edits
from vllm_agent_hint.sessions.evictions import EditRun
from vllm_agent_hint.sessions.intent import Edit, Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.lifetimes import Lifetimes
from vllm_agent_hint.sessions.lineage import GroupLayout, Lineage, RecordedPrefix
from vllm_agent_hint.sessions.policy import RestingTurn, RetentionPolicy, policy_of
from vllm_agent_hint.sessions.recognition import Recognizer
from vllm_agent_hint.sessions.recording import Recorder
from vllm_agent_hint.sessions.remote import RemoteKV
from vllm_agent_hint.sessions.session import LiveRequest, Session
from vllm_agent_hint.settings import Settings


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
        policy = policy or policy_of(settings)
        self._books = books = Books(port, layouts, settings, policy, now)
        self._lifetimes = Lifetimes(books)
        capacity = Capacity(books, self._lifetimes.settle_without_records)
        self._recorder = Recorder(books, capacity)
        self._edits = Edits(books, self._lifetimes)
        self._recognizer = Recognizer(books, self._lifetimes)
        self.sessions = books.sessions
        self.ledger = books.ledger
        self.standing = books.standing
        self.releases = books.releases
        self.agenda = books.agenda
        self.history = books.history
        self.counters = books.counters
        self.next_tick_at = math.inf
        """When ``tick`` has something to do next. An attribute: every scheduling step reads it."""

    @property
    def remote(self) -> RemoteKV:
        """Keeps contexts elsewhere."""
        return self._books.remote

    @remote.setter
    def remote(self, remote: RemoteKV) -> None:
        self._books.remote = remote

    @property
    def num_heirs(self) -> int:
        """Anonymous sessions that evicts have left behind."""
        return len(self._books.heirs)

    @property
    def num_hinted_sessions(self) -> int:
        """Named and anonymous ones."""
        return self._books.num_hinted_sessions

    @property
    def num_conversations(self) -> int:
        """Of requests without a hint that go on with one another."""
        return self._books.num_conversations

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
            self._lifetimes.use(next(self._books.serial), intent.tenant)
            if intent.key is None
            else self._lifetimes.use(intent.key, intent.key.tenant)
        )
        if session is None:
            return None
        if session.live:
            session.had_company = True
            self._lifetimes.stop_expiring(session)
        else:
            self._lifetimes.suspend(session)
        live = LiveRequest(session, intent)
        live.gap = self.standing.come_back(session, now)
        session.live.add(live)
        if intent.parent_session_id is not None:
            self._become_child(live, intent.parent_session_id, now)
        for above in family.ancestors(session):
            self.sessions[above.key] = self.sessions.pop(above.key)
        self._reschedule()
        return live

    @property
    def recognizes(self) -> bool:
        """Whether requests without a hint are looked at: only beside sessions that have one."""
        return self._recognizer.is_active

    def unhinted_added(
        self, hashes: Sequence[bytes], now: float, *, tenant: str = ""
    ) -> LiveRequest | None:
        """A request without a hint has arrived, while ``recognizes``.

        O(prompt tokens / 512).

        Args:
            hashes: Of its prompt's complete blocks, of the size of the smallest KV cache group's.
            now: Monotonic seconds.
            tenant: Whose.

        Returns:
            A handle for the other calls if it goes on with an earlier one, else None: then nothing
            else is to be told of it.
        """
        live = self._recognizer.added(hashes, now, tenant)
        self._reschedule()
        return live

    def request_scheduled(self, live: LiveRequest, prompt: Prompt) -> None:
        """A request comes to run, for the first time or again.

        Args:
            live: Its handle.
            prompt: Hashes of its complete blocks.
        """
        if live.is_placed or live.session.is_freed:
            return
        continuation.place(live, prompt, self._books.layouts)
        self._lifetimes.go_on_expiring(live.session)
        for group, blocks in self.history.asked_again(live.session, prompt):
            self.counters.superseded_regret_tokens += blocks * self._books.layouts[group].block_size
        self._reschedule()

    def request_preempted(
        self, live: LiveRequest, prefixes: Sequence[RecordedPrefix], now: float
    ) -> None:
        """A request loses its blocks for now: hold what it has computed until it has ended.

        It replaces nothing in its session.
        """
        if live.session.is_freed:
            return
        before, live.held = live.held, Lineage(live.session, len(self._books.layouts))
        protections = live.intent.protections or live.session.protections
        self._recorder.record(live.held, prefixes, protections, now, replaces=True)
        if before is not None:
            self.releases.let_go(before)
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
        session.turn = RestingTurn(
            session.tenant,
            last_gap=live.gap,
            output_tokens=output_tokens,
            conversation_turns=live.conversation_turns,
            prompt_tokens=live.prompt_tokens,
        )
        session.last_operation = operation_id
        session.is_told = False
        asked = live.intent.protections or self._protections_by_policy(session)
        if asked and (succeeded or not session.protections):
            session.protections = asked
        renewed = session.protections if asked or self._books.settings.renew else None
        lineage, replaces = self._recorder.lineage_for(live, prefixes, succeeded=succeeded)
        clipping = Clipping()
        if lineage is not None:
            if succeeded and not session.had_company and not live.intent.is_sibling:
                for other in continuation.passed_by(session, lineage):
                    self._recorder.supersede(other, prefixes)
            clipping = self._recorder.record(lineage, prefixes, renewed, now, replaces=replaces)
            if succeeded:
                self._recorder.go_on_with(live, lineage)
        if live.held is not None:
            self.releases.let_go(live.held)
        if not session.live:
            self._lifetimes.resume(session, now)
        self._reschedule()
        return self._recorder.retention_of(live, lineage, clipping)

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

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Expire what has fallen due, and release a slice. Call when ``next_tick_at`` is over."""
        self._lifetimes.expire_all(self.agenda.advance(now), now)
        self.releases.work(self._books.settings.release_slice)
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
        self._lifetimes.expire_all(self.agenda.take_due_claims(now), now)
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
            self.releases.work(self._books.settings.max_records + 1)
        self._reschedule()

    def reset(self, now: float) -> None:
        """The prefix cache was emptied and every scalar is zero: only the sessions stay."""
        self.ledger.clear()
        for session in list(self.sessions.values()):
            for lineage in session.lineages:
                lineage.end_leases()
                self.releases.interrupt(lineage)
            session.lineages = [Lineage(session, len(self._books.layouts))]
            self.history.forget_all(session)
            for live in session.live:
                live.held = live.nearest = live.continues = None
                live.shared_tokens = 0
        self.releases.abandon()
        self.agenda.clear()
        for session in list(self.sessions.values()):
            if not session.live:
                self._lifetimes.resume(session, now)
        self._reschedule()

    # -- edits ---------------------------------------------------------------------------------

    @property
    def num_open_edits(self) -> int:
        """Calls of ``start_edits`` that are not done."""
        return self._edits.num_open

    def start_edits(
        self,
        key: SessionKey,
        edits: Sequence[Edit],
        now: float,
        on_done: Callable[[list[EditResult]], None],
    ) -> EditRun:
        """Run edits on a session's recorded context, in order. See ``Edits.start``."""
        run = self._edits.start(key, edits, now, on_done)
        self._reschedule()
        return run

    def reject_edits(self, edits: Sequence[Edit], reason: str) -> list[EditResult]:
        """Account for edits that must not run, such as those of an aborted request."""
        return self._edits.reject(edits, reason)

    def release_offloaded(
        self, key: SessionKey, edit: Edit, now: float, done: Callable[[], object]
    ) -> str:
        """What an offload has saved need not be kept here any more. See ``Edits``."""
        reason = self._edits.release_offloaded(key, edit, now, done)
        self._reschedule()
        return reason

    def free_session(self, key: SessionKey) -> bool:
        """Forget a session. Requests of it that are still running leave nothing behind.

        Returns:
            Whether there was such a session.
        """
        session = self.sessions.get(key)
        if session is None:
            return False
        self.standing.stay_away(session)
        self._lifetimes.free(session, placement=self._books.policy.evicted)
        self._reschedule()
        return True

    def free_all_sessions(self) -> None:
        """Forget every session, the anonymous ones included, and those that evicts still make."""
        self.finish_releases()
        for session in list(self.sessions.values()):
            self._lifetimes.free(session)
        self._books.conversations.clear()
        self.finish_releases()

    def _become_child(self, live: LiveRequest, parent_id: str, now: float) -> None:
        """Link a request's session to the parent that it names; an unknown one is made."""
        child, key = live.session, live.session.key
        assert isinstance(key, SessionKey)
        parent_key = key._replace(session_id=parent_id)
        parent = self.sessions.get(parent_key)
        is_new = parent is None
        if parent is None:
            parent = self._lifetimes.use(parent_key, child.tenant)
        if parent is None:
            live.link_problem = "there is no room for its parent (max_sessions)"
        else:
            live.link_problem = family.why_not_link(child, parent, self._books.settings.max_depth)
        if parent is None or live.link_problem:
            self.counters.links_rejected += 1
        else:
            before = child.parent
            family.link(child, parent)
            if before is not None and before is not parent:
                self._lifetimes.child_rests(before)
        if parent is not None and is_new:
            self.agenda.idle.register(parent.idle, now + self._books.settings.idle_seconds)

    def _protections_by_policy(self, session: Session) -> tuple[Protection, ...]:
        """What the policy keeps of a session that has never asked for anything itself."""
        if session.protections or not isinstance(session.key, SessionKey):
            return ()
        ttl = self._books.policy.ttl_for(session.turn)
        return () if ttl is None else (Protection(ttl),)

    def _reschedule(self) -> None:
        if len(self.releases):
            self.next_tick_at = -math.inf
            return
        self.next_tick_at = self.agenda.next_at
        if not self.sessions:
            self.ledger.usage.clear()
