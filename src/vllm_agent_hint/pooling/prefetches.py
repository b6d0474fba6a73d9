"""Prefetch: a session's contexts are brought to where its next request finds them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_agent_hint.hints import EditStatus
from vllm_agent_hint.pooling.books import Books
from vllm_agent_hint.pooling.capability import OperationHandle, Outcome, Span
from vllm_agent_hint.pooling.hearsay import Found, Hearsay
from vllm_agent_hint.pooling.own_contents import AskOwnContents
from vllm_agent_hint.pooling.reasons import NOTHING_IN_RANGE, STORE_LOST_IT
from vllm_agent_hint.pooling.store import Loads, Wish
from vllm_agent_hint.pooling.tracker import Origin, Registration
from vllm_agent_hint.sessions.intent import SessionKey

_WORST_FIRST: Final = (
    EditStatus.UNSUPPORTED,
    EditStatus.FAILED,
    EditStatus.REJECTED,
    EditStatus.MISSING,
    EditStatus.PARTIAL,
    EditStatus.APPLIED,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prefetch that somebody wants.

    Args:
        session: Whose contexts.
        span: What of them.
        at: Monotonic seconds.
        is_guess: Nobody has asked for it yet.
    """

    session: SessionKey
    span: Span
    at: float
    is_guess: bool


class Prefetches:
    """Makes wishes of prefetches.

    Args:
        books: Shared with the rooms beside this one.
        hearsay: Knows of sessions that have not run here.
        loads: Fulfils wishes.
    """

    def __init__(self, books: Books, hearsay: Hearsay, loads: Loads) -> None:
        self._books = books
        self._hearsay = hearsay
        self._loads = loads
        self.num_asking = 0
        """Prefetches that wait for the prompts of their sessions."""

    def start(self, asked: Asked, ask_own: AskOwnContents) -> OperationHandle:
        """See ``SessionAwarePoolingManager.prefetch``. Its patience begins here."""
        give_up_at = self._books.now + self._books.settings.prefetch_patience_seconds
        if self._hearsay.has_run(asked.session):
            return self._load(asked, (), give_up_at)
        own: list[Found] = []
        own_known, whole = (
            ask_own(lambda c: own.append(self._hearsay.look_up(c))),
            OperationHandle(),
        )
        self.num_asking += 1

        def are_known(outcome: Outcome) -> None:
            self.num_asking -= 1
            if outcome.status is EditStatus.FAILED:
                own.clear()
            elif outcome.status is not EditStatus.APPLIED:
                whole.finish(outcome)
                return
            self._load(asked, own, give_up_at).when_done(whole.finish)

        own_known.when_done(are_known)
        return whole

    def _load(self, asked: Asked, own: Sequence[Found], give_up_at: float) -> OperationHandle:
        session, reason = asked.session, ""
        # A request of it may have run while its prompts were being looked at.
        if not self._hearsay.has_run(session):
            reason = self._hearsay.learn(session, own)
        found = self._books.tracker.get(session)
        if found is None or (own and reason):
            return OperationHandle.ended(Outcome(EditStatus.MISSING, reason=reason))
        wishes = self._wishes(asked, found, own, give_up_at)
        whole, version = OperationHandle(), found.version
        whole.when_done(
            lambda outcome: self._hearsay.forget_useless(
                session, version, has_come=outcome.tokens > 0
            )
        )
        if not wishes:
            whole.finish(Outcome(EditStatus.MISSING, reason=NOTHING_IN_RANGE))
        for wish in wishes:
            wish.handle.when_done(lambda _: _finish_with_all(whole, wishes))
        for wish in wishes:
            if not wish.handle.is_done:
                self._loads.ask(wish)
        return whole

    def _wishes(
        self, asked: Asked, found: Registration, own: Sequence[Found], give_up_at: float
    ) -> list[Wish]:
        """The latest context first: it is the likeliest to be asked for."""
        looked_up = {each.content: each for each in own}
        now = self._books.now
        wishes: list[Wish] = []
        for content in reversed(found.contents):
            whole = content.up_to(asked.span.end_token)
            if whole.num_tokens <= asked.span.start_token:
                continue
            part, loadable = looked_up.get(whole) or self._hearsay.look_up(whole)
            is_guessed = found.origin is Origin.PROMPT and loadable is None
            wish = Wish(
                session=asked.session,
                content=part,
                wanted_tokens=0 if is_guessed else whole.num_servable,
                ttl=max(0.0, found.keep_until - now),
                handle=OperationHandle(),
                wanted_at=asked.at,
                give_up_at=give_up_at,
                is_guess=asked.is_guess,
            )
            if not part.hashes:
                wish.handle.finish(Outcome(EditStatus.MISSING, reason=STORE_LOST_IT))
            wishes.append(wish)
        return wishes


def _finish_with_all(whole: OperationHandle, wishes: Iterable[Wish]) -> None:
    """Once every part is over: the sum, and as status the one that all share, or ``partial``."""
    outcomes = [wish.handle.outcome for wish in wishes]
    done = [outcome for outcome in outcomes if outcome is not None]
    if len(done) < len(outcomes):
        return
    tokens, blocks = sum(o.tokens for o in done), sum(o.blocks for o in done)
    worst = min((o.status for o in done), key=_WORST_FIRST.index)
    status = worst
    if len({o.status for o in done}) > 1 and tokens:
        status = EditStatus.PARTIAL
    reasons = dict.fromkeys(o.reason for o in done if o.reason)
    whole.finish(
        Outcome(status, tokens, blocks, "; ".join(reasons), any(o.has_back_pressure for o in done))
    )
