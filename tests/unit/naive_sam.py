"""What the session core means, without its bounds: dictionaries, searched from end to end."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from tests.unit.plain_port import PlainPort
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


@dataclass(eq=False)
class NaiveSession:
    """A session; one without a name is a number."""

    key: Hashable
    is_named: bool
    num_groups: int
    live: set["NaiveRequest"] = field(default_factory=set)
    protections: tuple[Protection, ...] = ()
    idle_until: float | None = None
    has_history: bool = False
    is_freed: bool = False
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        self.forget_context()

    @property
    def is_heir(self) -> bool:
        return isinstance(self.key, tuple) and self.key[0] == "heir"

    def forget_context(self) -> None:
        self.context = Context(self, [{} for _ in range(self.num_groups)])


@dataclass(eq=False)
class NaiveRequest:
    """A request that has arrived and not ended. ``held`` is what it had when it was preempted."""

    session: NaiveSession
    intent: SessionIntent
    held: Context | None = None


class NaiveSam:
    """Says after each call which count and which deadline each block must carry.

    Args:
        port: Asked only for the copy that a prefix match returns.
        layouts: One per KV cache group.
        idle_seconds: When a session without a lease ends.
        renew: Whether a turn that asks for nothing renews the lease.
    """

    def __init__(
        self, port: PlainPort, layouts: Sequence[GroupLayout], idle_seconds: float, renew: bool
    ) -> None:
        self.port = port
        self.layouts = layouts
        self.idle_seconds = idle_seconds
        self.renew = renew
        self.sessions: dict[Hashable, NaiveSession] = {}
        self.outside_hits: set[int] = set()
        """Blocks that somebody other than their only owner was served from."""
        self.unclaimed_use: set[int] = set()
        """Blocks that somebody uses, or has computed, who holds no claim on them."""
        self.num_expired = 0
        self._serial = count()

    # -- what must hold of the blocks --------------------------------------------------------------

    @property
    def contexts(self) -> list[Context]:
        sessions = self.sessions.values()
        held = [request.held for s in sessions for request in s.live if request.held]
        return [s.context for s in sessions] + held

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

    def is_exclusive(self, record: Record) -> bool:
        return (
            record.block is not None
            and record.is_computed
            and len(self.owners(record.block)) == 1
            and record.block not in self.outside_hits
        )

    def exclusive_blocks(self, session: NaiveSession) -> set[int]:
        return {
            record.block
            for records in session.context.records
            for record in records.values()
            if record.block is not None and self.is_exclusive(record)
        }

    # -- the life of a request -----------------------------------------------------------------

    def request_added(self, intent: SessionIntent) -> NaiveRequest:
        key = intent.key if intent.key is not None else ("anonymous", next(self._serial))
        session = self.sessions.get(key)
        if session is None:
            session = NaiveSession(key, intent.key is not None, len(self.layouts))
            self.sessions[key] = session
        session.idle_until = None
        request = NaiveRequest(session, intent)
        session.live.add(request)
        return request

    def request_preempted(self, request: NaiveRequest, tables: list[Blocks], now: float) -> None:
        session = request.session
        if session.is_freed:
            return
        request.held = Context(session, [{} for _ in self.layouts])
        asked = request.intent.protections or session.protections
        self._record(request.held, tables, (), asked, now, replaces=True)

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
        if session.is_freed:
            return
        asked = request.intent.protections
        if asked and (succeeded or not session.protections):
            session.protections = asked
        wanted = session.protections if asked or self.renew else None
        replaces = succeeded and not session.live
        self._record(session.context, tables, num_hits, wanted, now, replaces=replaces)
        session.has_history = session.has_history and not succeeded
        self._rest(session, now)

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
                    new[logical] = Record(served, block_hash, computed)
            context.records[group] = new
        if protections is not None:
            context.claims = self._lay_claims(protections, now)

    def _lay_claims(self, protections: Sequence[Protection], now: float) -> list[Claim]:
        claims = [Claim(p.end_token, p.ttl, now + p.ttl) for p in protections if p.ttl > 0]
        return [
            claim
            for k, claim in enumerate(claims)
            if not any(
                other.outdoes(claim) and (not claim.outdoes(other) or j < k)
                for j, other in enumerate(claims)
                if j != k
            )
        ]

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
        for claim in session.context.claims:
            claim.armed_at = now
        if not session.context.claims:
            session.idle_until = now + self.idle_seconds
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
            session.forget_context()
            session.has_history = False
            for request in session.live:
                request.held = None
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
        for session in list(self.sessions.values()):
            if session.live:
                continue
            due = [claim for claim in session.context.claims if is_due(claim.comes_up)]
            if due:
                self.num_expired += len(due)
                session.context.claims = [c for c in session.context.claims if c not in due]
                self._drop_uncovered(session)
                if not session.context.claims:
                    latest = max(claim.deadline for claim in due)
                    self._rest(session, latest)
                    session.idle_until = max(latest + self.idle_seconds, now)
            elif session.idle_until is not None and is_due(session.idle_until):
                if any(session.context.records):
                    self._drop_uncovered(session)
                    session.idle_until = now  # It is forgotten one tick after its blocks.
                    if not session.is_named:
                        self._free(session)
                elif not only_holders:
                    self._free(session)

    def _drop_uncovered(self, session: NaiveSession) -> None:
        """A context ends where its protection does."""
        for group, records in enumerate(session.context.records):
            for logical in list(records):
                if not self.deadline_in(session.context, group, logical):
                    del records[logical]
                    session.has_history = True

    # -- edits ---------------------------------------------------------------------------------

    def evict(self, key: Hashable, now: float) -> None:
        """The context ends. What others use of it without a claim stays for as long as it would."""
        session = self.sessions[key]
        heir = NaiveSession(("heir", next(self._serial)), False, len(self.layouts))
        wanted = [
            (group, logical, record, self.marks(record.block))
            for group, records in enumerate(session.context.records)
            for logical, record in records.items()
            if record.block in self.unclaimed_use and not self.is_exclusive(record)
        ]
        before = session.context
        prolonged: set[NaiveSession] = set()
        session.forget_context()
        session.has_history = False
        for group, logical, record, (_, deadline) in wanted:
            assert record.block is not None
            others, others_deadline = self.marks(record.block)
            if others and others_deadline >= deadline:
                continue
            earlier = self._earlier_heir(before, record.block)
            if earlier is not None:
                prolonged.add(earlier)
            else:
                heir.context.records[group][logical] = replace(record, is_computed=False)
        for earlier in prolonged:
            (claim,) = before.claims
            until = now + claim.ttl if session.live else claim.deadline
            latest = max([until, *(c.deadline for c in earlier.context.claims)])
            earlier.context.claims = [replace(claim, deadline=latest, armed_at=now)]
            earlier.idle_until = None
        if any(heir.context.records):
            heir.context.claims = [
                replace(c, deadline=now + c.ttl if session.live else c.deadline, armed_at=now)
                for c in before.claims
            ]
            if not heir.context.claims:
                heir.idle_until = session.idle_until or now + self.idle_seconds
            self.sessions[heir.key] = heir
        self._rest(session, now)

    def _earlier_heir(self, context: Context, block: int) -> NaiveSession | None:
        """An heir that holds the block and can take over the one lease of a context."""
        if [claim.end for claim in context.claims] != [None]:
            return None
        heirs = [
            owner.session
            for owner, _, _ in self.owners(block)
            if owner.session.is_heir and [c.end for c in owner.claims] in ([], [None])
        ]
        return max(
            heirs,
            key=lambda heir: (
                max((c.deadline for c in heir.context.claims), default=0.0),
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
        for request in session.live:
            request.held = None
        del self.sessions[session.key]
        if not self.sessions:  # Nobody is left whom others could be outside of.
            self.outside_hits.clear()
            self.unclaimed_use.clear()
