"""The bounds on what sessions hold: who gives way, and what of a newcomer is clipped."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vllm_agent_hint.sessions.agenda import session_of
from vllm_agent_hint.sessions.books import Books
from vllm_agent_hint.sessions.ledger import Newcomer
from vllm_agent_hint.sessions.lineage import Lineage, eviction_order
from vllm_agent_hint.sessions.session import Session

Newcomers = list[list[Newcomer]]
"""Per KV cache group, in token order."""


@dataclass(slots=True)
class Clipping:
    """What the bounds have kept a request from recording.

    Args:
        blocks: By the name of the bound, which is that of its setting.
    """

    blocks: Counter[str] = field(default_factory=Counter)


class Capacity:
    """Keeps sessions within the bounds on records, pool share and tenant share.

    Above the share the resting session that is worth least gives way first, from its tail; then
    the newcomer is clipped from its own.

    Args:
        books: Shared with the rooms beside this one.
        on_emptied: Told of a lineage that has given way to its last record.
    """

    def __init__(self, books: Books, on_emptied: Callable[[Lineage, float], None]) -> None:
        self._books = books
        self._on_emptied = on_emptied
        settings = books.settings
        self._max_records = settings.max_records
        self._max_retained = int(settings.protected_share * (books.ledger.port.num_gpu_blocks - 1))
        self._max_of_tenant = int(settings.tenant_share * self._max_retained)

    def make_room(self, session: Session, newcomers: Newcomers, now: float) -> Clipping:
        """Bring newcomers within the bounds; clips the lists that it is given.

        To a conversation, which has asked for nothing, only others of its kind give way, and
        together they hold half of the records at most.
        """
        clipping = Clipping()
        self._fit_records(session, newcomers, clipping)
        if self._max_of_tenant < self._max_retained:
            # First, so that nobody else gives way to what the tenant may not hold.
            self._fit_tenant(session, newcomers, clipping, now)
        self._fit_share(session, newcomers, clipping, now)
        return clipping

    def _fit_records(self, session: Session, newcomers: Newcomers, clipping: Clipping) -> None:
        bound = self._max_records // 2 if session.is_conversation else self._max_records
        excess = self._beyond_records(newcomers, bound)
        budget = 4 * excess + 64
        while excess > 0 and budget > 0 and len(self._books.releases):
            step = min(excess, budget)
            self._books.releases.work(step)
            budget -= step
            excess = self._beyond_records(newcomers, bound)
        if excess > 0:
            clipping.blocks["max_records"] += self._clip(newcomers, excess, {})

    def _fit_share(
        self, session: Session, newcomers: Newcomers, clipping: Clipping, now: float
    ) -> None:
        excess, _ = self._beyond_share(newcomers)
        if excess > 0:
            port = self._books.ledger.port
            self._give_way(excess, lambda: port.num_retained_blocks, self._in_order(session, now))
            # What gave way may have been shared with the newcomers: weigh them again.
            excess, weight = self._beyond_share(newcomers)
            if excess > 0:
                clipping.blocks["protected_share"] += self._clip(newcomers, excess, weight)

    def _fit_tenant(
        self, session: Session, newcomers: Newcomers, clipping: Clipping, now: float
    ) -> None:
        tenant = session.tenant
        excess, _ = self._beyond_tenant(tenant, newcomers)
        if excess > 0:
            self._give_way(
                excess,
                lambda: self._books.ledger.index.num_blocks_of(tenant),
                self._in_order(session, now, tenant),
            )
            excess, weight = self._beyond_tenant(tenant, newcomers)
            if excess > 0:
                clipping.blocks["tenant_share"] += self._clip(newcomers, excess, weight)

    def _beyond_tenant(self, tenant: str, newcomers: Newcomers) -> tuple[int, dict[int, int]]:
        """The same as ``_beyond_share``, for what one tenant may hold."""
        index = self._books.ledger.index
        weight = {
            new.block_id: 0 if index.is_held_by_tenant(new.block_id, tenant) else 1
            for group in newcomers
            for new in group
        }
        return index.num_blocks_of(tenant) + sum(weight.values()) - self._max_of_tenant, weight

    def _beyond_records(self, newcomers: Newcomers, bound: int) -> int:
        room = bound - self._books.ledger.index.num_records
        return sum(map(len, newcomers)) - max(0, room)

    def _beyond_share(self, newcomers: Newcomers) -> tuple[int, dict[int, int]]:
        """Blocks over the protected share if all newcomers came, and what each would add to it."""
        weight = {
            new.block_id: 0 if self._books.ledger.index.is_held(new.block_id) else 1
            for group in newcomers
            for new in group
        }
        retained = self._books.ledger.port.num_retained_blocks
        return retained + sum(weight.values()) - self._max_retained, weight

    def _clip(self, newcomers: Newcomers, excess: int, weight: dict[int, int]) -> int:
        """Remove newcomers, tail first, until their weight has fallen by ``excess``."""
        order = eviction_order(self._books.layouts, [[new.logical for new in g] for g in newcomers])
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

    def _in_order(
        self, newcomer: Session, now: float, tenant: str | None = None
    ) -> Iterator[Session]:
        """Who gives way next, for as long as it holds something: without a lease first, heirs last.

        Args:
            newcomer: To whom.
            now: Monotonic seconds.
            tenant: Whose; None for anybody's.
        """

        def counts(session: Session) -> bool:
            return (tenant is None or session.tenant == tenant) and (
                session.is_conversation or not newcomer.is_conversation
            )

        if newcomer.is_conversation:
            yield from self._books.standing.in_order(now, leased=False, counts=counts)
            return
        wanted = None if tenant is None else counts
        for leased in (False, True):
            yield from self._books.standing.in_order(now, leased=leased, counts=wanted)
        while (entry := self._books.agenda.next_to_give_way(tenant)) is not None:
            yield session_of(entry)

    def _give_way(
        self, num_blocks: int, count: Callable[[], int], in_order: Iterator[Session]
    ) -> None:
        """Release contexts, tail first, those first that are worth least.

        Args:
            num_blocks: How many fewer are wanted. O(num_blocks + classes).
            count: Says how many there are.
            in_order: Says who is next.
        """
        before = count()
        budget = 4 * num_blocks + 64
        while budget > 0:
            step = min(num_blocks - (before - count()), budget)
            if step <= 0:
                break
            if len(self._books.releases):
                self._books.releases.work(step)
                budget -= step
                continue
            session = next(in_order, None)
            if session is None:
                break
            budget -= self._shorten(session, step)

    def _shorten(self, session: Session, num_blocks: int) -> int:
        """Take claims off the end of a session's oldest context. Returns what that has cost."""
        lineages = session.lineages
        lineage = next((lineage for lineage in lineages if len(lineage)), lineages[0])
        held = len(lineage)
        self._books.ledger.release_tail(lineage, num_blocks, placement=self._books.policy.given_way)
        if not session.num_records:
            self._books.standing.leave(session)
        if not len(lineage):
            idle = session.idle
            ended_at = lineage.deadline or (idle.due_at - self._books.associated_seconds)
            self._on_emptied(lineage, ended_at)
        return max(1, held - len(lineage))
