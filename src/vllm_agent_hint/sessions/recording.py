"""What a request has computed becomes a session's context, and what that replaces goes."""

from collections.abc import Sequence

from vllm_agent_hint.hints import EditStatus, RetentionResult
from vllm_agent_hint.sessions import continuation
from vllm_agent_hint.sessions.books import Books
from vllm_agent_hint.sessions.capacity import Capacity, Clipping
from vllm_agent_hint.sessions.intent import Protection
from vllm_agent_hint.sessions.leases import lay_leases
from vllm_agent_hint.sessions.lineage import ChainDiff, Lineage, RecordedPrefix, compare
from vllm_agent_hint.sessions.session import LiveRequest, Session


class Recorder:
    """Writes contexts into the ledger.

    Args:
        books: Shared with the rooms beside this one.
        capacity: Brings what is new within the bounds.
    """

    def __init__(self, books: Books, capacity: Capacity) -> None:
        self._books = books
        self._capacity = capacity

    def lineage_for(
        self, live: LiveRequest, prefixes: Sequence[RecordedPrefix], *, succeeded: bool
    ) -> tuple[Lineage | None, bool]:
        """Where to record a request that has ended, and whether it replaces what is there.

        A request that failed may extend what its prompt had in common with, and no more. One that
        has nothing to record, as a prompt shorter than a block, says nothing of other prompts.

        Returns:
            The lineage, None for nowhere, and whether what the request does not have ends.
        """
        session = live.session
        for edited in tuple(session.lineages):
            # One of which an edit leaves nothing is not there any more.
            self._books.releases.finish_edit(edited)
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
        lineage = Lineage(session, len(self._books.layouts))
        session.lineages.append(lineage)
        return lineage, True

    def go_on_with(self, live: LiveRequest, lineage: Lineage) -> None:
        """A request has succeeded: its lineage is the session's latest."""
        session = live.session
        if live.continues is lineage or not lineage.base_tokens or live.nearest is not lineage:
            lineage.base_tokens = continuation.base_after(live, lineage, self._books.layouts)
        session.lineages.remove(lineage)
        session.lineages.append(lineage)
        # What had expired is recorded again, or superseded.
        self._books.history.forget(session)
        while len(session.lineages) > self._books.settings.max_lineages:
            oldest = session.lineages.pop(0)
            self._books.counters.clipped["max_lineages"] += len(oldest)
            self._books.releases.let_go(oldest)

    def supersede(self, lineage: Lineage, by: Sequence[RecordedPrefix]) -> None:
        """A session has gone on with another prompt: what that does not share may be over.

        One that shares nothing was another agent's, under the same name. And a compaction or a
        rewind is shorter than what it replaces.
        """
        session = lineage.session
        hashes = [prefix.hashes if prefix.logical is None else [] for prefix in by]
        shared = continuation.shared_tokens(lineage, hashes, self._books.layouts)
        is_longer = any(
            chain.logical is None and len(chain) > len(new)
            for chain, new in zip(lineage.chains, hashes, strict=True)
        )
        if len(lineage) and any(hashes) and not (shared and is_longer):
            return
        for group, chain in enumerate(lineage.chains):
            if chain.logical is None:
                first = shared // self._books.layouts[group].block_size
                self._note_superseded(session, group, first, chain.hashes[first:])
        session.lineages.remove(lineage)
        self._books.releases.let_go(lineage)

    def _note_superseded(
        self, session: Session, group: int, first: int, hashes: Sequence[bytes]
    ) -> None:
        self._books.counters.superseded_blocks += len(hashes)
        self._books.counters.superseded_tokens += (
            len(hashes) * self._books.layouts[group].block_size
        )
        self._books.history.supersede(session, group, first, hashes)

    def record(
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
        self._books.releases.finish_edit(lineage)
        self._books.releases.interrupt(lineage)
        diffs = [compare(chain, new) for chain, new in zip(lineage.chains, prefixes, strict=True)]
        diverged = any(diff.diverged for diff in diffs)
        if replaces and not diverged:
            # A prompt that ends early says nothing about what lies behind its end.
            replaces = not self._falls_short(lineage, prefixes)
        if not replaces and diverged:
            diffs = [ChainDiff((), (), (), diverged=True) for _ in diffs]
        newcomers = [
            self._books.ledger.newcomers(diff, new)
            for diff, new in zip(diffs, prefixes, strict=True)
        ]
        # The old leases stand until what they alone protect has been released.
        for chain, new, diff in zip(lineage.chains, prefixes, diffs, strict=True):
            if replaces and diff.diverged and chain.logical is None:
                tail = chain.hashes[diff.common :]
                self._note_superseded(lineage.session, chain.group, diff.common, tail)
            self._books.ledger.drop_replaced(
                chain, new, diff, replaces=replaces, placement=self._books.policy.superseded
            )
        clipping = self._capacity.make_room(lineage.session, newcomers, now)
        if protections is not None:
            lineage.end_leases()
            lineage.leases = lay_leases(lineage, protections, now, self._books.settings, clipping)
        lineage.interrupted_at = None
        for chain, fresh in zip(lineage.chains, newcomers, strict=True):
            self._books.ledger.add(chain, fresh, lineage.deadline)
        self._books.ledger.write_deadlines(lineage)
        self._books.counters.clipped.update(clipping.blocks)
        return clipping

    def _falls_short(self, lineage: Lineage, prefixes: Sequence[RecordedPrefix]) -> bool:
        return any(
            len(new.block_ids) < len(chain)
            for chain, new, layout in zip(
                lineage.chains, prefixes, self._books.layouts, strict=True
            )
            if not layout.is_checkpoint
        )

    def retention_of(
        self, live: LiveRequest, lineage: Lineage | None, clipping: Clipping
    ) -> RetentionResult:
        """What has become of a request's retention.

        Args:
            live: The request.
            lineage: Where it is recorded; None for nowhere.
            clipping: What the bounds have kept out.
        """
        blocks = [len(chain) for chain in lineage.chains] if lineage is not None else [0]
        status = EditStatus.APPLIED if any(blocks) else EditStatus.MISSING
        reasons = [live.link_problem] if live.link_problem else []
        if clipping.blocks:
            status = EditStatus.CLIPPED
            reasons.append("clipped by " + ", ".join(clipping.blocks))
        return RetentionResult(
            status=status,
            blocks=sum(blocks),
            tokens=max(
                n * lay.block_size for n, lay in zip(blocks, self._books.layouts, strict=False)
            ),
            bounds=list(clipping.blocks),
            reason="; ".join(reasons),
        )
