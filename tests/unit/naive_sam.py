"""What the session core means, without its bounds: dictionaries, searched from end to end."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from tests.unit.plain_port import PlainPort, content_hash
from vllm_agent_hint.sessions.intent import Protection, SessionIntent
from vllm_agent_hint.sessions.lineage import GroupLayout

Blocks = dict[int, int]
"""Logical block index -> block id, of one KV cache group."""


@dataclass
class Record:
    """A block of a context. ``block`` is None once its content is gone."""

    block: int | None
    hash: bytes
    is_computed: bool


@dataclass
class Claim:
    """A prefix that is kept until a deadline; ``end`` is its first token outside, if any."""

    end: int | None
    ttl: float
    deadline: float
    armed_at: float = 0.0
    """When the last request of its session ended; it does not come up before."""
    waits: bool = False
    """Whether it has come up and goes on for a worker's sake."""

    @property
    def comes_up(self) -> float:
        return max(self.deadline, self.armed_at)

    def outdoes(self, other: "Claim") -> bool:
        return self.ttl >= other.ttl and (
            self.end is None or (other.end is not None and self.end >= other.end)
        )


@dataclass(eq=False)
class Context:
    """What a session, or one preempted request of it, has recorded."""

    session: "NaiveSession"
    records: list[dict[int, Record]]
    claims: list[Claim] = field(default_factory=list)
    base_tokens: int = 0
    """What a prompt has to share to go on with it."""
    turns_passed: int = 0
    """Turns of its session with other prompts since its own last one."""

    def __bool__(self) -> bool:
        return any(self.records)


@dataclass(eq=False)
class NaiveSession:
    """A session; one without a name is a number."""

    key: Hashable
    is_named: bool
    num_groups: int
    live: set["NaiveRequest"] = field(default_factory=set)
    protections: tuple[Protection, ...] = ()
    idle_until: float | None = None
    """When it is given up; None while something keeps it."""
    idle_due: float = 0.0
    """The same, had somebody looked in time: an engine that sleeps does not tick."""
    idle_since: float = 0.0
    has_history: bool = False
    is_freed: bool = False
    had_company: bool = False
    parent: "NaiveSession | None" = None
    contexts: list[Context] = field(init=False)
    """Continued longest ago first; never none."""

    def __post_init__(self) -> None:
        self.contexts = [self.new_context()]

    @property
    def is_heir(self) -> bool:
        return isinstance(self.key, tuple) and self.key[0] == "heir"

    @property
    def claims(self) -> list[Claim]:
        return [claim for context in self.contexts for claim in context.claims]

    @property
    def is_busy(self) -> bool:
        return bool(self.live or self.claims)

    def give_up_at(self, due: float, now: float) -> None:
        """What is overdue is noticed with the next tick."""
        self.idle_due, self.idle_until = due, max(due, now)

    def new_context(self) -> Context:
        return Context(self, [{} for _ in range(self.num_groups)])

    def drop_empty_contexts(self) -> None:
        kept = [c for c in self.contexts if c or c.claims]
        self.contexts = kept or [self.new_context()]


@dataclass(eq=False)
class NaiveRequest:
    """A request that has arrived and not ended. ``held`` is what it had when it was preempted."""

    session: NaiveSession
    intent: SessionIntent
    held: Context | None = None
    has_run: bool = False
    nearest: Context | None = None
    """The context with which its prompt shares most."""
    continues: Context | None = None
    """The same, if it shares enough."""
    shared_tokens: int = 0
    prompt_tokens: int = 0
    company: list[Context | None] = field(default_factory=list)
    """What requests that were alive beside it go on with."""


