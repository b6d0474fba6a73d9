"""Who is said to want what a store holds, and when that is over."""

from collections.abc import Iterable, Sequence

import pytest

from vllm_agent_hint.pooling import keep_alive
from vllm_agent_hint.pooling.announcements import Announcements
from vllm_agent_hint.pooling.books import Books
from vllm_agent_hint.pooling.capability import Content, Operation, PoolingCounters, Span
from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.pooling.evictions import Evictions
from vllm_agent_hint.pooling.keep_alive import KeepAlive
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.settings import Settings

TTL = 300.0
BLOCKS = 10


class ClaimingStore:
    """Remembers what it was told."""

    name = "a store"
    needs_tokens = False
    manifest = None

    def __init__(self) -> None:
        self.claims: dict[bytes, Claim] = {}
        self.num_told = 0

    def why_not(self, operation: Operation) -> str:
        return ""

    def claim(self, hashes: Iterable[bytes], claim: Claim) -> None:
        for each in hashes:
            self.claims[each] = claim
            self.num_told += 1

    def refresh(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        return len(list(hashes)), 0

    def delete(self, hashes: Iterable[bytes], session: SessionKey | None = None) -> int:
        return sum(self.claims.pop(each, None) is not None for each in hashes)

    def start_save(self, save_id: str, content: Content, blocks: Sequence[Sequence[int]]) -> None:
        raise NotImplementedError

    def is_saving(self, save_id: str) -> bool:
        return False

    def loadable_tokens(self, content: Content) -> int | None:
        return 0

    def protected(self) -> list[bytes]:
        return [each for each, claim in self.claims.items() if claim is Claim.PROTECTED]


class NoCache:
    """A GPU cache that has every session and nothing of them."""

    def blocks_of(self, content: Content, span: Span) -> list[list[int]]:
        return []

    def prefix_tokens(self, content: Content) -> int:
        return 0

    def has_session(self, session: SessionKey) -> bool:
        return True

    def release(self, session: SessionKey, span: Span, done: object) -> str:
        return ""


class Rooms:
    """The rooms that speak of claims, over one store."""

    def __init__(self) -> None:
        self.store = ClaimingStore()
        self.books = Books(self.store, NoCache(), Settings(), PoolingCounters(), 0.0)
        self.announcements = Announcements(self.books)
        self.keep_alive = KeepAlive(self.books, self.announcements)
        self.evictions = Evictions(self.books, self.announcements)

    def keep(self, name: str) -> SessionKey:
        """A session that has something to be kept for ``TTL`` seconds."""
        session = SessionKey("", None, name)
        content = Content([f"{name}{k}".encode() for k in range(BLOCKS)], 16)
        self.books.tracker.register(session, content, TTL, at_most=1)
        self.announcements.claim(session, Claim.PROTECTED)
        self.keep_alive.begin()
        return session

    def rounds_after(self, now: float) -> list[int]:
        """Let keep-alive go on to the end of a round. How many claims each slice has told."""
        self.books.now = now
        told: list[int] = []
        while self.keep_alive.next_at <= now:
            before = self.store.num_told
            self.keep_alive.run(now)
            told.append(self.store.num_told - before)
            now += keep_alive.SLICE_PAUSE_SECONDS
        return told


def test_what_a_range_evict_leaves_is_protected_for_as_long_as_before_and_no_longer() -> None:
    rooms = Rooms()
    session = rooms.keep("a")
    rooms.evictions.start(session, Span(4 * 16, 8 * 16))
    assert len(rooms.store.protected()) == 4
    rooms.rounds_after(TTL / 2)
    assert len(rooms.store.protected()) == 4
    rooms.rounds_after(TTL + 1.0)
    assert not rooms.store.protected()


@pytest.mark.parametrize("per_slice", [1, BLOCKS, 3 * BLOCKS + 1])
def test_sessions_whose_time_ends_together_are_let_go_a_slice_at_a_time(
    per_slice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_alive, "SLICE_HASHES", per_slice)
    rooms = Rooms()
    for k in range(20):
        rooms.keep(f"session {k}, ")
    told = rooms.rounds_after(TTL + 1.0)
    assert not rooms.store.protected()
    assert sum(told) == 20 * BLOCKS
    assert max(told) == max(1, per_slice // BLOCKS) * BLOCKS, "one session, or what a slice holds"
