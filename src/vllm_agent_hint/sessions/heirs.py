"""Who keeps what others use of a session's context when the session gives it up."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from vllm_agent_hint.sessions.agenda import Agenda
from vllm_agent_hint.sessions.ledger import Ledger
from vllm_agent_hint.sessions.lineage import LOST, Chain, Lease, Lineage
from vllm_agent_hint.sessions.session import Session


@dataclass(slots=True, eq=False)
class Estate:
    """A context that its session gives up: what it would have been kept for, and who gets it.

    Args:
        lineage: The context.
        leases: How it was protected, as ``(ttl, end_token, deadline)``.
        written: The deadlines that its blocks carry for it, as ``(end_token, deadline)``.
        idle_until: When its session would have been given up, if it had no lease.
    """

    lineage: Lineage
    leases: list[tuple[float, int | None, float]]
    written: list[tuple[int | None, float]]
    idle_until: float
    heir: Session | None = None
    prolonged: set[Session] = field(default_factory=set)

    def deadline_at(self, token: int) -> float:
        """The deadline that a block carries for it which begins at a token; 0.0 if none."""
        covering = (d for end, d in self.written if end is None or token < end)
        return max(covering, default=0.0)

    @property
    def whole_lease(self) -> tuple[float, float] | None:
        """``(ttl, deadline)`` of its only lease, if that covers all."""
        if len(self.leases) == 1 and self.leases[0][1] is None:
            ttl, _, deadline = self.leases[0]
            return ttl, deadline
        return None


class Heirs:
    """Anonymous sessions that an evict leaves behind.

    An unhinted request that shares a prefix holds no claim on it. Were the session's claim simply
    to end, an evict could cost that request its hits. So an heir takes over exactly those of its
    blocks whose protection would fall, and ends when the lease would have. Sessions that share a
    prefix have claims of their own and need no heir.

    Args:
        sessions: All sessions by key; heirs are put there, too.
        ledger: The accounts.
        agenda: Where their leases run.
        serial: Makes keys for sessions without a name.
        idle_seconds: When a session without a lease ends.
    """

    def __init__(
        self,
        sessions: dict[Hashable, Session],
        ledger: Ledger,
        agenda: Agenda,
        serial: Iterator[int],
        idle_seconds: float,
    ) -> None:
        self._sessions = sessions
        self._ledger = ledger
        self._agenda = agenda
        self._serial = serial
        self._idle_seconds = idle_seconds
        self._alive: set[Session] = set()

    def __len__(self) -> int:
        return len(self._alive)

    def forget(self, session: Session) -> None:
        """A session has ended; no-op if it is no heir."""
        self._alive.discard(session)

    def estate_of(self, lineage: Lineage, now: float) -> Estate:
        """What is to be known of a context before its leases end."""
        idle = lineage.session.idle
        return Estate(
            lineage,
            [
                (lease.ttl, lease.end_token, lease.deadline if lease.is_armed else now + lease.ttl)
                for lease in lineage.leases
            ],
            [(lease.end_token, lease.deadline) for lease in lineage.leases],
            idle.due_at if idle.is_armed else now + self._idle_seconds,
        )

    def inherit(self, estate: Estate, records: Iterable[tuple[Chain, int]]) -> None:
        """Hand over what others use of a context's last records, tail first, before they end."""
        handed_over: dict[Chain, list[int]] = {}
        for chain, position in records:
            block_id = chain.block_ids[position]
            if block_id == LOST or self._ledger.is_exclusive(chain, position):
                continue
            if not self._needs_heir(estate, chain, position):
                continue
            earlier = self._earlier_heir(estate, block_id)
            if earlier is None:
                new = self._heir_of(estate).chains[chain.group]
                handed_over.setdefault(new, []).append(chain.logical_index(position))
                self._hand_over(chain, position, new)
            elif earlier not in estate.prolonged:
                estate.prolonged.add(earlier)
                self._prolong(earlier, estate)
        for new, logical in handed_over.items():
            positions = [new.position_of(index) for index in logical]
            self._ledger.renew(new, positions, estate.lineage.latest_written)

    def _needs_heir(self, estate: Estate, chain: Chain, position: int) -> bool:
        """Whether somebody without a claim uses a block that nobody else protects as well.

        Only for what this estate gave the block: whoever gave it more keeps that, or has an heir
        of its own. Of several estates that gave it as much, the last to be settled has the heir.
        """
        block_id = chain.block_ids[position]
        if not self._ledger.usage.is_unclaimed(block_id, chain.hashes[position]):
            return False
        if self._ledger.index.is_held_only_by(chain, block_id):
            return True
        first_token = chain.logical_index(position) * self._ledger.layouts[chain.group].block_size
        others = self._ledger.deadlines_of_others(chain).of(block_id)
        return others < estate.deadline_at(first_token)

    def _earlier_heir(self, estate: Estate, block_id: int) -> Session | None:
        """An heir that holds the block already and can take over the one lease on it."""
        if estate.whole_lease is None:
            return None
        heirs = [
            chain.lineage.session
            for chain in self._ledger.index.owners(block_id)
            if chain.lineage.session in self._alive
            and chain.lineage.session is not estate.heir
            and (not chain.lineage.leases or _has_one_whole_lease(chain.lineage))
        ]
        return max(heirs, key=lambda heir: (heir.lineage.deadline, heir.key), default=None)

    def _prolong(self, heir: Session, estate: Estate) -> None:
        """Let an heir protect what it has for as long as another lease would have run.

        Its own ends before that: else it would have protected the block as well, and nobody have
        been needed.
        """
        assert estate.whole_lease is not None
        ttl, until = estate.whole_lease
        lineage = heir.lineage
        heir.idle.disarm()
        lineage.end_leases()
        lineage.trim_to = None
        lineage.leases = [Lease(lineage, ttl, None, until)]
        self._ledger.write_deadlines(lineage)
        self._agenda.arm_leases(lineage)

    def _hand_over(self, chain: Chain, position: int, heir: Chain) -> None:
        block_id = chain.block_ids[position]
        heir.logical = heir.logical or []
        logical = chain.logical_index(position)
        heir.insert(logical, block_id, chain.hashes[position], computed=False)
        self._ledger.index.hand_over(block_id, chain, heir)
        chain.mark_lost(position)

    def _heir_of(self, estate: Estate) -> Lineage:
        """The anonymous session that takes over; made for the first block."""
        if estate.heir is None:
            giver = estate.lineage.session
            num_groups = len(estate.lineage.chains)
            heir = Session(next(self._serial), num_groups, tenant=giver.tenant, is_heir=True)
            estate.heir = heir
            self._sessions[heir.key] = heir
            self._alive.add(heir)
            lineage = heir.lineage
            lineage.leases = [
                Lease(lineage, ttl, end_token, deadline)
                for ttl, end_token, deadline in estate.leases
            ]
            lineage.latest_written = lineage.deadline
            if lineage.leases:
                self._agenda.arm_leases(lineage)
            else:
                self._agenda.unleased.register(heir.idle, estate.idle_until)
        return estate.heir.lineage


def _has_one_whole_lease(lineage: Lineage) -> bool:
    return len(lineage.leases) == 1 and lineage.leases[0].end_token is None