class NaiveSam:
    """Says after each call which count and which deadline each block must carry.

    Args:
        port: Asked only for the copy that a prefix match returns.
        layouts: One per KV cache group.
        associated_seconds: When a session without a lease lets its blocks go.
        idle_seconds: When a session without a lease ends.
        renew: Whether a turn that asks for nothing renews the lease.
        leader_wait: Seconds for which a leader's last lease waits for its workers.
    """

    def __init__(
        self,
        port: PlainPort,
        layouts: Sequence[GroupLayout],
        associated_seconds: float,
        idle_seconds: float,
        renew: bool,
        leader_wait: float,
    ) -> None:
        self.leader_wait = leader_wait
        self.port = port
        self.layouts = layouts
        self.associated_seconds = associated_seconds
        self.ending: NaiveRequest | None = None
        """What it held since its preemption counts as the session's while its end is recorded."""
        self.idle_seconds = idle_seconds
        self.renew = renew
        self.sessions: dict[Hashable, NaiveSession] = {}
        self.outside_hits: set[int] = set()
        """Blocks that somebody other than their only owner was served from."""
        self.unclaimed_use: set[int] = set()
        """Blocks that somebody uses, or has computed, who holds no claim on them."""
        self.num_expired = 0
        self.now = 0.0
        self._serial = count()

    # -- what must hold of the blocks --------------------------------------------------------------

    @property
    def contexts(self) -> list[Context]:
        sessions = self.sessions.values()
        held = [request.held for s in sessions for request in s.live if request.held]
        if self.ending is not None and self.ending.held:
            held.append(self.ending.held)
        return [context for s in sessions for context in s.contexts] + held

    def owners(self, block: int) -> list[tuple[Context, int, int]]:
        """``(context, group, logical index)`` of each record of a block."""
        return [
            (context, group, logical)
            for context in self.contexts
            for group, records in enumerate(context.records)
            for logical, record in records.items()
            if record.block == block
        ]

    def deadline_in(self, context: Context, group: int, logical: int) -> float:
        """The latest deadline of the claims that cover a block, 0.0 if none does."""
        start = logical * self.layouts[group].block_size
        return max(
            (c.deadline for c in context.claims if c.end is None or start < c.end), default=0.0
        )

    def marks(self, block: int) -> tuple[int, float]:
        """The session count and the deadline of a block."""
        owners = self.owners(block)
        return len(owners), max((self.deadline_in(*owner) for owner in owners), default=0.0)

    def is_exclusive(self, session: NaiveSession, block: int) -> bool:
        """Whether a session alone records a block, has computed it, and nobody else has hit it."""
        owners = self.owners(block)
        return (
            all(context in session.contexts for context, _, _ in owners)
            and any(context.records[g][i].is_computed for context, g, i in owners)
            and block not in self.outside_hits
        )

    def blocks_of(self, session: NaiveSession) -> set[int]:
        return {
            record.block
            for context in session.contexts
            for records in context.records
            for record in records.values()
            if record.block is not None
        }

    def exclusive_blocks(self, session: NaiveSession) -> set[int]:
        return {b for b in self.blocks_of(session) if self.is_exclusive(session, b)}

    # -- the life of a request -----------------------------------------------------------------

    def request_added(self, intent: SessionIntent) -> NaiveRequest:
        key = intent.key if intent.key is not None else ("anonymous", next(self._serial))
        session = self.sessions.get(key)
        if session is None:
            session = NaiveSession(key, intent.key is not None, len(self.layouts))
            self.sessions[key] = session
        session.idle_until = None
        for claim in session.claims:
            claim.waits = False
        request = NaiveRequest(session, intent)
        session.had_company |= bool(session.live)
        session.live.add(request)
        if intent.parent_session_id is not None:
            self._link(session, intent.key._replace(session_id=intent.parent_session_id))
        return request

    def _link(self, child: NaiveSession, parent_key: Hashable) -> None:
        parent = self.sessions.get(parent_key)
        if parent is None:
            parent = NaiveSession(parent_key, True, len(self.layouts))
            parent.give_up_at(self.now + self.idle_seconds, self.now)
            self.sessions[parent_key] = parent
        above: NaiveSession | None = parent
        while above is not None:
            if above is child:
                return
            above = above.parent
        child.parent = parent

    def request_scheduled(self, request: NaiveRequest, pages: Sequence[object]) -> None:
        if request.has_run or request.session.is_freed:
            return
        request.has_run = True
        size = min(layout.block_size for layout in self.layouts)
        request.prompt_tokens = max(
            len(pages) * size // layout.block_size * layout.block_size for layout in self.layouts
        )
        for context in request.session.contexts:
            shared = self._shared_tokens(context, pages)
            if shared and shared >= request.shared_tokens:
                request.nearest, request.shared_tokens = context, shared
        if request.nearest and request.shared_tokens >= request.nearest.base_tokens:
            request.continues = request.nearest
        for other in request.session.live - {request}:
            if other.has_run:
                other.company.append(request.continues)
                request.company.append(other.continues)

    def _shared_tokens(self, context: Context, pages: Sequence[object]) -> int:
        size = min(layout.block_size for layout in self.layouts)
        shared = 0
        for group, (records, layout) in enumerate(zip(context.records, self.layouts, strict=True)):
            for logical in sorted(records):
                end = (logical + 1) * layout.block_size
                if records[logical].hash != content_hash(group, pages[: end // size]):
                    break
                if end > len(pages) * size:
                    break
                shared = max(shared, end)
        return shared

    def request_preempted(
        self, request: NaiveRequest, tables: list[Blocks], num_hits: Sequence[int], now: float
    ) -> None:
        session = request.session
        if session.is_freed:
            return
        request.held = Context(session, [{} for _ in self.layouts])
        asked = request.intent.protections or session.protections
        self._record(request.held, tables, num_hits, asked, now, replaces=True)

    def request_finished(
        self,
        request: NaiveRequest,
        tables: list[Blocks],
        num_hits: Sequence[int],
        now: float,
        *,
        succeeded: bool,
    ) -> None:
        session = request.session
        session.live.remove(request)
        for other in session.live:
            other.company.append(request.continues)
        if session.is_freed:
            return
        asked = request.intent.protections
        if asked and (succeeded or not session.protections):
            session.protections = asked
        wanted = session.protections if asked or self.renew else None
        context, replaces = self._context_for(request, tables, succeeded)
        if context is None:
            self._rest(session, now)
            return
        self.ending = request
        self._record(context, tables, num_hits, wanted, now, replaces=replaces)
        self.ending = None
        if succeeded and not session.had_company and not request.intent.is_sibling:
            self._pass_by(session, context, tables)
        if succeeded:
            if request.continues is context:
                context.base_tokens = request.shared_tokens
            elif request.nearest is not context or not context.base_tokens:
                size = min(layout.block_size for layout in self.layouts)
                context.base_tokens = max(size, request.prompt_tokens - size)
            session.contexts = [c for c in session.contexts if c is not context] + [context]
            session.has_history = False
        self._rest(session, now)

    def _context_for(
        self, request: NaiveRequest, tables: list[Blocks], succeeded: bool
    ) -> tuple[Context | None, bool]:
        """Where a request is recorded, and whether what it does not repeat of it ends."""
        session = request.session
        nearest = request.nearest if request.nearest in session.contexts else None
        context = session.contexts[-1] if nearest is None else nearest
        if not context:
            return context, succeeded
        if not any(tables) or (nearest is None and not succeeded):
            return None, False
        if not succeeded or not request.has_run:
            return context, False
        alone = request.continues not in request.company and all(r.has_run for r in session.live)
        if nearest is not None and request.continues is not None and alone:
            return context, True
        if nearest is not None and not self._contradicts(context, tables):
            return context, False
        new = session.new_context()
        session.contexts.append(new)
        return new, True

    def _record(
        self,
        context: Context,
        tables: list[Blocks],
        num_hits: Sequence[int],
        protections: Sequence[Protection] | None,
        now: float,
        *,
        replaces: bool,
    ) -> None:
        contradicts = self._contradicts(context, tables)
        if replaces and not contradicts:
            replaces = not self._falls_short(context, tables)
        if not replaces and contradicts:
            tables = [{} for _ in tables]
        for group, table in enumerate(tables):
            old = context.records[group]
            is_checkpoint = self.layouts[group].is_checkpoint
            new: dict[int, Record] = {}
            if not replaces:
                new = {i: r for i, r in old.items() if r.block is not None or not is_checkpoint}
            for logical, block in table.items():
                known = old.get(logical)
                if known is not None and known.block == block:
                    new[logical] = known
                elif not (is_checkpoint and logical in new):
                    block_hash = self.port.blocks[block].hash
                    assert block_hash is not None
                    served = self.port.cached[block_hash][0]
                    computed = not num_hits or logical >= num_hits[group]
                    beside = any(
                        c.session is context.session and c.records[g][i].is_computed
                        for c, g, i in self.owners(served)
                    )
                    new[logical] = Record(served, block_hash, computed or beside)
            context.records[group] = new
        if protections is not None:
            context.claims = self._lay_claims(protections, now)

    def _lay_claims(self, protections: Sequence[Protection], now: float) -> list[Claim]:
        claims = [
            Claim(p.end_token, p.ttl, now + p.ttl)
            for p in protections
            if p.ttl > 0 and p.end_token != 0
        ]
        return [
            claim
            for k, claim in enumerate(claims)
            if not any(
                other.outdoes(claim) and (not claim.outdoes(other) or j < k)
                for j, other in enumerate(claims)
                if j != k
            )
        ]

    def _pass_by(self, session: NaiveSession, context: Context, tables: list[Blocks]) -> None:
        """Two turns with another prompt, the second a shorter one that begins alike, end one."""
        context.turns_passed = 0
        kept = []
        for other in session.contexts:
            if other is not context:
                other.turns_passed += 1
            over = other.turns_passed >= 2 and (not other or self._is_replaced(other, tables))
            if other is context or not over:
                kept.append(other)
        session.contexts = kept

    def _is_replaced(self, context: Context, tables: list[Blocks]) -> bool:
        dense = [g for g, layout in enumerate(self.layouts) if not layout.is_checkpoint]
        if not any(tables[g] for g in dense):
            return True
        is_longer = any(len(context.records[g]) > len(tables[g]) for g in dense)
        return is_longer and any(
            0 in context.records[g]
            and 0 in tables[g]
            and context.records[g][0].hash == self.port.blocks[tables[g][0]].hash
            for g in dense
        )

    def _contradicts(self, context: Context, tables: list[Blocks]) -> bool:
        """Whether a request has other content than the context where both have some."""
        return any(
            logical in records and records[logical].hash != self.port.blocks[block].hash
            for group, (records, table) in enumerate(zip(context.records, tables, strict=True))
            for logical, block in table.items()
            if not self.layouts[group].is_checkpoint
        )

    def _falls_short(self, context: Context, tables: list[Blocks]) -> bool:
        """Whether a request ends before the context does."""
        return any(
            len(table) < len(records)
            for records, table, layout in zip(context.records, tables, self.layouts, strict=True)
            if not layout.is_checkpoint
        )

    def _rest(self, session: NaiveSession, now: float) -> None:
        """A session without a request, a lease and a name ends; with a name, after a while."""
        if session.live:
            return
        for claim in session.claims:
            claim.armed_at = now
        session.idle_until = None
        if not session.claims:
            holds = any(session.contexts)
            session.idle_since = now
            idle = self.associated_seconds if holds else self.idle_seconds
            session.give_up_at(now + idle, now)
            if not session.is_named:
                self._free(session)

    # -- what the pool reports -----------------------------------------------------------------

    def note_hits(self, session: NaiveSession | None, blocks: Sequence[int]) -> None:
        for block in blocks:
            owners = {context.session for context, _, _ in self.owners(block)}
            if owners != {session}:
                self.outside_hits.add(block)
            if session is None or not owners:
                self.unclaimed_use.add(block)

    def content_gone(self, block: int) -> None:
        self.outside_hits.discard(block)
        self.unclaimed_use.discard(block)
        for context, group, logical in self.owners(block):
            context.records[group][logical].block = None

    def block_moved(self, source: int, target: int) -> None:
        for context, group, logical in self.owners(source):
            context.records[group][logical].block = target
        for blocks in (self.outside_hits, self.unclaimed_use):
            if source in blocks:
                blocks.remove(source)
                blocks.add(target)

    def reset(self, now: float) -> None:
        self.outside_hits.clear()
        self.unclaimed_use.clear()
        for session in list(self.sessions.values()):
            session.contexts = [session.new_context()]
            session.has_history = False
            for request in session.live:
                request.held = request.nearest = request.continues = None
                request.shared_tokens = 0
            self._rest(session, now)

    # -- time ----------------------------------------------------------------------------------

    def expire(
        self, now: float, is_due: Callable[[float], bool], *, only_holders: bool = False
    ) -> None:
        """End every lease and every idle time that is due, of sessions that have no request.

        Args:
            now: Monotonic seconds.
            is_due: Whether a deadline has come.
            only_holders: Leave sessions alone that hold no block: they are in nobody's way.
        """
        had_claims = [s for s in self.sessions.values() if s.claims and not s.live]
        while self._end_due_claims(now, is_due):
            pass
        for session in list(self.sessions.values()):
            if session not in had_claims:
                self._end_idle_time(session, now, is_due, only_holders=only_holders)

    def _end_due_claims(self, now: float, is_due: Callable[[float], bool]) -> bool:
        """Returns whether a lease has ended, for which some leader may have waited."""
        has_ended = False
        for session in list(self.sessions.values()):
            if session.live or session.is_freed:
                continue
            due = [claim for claim in session.claims if is_due(claim.comes_up)]
            due.sort(key=lambda claim: claim.comes_up)
            if due and len(due) == len(session.claims) and self._has_busy_child(session):
                last = due[-1]
                last.waits = not is_due(last.deadline + self.leader_wait)
                due = due[:-1] if last.waits else due
            has_ended |= bool(due)
            if due:
                self._end_claims(session, due, now)
        return has_ended

    def _end_idle_time(
        self,
        session: NaiveSession,
        now: float,
        is_due: Callable[[float], bool],
        *,
        only_holders: bool,
    ) -> None:
        if session.live or session.idle_until is None or not is_due(session.idle_until):
            return
        if any(session.contexts):
            for context in session.contexts:
                self._drop_uncovered(context)
            session.drop_empty_contexts()
            # It is forgotten one tick after its blocks, if not later.
            session.give_up_at(session.idle_since + self.idle_seconds, now)
            if not session.is_named:
                self._free(session)
        elif only_holders:
            return
        elif self._has_busy_child(session):
            # A leader that is long overdue is looked at again with the next tick.
            session.give_up_at(max(session.idle_due + self.idle_seconds, now), now)
        else:
            self._free(session)

    def _end_claims(self, session: NaiveSession, due: list[Claim], now: float) -> None:
        self.num_expired += len(due)
        for context in session.contexts:
            if any(claim is each for claim in context.claims for each in due):
                context.claims = [c for c in context.claims if all(c is not d for d in due)]
                self._drop_uncovered(context)
        session.drop_empty_contexts()
        if not session.claims:
            latest = max(claim.deadline for claim in due)
            self._rest(session, latest)
            holds = any(session.contexts)
            idle = self.associated_seconds if holds else self.idle_seconds
            session.give_up_at(latest + idle, now)

    def _has_busy_child(self, session: NaiveSession) -> bool:
        return any(s.parent is session and s.is_busy for s in self.sessions.values())

    def end_vain_waits(self, now: float) -> None:
        """Leaders whose last worker has come to rest wait no longer."""
        for session in list(self.sessions.values()):
            waiting = [claim for claim in session.claims if claim.waits]
            if waiting and not self._has_busy_child(session):
                self._end_claims(session, waiting, now)
                return self.end_vain_waits(now)
        return None

    def _drop_uncovered(self, context: Context) -> None:
        """A context ends where its protection does."""
        for group, records in enumerate(context.records):
            for logical in list(records):
                if not self.deadline_in(context, group, logical):
                    del records[logical]
                    context.session.has_history = True

    # -- edits ---------------------------------------------------------------------------------

    def evict(self, key: Hashable, now: float) -> None:
        """The contexts end. What others use without a claim stays for as long as it would have."""
        session = self.sessions[key]
        exclusive = self.exclusive_blocks(session)
        for context in reversed(session.contexts):
            # What it shares with those still to come, they protect as well.
            self._bequeath(session, context, exclusive, now)
            context.records = [{} for _ in self.layouts]
            context.claims = []
        session.contexts = [session.new_context()]
        session.has_history = False
        self._rest(session, now)

    def _bequeath(
        self,
        session: NaiveSession,
        context: Context,
        exclusive: set[int],
        now: float,
    ) -> None:
        """Hand over to an heir what somebody uses without a claim and nobody else protects."""
        claims = context.claims
        heir = NaiveSession(("heir", next(self._serial)), False, len(self.layouts))
        prolonged: set[NaiveSession] = set()
        for group, records in enumerate(context.records):
            for logical, record in records.items():
                block = record.block
                if block is None or block in exclusive or block not in self.unclaimed_use:
                    continue
                others = [owner for owner in self.owners(block) if owner[0] is not context]
                protected = max((self.deadline_in(*owner) for owner in others), default=0.0)
                if others and protected >= self.deadline_in(context, group, logical):
                    continue
                earlier = self._earlier_heir(claims, block)
                if earlier is not None:
                    prolonged.add(earlier)
                else:
                    heir.contexts[0].records[group][logical] = replace(record, is_computed=False)
        for earlier in prolonged:
            (claim,) = claims
            until = now + claim.ttl if session.live else claim.deadline
            latest = max([until, *(c.deadline for c in earlier.claims)])
            earlier.contexts[0].claims = [replace(claim, deadline=latest, armed_at=now)]
            earlier.idle_until = None
        if heir.contexts[0]:
            heir.contexts[0].claims = [
                replace(c, deadline=now + c.ttl if session.live else c.deadline, armed_at=now)
                for c in claims
            ]
            if not claims:
                heir.idle_until = session.idle_until or now + self.associated_seconds
            self.sessions[heir.key] = heir

    def _earlier_heir(self, claims: list[Claim], block: int) -> NaiveSession | None:
        """An heir that holds the block and can take over the one lease of a context."""
        if [claim.end for claim in claims] != [None]:
            return None
        heirs = [
            owner.session
            for owner, _, _ in self.owners(block)
            if owner.session.is_heir and [c.end for c in owner.claims] in ([], [None])
        ]
        return max(
            heirs,
            key=lambda heir: (
                max((c.deadline for c in heir.claims), default=0.0),
                heir.key,
            ),
            default=None,
        )

    def free_session(self, key: Hashable) -> None:
        self._free(self.sessions[key])

    def free_all_sessions(self) -> None:
        for session in list(self.sessions.values()):
            self._free(session)

    def _free(self, session: NaiveSession) -> None:
        session.is_freed = True
        for other in self.sessions.values():
            if other.parent is session:
                other.parent = None
        for request in session.live:
            request.held = None
        del self.sessions[session.key]
        if not self.sessions:  # Nobody is left whom others could be outside of.
            self.outside_hits.clear()
            self.unclaimed_use.clear()


def check_marks(port: PlainPort, naive: NaiveSam | None) -> None:
    """Every block carries the count and the deadline that the naive core says."""
    assert naive is not None
    for block_id, block in enumerate(port.blocks[1:], 1):
        owners = naive.owners(block_id)
        assert (block.count, block.deadline) == naive.marks(block_id), owners
