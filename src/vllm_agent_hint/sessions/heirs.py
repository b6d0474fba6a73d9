"""Who keeps what others use of a session's context when the session gives it up."""

from collections.abc import Hashable, Iterator

from vllm_agent_hint.sessions.agenda import Agenda
from vllm_agent_hint.sessions.ledger import Ledger
from vllm_agent_hint.sessions.lineage import LOST, Chain, Lease, Lineage
from vllm_agent_hint.sessions.session import Session


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

    def inherit(self, session: Session, now: float) -> int:
        """Hand over what others use of a session's context, before the session drops it.

        Returns:
            Resident blocks that the session must not offer for reuse, handed over or not.
        """
        spared = 0
        wanted: list[tuple[Chain, int]] = []
        for chain in session.lineage.chains:
            for position, block_id in enumerate(chain.block_ids):
                if block_id == LOST or self._ledger.is_exclusive(chain, position):
                    continue
                spared += 1
                if self._needs_heir(chain, position):
                    wanted.append((chain, position))
        heir = Session(next(self._serial), len(session.lineage.chains), is_heir=True)
        prolonged: set[Session] = set()
        for chain, position in wanted:
            earlier = self._earlier_heir(session, chain.block_ids[position])
            if earlier is not None:
                prolonged.add(earlier)
            else:
                self._hand_over(chain, position, heir.lineage.chains[chain.group])
        for earlier in prolonged:
            self._prolong(earlier, session.lineage.leases[0], now)
        if len(heir.lineage):
            self._settle(heir, session, now)
        return spared

    def _needs_heir(self, chain: Chain, position: int) -> bool:
        """Whether somebody without a claim uses a block that nobody else protects as well."""
        if not self._ledger.is_used_without_claim(chain, position):
            return False
        block_id = chain.block_ids[position]
        if self._ledger.index.is_held_only_by(chain, block_id):
            return True
        deadline = self._ledger.port.ttl_expire_at(block_id)
        return self._ledger.deadline_of_others(chain, block_id) < deadline

    def _earlier_heir(self, session: Session, block_id: int) -> Session | None:
        """An heir that holds the block already and can take over the session's lease on it."""
        if not _has_one_whole_lease(session.lineage):
            return None
        heirs = [
            chain.lineage.session
            for chain in self._ledger.index.owners(block_id)
            if chain.lineage.session.is_heir
            and (not chain.lineage.leases or _has_one_whole_lease(chain.lineage))
        ]
        return max(heirs, key=lambda heir: (heir.lineage.deadline, heir.key), default=None)

    def _prolong(self, heir: Session, lease: Lease, now: float) -> None:
        """Let an heir protect what it has for as long as another lease would have run."""
        lineage = heir.lineage
        deadline = max(_would_end(lease, now), lineage.deadline)
        heir.idle.disarm()
        lineage.end_leases()
        lineage.trim_to = None
        lineage.leases = [Lease(lineage, lease.ttl, None, deadline)]
        self._ledger.write_deadlines(lineage)
        self._agenda.arm_leases(lineage)

    def _hand_over(self, chain: Chain, position: int, heir: Chain) -> None:
        block_id = chain.block_ids[position]
        heir.logical = heir.logical or []
        heir.logical.append(chain.logical_index(position))
        heir.put(len(heir), block_id, chain.hashes[position], computed=False)
        self._ledger.index.hand_over(block_id, chain, heir)
        chain.mark_lost(position)

    def _settle(self, heir: Session, session: Session, now: float) -> None:
        self._sessions[heir.key] = heir
        self._alive.add(heir)
        lineage = heir.lineage
        lineage.leases = [
            Lease(lineage, lease.ttl, lease.end_token, _would_end(lease, now))
            for lease in session.lineage.leases
        ]
        lineage.latest_written = session.lineage.latest_written
        self._ledger.write_deadlines(lineage)
        if lineage.leases:
            self._agenda.arm_leases(lineage)
        else:
            is_idling = session.idle.is_armed
            until = session.idle.deadline if is_idling else now + self._idle_seconds
            self._agenda.arm_idle_limit(heir, until)


def _would_end(lease: Lease, now: float) -> float:
    """When a lease would run out; one that stands still while a request is alive begins now."""
    return lease.deadline if lease.is_armed else now + lease.ttl


def _has_one_whole_lease(lineage: Lineage) -> bool:
    return len(lineage.leases) == 1 and lineage.leases[0].end_token is None
