"""Edits on the context of a session: what they end here, and who else is asked."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from vllm_agent_hint.hints import EditResult, EditStatus, EditType
from vllm_agent_hint.sessions import family
from vllm_agent_hint.sessions.books import Books
from vllm_agent_hint.sessions.evictions import EditRun, Eviction
from vllm_agent_hint.sessions.intent import Edit, SessionKey
from vllm_agent_hint.sessions.leases import end_leases_at
from vllm_agent_hint.sessions.lifetimes import Lifetimes
from vllm_agent_hint.sessions.lineage import Lineage
from vllm_agent_hint.sessions.reasons import NOTHING_RECORDED
from vllm_agent_hint.sessions.releases import Release
from vllm_agent_hint.sessions.session import Session


class Edits:
    """Runs edits on recorded contexts.

    Args:
        books: Shared with the rooms beside this one.
        lifetimes: Starts and ends sessions.
    """

    def __init__(self, books: Books, lifetimes: Lifetimes) -> None:
        self._books = books
        self._lifetimes = lifetimes
        self.num_open = 0
        """Calls of ``start`` that are not done."""

    def start(
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
        self.num_open += 1
        run = EditRun(
            [edit.type for edit in edits], self._count_results, partial(self._edits_done, on_done)
        )
        for k, edit in enumerate(edits):
            self._start_edit(key, edit, now, partial(run.settle, k))
        if len(self._books.releases):
            self._books.releases.work(self._books.settings.release_slice)
        return run

    def _edits_done(
        self, on_done: Callable[[list[EditResult]], None], results: list[EditResult]
    ) -> None:
        self.num_open -= 1
        on_done(results)

    def reject(self, edits: Sequence[Edit], reason: str) -> list[EditResult]:
        """Account for edits that must not run, such as those of an aborted request."""
        results = [
            EditResult(type=edit.type, status=EditStatus.REJECTED, reason=reason) for edit in edits
        ]
        self._count_results(results)
        return results

    def _count_results(self, results: Iterable[EditResult]) -> None:
        for result in results:
            self._books.counters.edits[result.type.value, result.status.value] += 1

    def _start_edit(
        self, key: SessionKey, edit: Edit, now: float, done: Callable[[EditResult], None]
    ) -> None:
        session = self._books.sessions.get(key)
        remote = self._books.remote
        if edit.type is not EditType.EVICT:
            remote.transfer(key, edit, done)
            return
        if not edit.include_children:
            done = remote.evict(key, edit, done)
        elif session is None:
            # A prefetch may be about to bring the first that there is of it.
            remote.session_ended(key)
        if session is None:
            missing = EditStatus.MISSING
            done(EditResult(type=edit.type, status=missing, reason=NOTHING_RECORDED))
        elif edit.include_children:
            eviction = Eviction(self._books.layouts, edit, done)
            for member in list(family.tree(session)):
                self._books.standing.stay_away(member)
                self._evict(member, eviction, now)
                self._lifetimes.free(member)
                eviction.num_freed += 1
            eviction.close()
        else:
            eviction = Eviction(self._books.layouts, edit, done)
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
        session = self._books.sessions.get(key)
        if session is None:
            return "the session has ended"
        if session.live:
            return "a request of the session is alive"
        if edit.has_range:
            assert edit.end_token is not None
            for lineage in tuple(session.lineages):
                self._books.releases.finish_edit(lineage)
                self._books.ledger.release_range(lineage, edit.start_token, edit.end_token)
            done()
            return ""

        def over(_: EditResult) -> None:
            done()

        eviction = Eviction(self._books.layouts, edit, over)
        self._evict(session, eviction, now)
        eviction.close()
        return ""

    def _evict(self, session: Session, eviction: Eviction, now: float) -> None:
        eviction.had_expired |= bool(session.history)
        lineages, session.lineages = session.lineages, [Lineage(session, len(self._books.layouts))]
        for lineage in reversed(lineages):
            eviction.open()
            estate = self._books.heirs.estate_of(lineage, now)
            self._books.releases.let_go(
                lineage,
                placement=self._books.policy.evicted,
                estate=estate,
                on_slice=eviction.count,
                on_done=eviction.close,
            )
        self._books.history.forget_all(session)
        if not session.live:
            self._lifetimes.resume(session, now)

    def _evict_from(
        self, session: Session, from_token: int, eviction: Eviction, now: float
    ) -> None:
        """End the claims in a range, and those behind it, which can't be hit any more."""
        for lineage in list(session.lineages):
            self._books.releases.finish_edit(lineage)
            estate = self._books.heirs.estate_of(lineage, now)
            lineage.latest_written = max(lineage.latest_written, lineage.deadline)
            end_leases_at(lineage, from_token)
            eviction.open()
            release = Release(
                lineage,
                self._books.policy.evicted,
                partial(self._range_is_gone, lineage, eviction, now),
                estate=estate,
                on_slice=eviction.count,
            )
            # What has expired before the range goes along.
            expired = [t for t in (lineage.trim_to, lineage.interrupted_at) if t is not None]
            self._books.releases.add(release, from_token=min([from_token, *expired]))
        if not session.live:
            self._lifetimes.resume(session, now)

    def _range_is_gone(self, lineage: Lineage, eviction: Eviction, since: float) -> None:
        session = lineage.session
        if not len(lineage):
            lineage.base_tokens = 0
            if len(session.lineages) > 1 and lineage in session.lineages:
                was_leased = bool(lineage.leases)
                lineage.end_leases()
                session.lineages.remove(lineage)
                if was_leased:
                    self._lifetimes.lease_has_gone(session, since)
        if not session.num_records:
            self._books.standing.leave(session)
        eviction.close()
