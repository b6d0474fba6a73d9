"""Sessions that have not run here: what their own prompts, or other servers, say of them."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_agent_hint.pooling.announcements import Announcements
from vllm_agent_hint.pooling.books import Books
from vllm_agent_hint.pooling.capability import Content
from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.pooling.keep_alive import KeepAlive
from vllm_agent_hint.pooling.manifest import IncompatibleError, Page
from vllm_agent_hint.pooling.reasons import NOTHING_RECORDED
from vllm_agent_hint.pooling.tracker import Origin
from vllm_agent_hint.sessions.intent import SessionKey

_STORE_HAS_NONE_OF_IT = "the store has nothing of this prompt"


class Found(NamedTuple):
    """What a look-up has found of a context.

    Args:
        content: As much of it as is anywhere; all that could be served where the store can't tell
            without waiting.
        loadable: Tokens that the store could load; None where it can't tell.
    """

    content: Content
    loadable: int | None


class Hearsay:
    """Registers sessions by what is said of them.

    Args:
        books: Shared with the rooms beside this one.
        announcements: Tells the store that what it has is wanted.
        keep_alive: Keeps it there.
    """

    def __init__(self, books: Books, announcements: Announcements, keep_alive: KeepAlive) -> None:
        self._books = books
        self._announcements = announcements
        self._keep_alive = keep_alive

    def has_run(self, session: SessionKey) -> bool:
        """Whether a request of a session has run here; then nothing that is said of it counts."""
        found = self._books.tracker.get(session)
        return found is not None and found.origin is Origin.RUN

    def knows(self, session: SessionKey) -> bool:
        """Whether a session has registered anything, here or with another server."""
        return session in self._books.tracker or self._books.store.has_page(session)

    def look_up(self, content: Content) -> Found:
        """As much of a context as is anywhere. O(hashes): some microseconds for each."""
        loadable = self._books.store.loadable_tokens(content)
        reach = content.num_servable
        if loadable is not None:
            reach = max(loadable, self._books.local.prefix_tokens(content))
        return Found(content.up_to(reach), loadable)

    def learn(self, session: SessionKey, own: Sequence[Found]) -> str:
        """Take over what is said of a session that has not run here.

        Its own prompts say best what it will ask for; how long it is kept stands in a manifest
        only.

        Args:
            session: Which.
            own: What was found of the contexts that its prompts would leave.

        Returns:
            Why there is nothing to take over; empty if there was.
        """
        page, reason = self._page_of(session)
        ttl = 0.0 if page is None else page.ttl
        if own:
            contents = [each.content for each in own if each.content.hashes]
            origin, reason = Origin.PROMPT, _STORE_HAS_NONE_OF_IT
        else:
            contents = [] if page is None else list(page.contents)
            origin = Origin.MANIFEST
        if not contents:
            return reason
        self._take_over(session, contents, ttl, origin)
        return ""

    def forget_useless(self, session: SessionKey, version: int, *, has_come: bool) -> None:
        """A prefetch of a session that has not run here is over.

        If nothing has come, or it could not be adopted, nobody else would forget what was said of
        it: a session of which nothing has ever been here never ends here.

        Args:
            session: Which.
            version: Of its registration then; what has been said since stays, and what is kept,
                which ``KeepAlive`` forgets once its time is over.
            has_come: Whether something of it is here now.
        """
        found = self._books.tracker.get(session)
        if found is None or found.version != version or found.origin is Origin.RUN:
            return
        if has_come and self._books.local.has_session(session):
            return
        if found.keep_until <= self._books.now:
            self._announcements.let_go(self._books.tracker.forget(session))

    def _page_of(self, session: SessionKey) -> tuple[Page | None, str]:
        """What another server has noted of a session, or why there is nothing."""
        try:
            page = self._books.store.read_page(session)
        except IncompatibleError as error:
            return None, f"incompatible: {error}"
        return page, NOTHING_RECORDED

    def _take_over(
        self, session: SessionKey, contents: Sequence[Content], ttl: float, origin: Origin
    ) -> None:
        """Register it in place of earlier hearsay."""
        tracker, keep_until = self._books.tracker, self._books.now + ttl
        for content in contents:
            change = tracker.register(session, content, keep_until, at_most=len(contents))
            self._announcements.let_go(change.orphans)
        tracker.set_origin(session, origin)
        self._announcements.claim(session, Claim.PROTECTED if ttl else Claim.ORDINARY)
        if ttl:
            self._keep_alive.begin()
