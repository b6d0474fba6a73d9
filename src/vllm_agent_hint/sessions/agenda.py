"""What falls due, and when: leases, and the idle limits of sessions that have none."""

from vllm_agent_hint.sessions.lineage import Lease, Lineage
from vllm_agent_hint.sessions.session import IdleLimit, Session
from vllm_agent_hint.sessions.ttl import TTLManager, WheelEntry


def session_of(entry: WheelEntry) -> Session:
    """Whose lease or idle limit an entry is."""
    if isinstance(entry, Lease):
        return entry.lineage.session
    assert isinstance(entry, IdleLimit)
    return entry.session


class Agenda:
    """Three wheels, because what waits in them gives way to pressure in different order.

    Args:
        now: Monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self.leases = TTLManager(now)
        self.unleased = TTLManager(now)
        """Idle limits of sessions that hold records without a lease."""
        self.idle = TTLManager(now)
        """Idle limits of sessions that hold no record."""

    @property
    def next_at(self) -> float:
        """When ``advance`` is worth calling next; infinity while nothing waits."""
        return min(wheel.next_tick_at for wheel in (self.leases, self.unleased, self.idle))

    def advance(self, now: float) -> list[WheelEntry]:
        """Take out what fell due in the seconds that are over."""
        return [
            *self.leases.advance(now),
            *self.unleased.advance(now),
            *self.idle.advance(now),
        ]

    def take_due_claims(self, now: float) -> list[WheelEntry]:
        """Take out all that is due and may hold blocks, this second's part included."""
        return [*self.leases.take_due(now), *self.unleased.take_due(now)]

    def next_to_give_way(self, tenant: str | None = None) -> WheelEntry | None:
        """Under pressure: what has no lease first, then the lease that falls due soonest.

        Args:
            tenant: Whose; None for anybody's.
        """

        def counts(entry: WheelEntry) -> bool:
            return tenant is None or session_of(entry).tenant == tenant

        return self.unleased.soonest(counts) or self.leases.soonest(counts)

    def arm_leases(self, lineage: Lineage) -> None:
        """Let the leases of a lineage run."""
        for lease in lineage.leases:
            self.leases.register(lease, lease.deadline)

    def arm_idle_limit(self, session: Session, due_at: float) -> None:
        """Give a session up at a time, unless it is used before."""
        wheel = self.unleased if session.num_records else self.idle
        wheel.register(session.idle, due_at)

    def clear(self) -> None:
        for wheel in (self.leases, self.unleased, self.idle):
            wheel.clear()
