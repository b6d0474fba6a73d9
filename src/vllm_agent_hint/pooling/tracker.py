"""Which session has registered which content, and which content is whose alone."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from vllm_agent_hint.pooling.capability import Content
from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.sessions.intent import SessionKey


class Origin(Enum):
    """From where the contexts of a session are known."""

    RUN = auto()
    """Requests of it have run here."""
    MANIFEST = auto()
    """Another server has noted them."""
    PROMPT = auto()
    """Its client has sent the prompt with which it will be back; what the store has of that may
    have been saved for somebody else."""


@dataclass(slots=True)
class Registration:
    """The contexts of one session that a store may hold.

    Args:
        contents: Latest last; of each prompt that the session runs side by side.
        keep_until: Monotonic seconds until which they are kept alive.
        version: Grows with each turn.
        claim: What the store was told of them.
        origin: From where they are known.
    """

    contents: list[Content]
    keep_until: float = 0.0
    version: int = 0
    claim: Claim = Claim.ORDINARY
    origin: Origin = Origin.RUN

    @property
    def latest(self) -> Content:
        return self.contents[-1]


class Change(NamedTuple):
    """What a registration has changed.

    Args:
        fresh: Hashes that the session had not registered right before.
        orphans: Hashes that nobody has registered any more.
    """

    fresh: Sequence[bytes]
    orphans: list[bytes]


class SessionKeyTracker:
    """Contents by session, and how many contents hold each hash.

    Bounded by hashes, counted once per content: above the bound the session that was registered
    longest ago is dropped. All methods are O(hashes that they name).

    Args:
        max_hashes: The bound.
    """

    def __init__(self, max_hashes: int) -> None:
        self._max_hashes = max_hashes
        self._sessions: dict[SessionKey, Registration] = {}
        self._owners: Counter[bytes] = Counter()
        self._size = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: SessionKey) -> bool:
        return session in self._sessions

    def __iter__(self) -> Iterator[SessionKey]:
        return iter(self._sessions)

    @property
    def num_tracked(self) -> int:
        """Distinct hashes."""
        return len(self._owners)

    @property
    def num_shared(self) -> int:
        """Hashes beyond the first owner of each, as a number of owners."""
        return self._size - len(self._owners)

    def get(self, session: SessionKey) -> Registration | None:
        return self._sessions.get(session)

    def register(
        self, session: SessionKey, content: Content, keep_until: float, *, at_most: int
    ) -> Change:
        """Note a session's latest context, in place of those that it goes on with.

        A context goes on with an earlier one if it begins with at least half of it; what it has
        not in common with that is no longer the session's. O(what is not in common).

        Args:
            session: Whose.
            content: What a request has left.
            keep_until: Monotonic seconds.
            at_most: Contexts that the session runs side by side; the oldest give way.
        """
        found = self._sessions.pop(session, None) or Registration([])
        self._sessions[session] = found
        kept = [c for c in found.contents if not _goes_on_with(content, c)]
        replaced = [c for c in found.contents if _goes_on_with(content, c)]
        common = 0
        tails: list[Sequence[bytes]] = []
        if replaced:
            # One of them is taken over; the others end.
            common = _count_in_common(replaced[-1], content)
            tails.append(replaced[-1].hashes[common:])
            tails += [c.hashes for c in replaced[:-1]]
        kept.append(content)
        tails += [c.hashes for c in kept[: -max(1, at_most)]]
        found.contents = kept[-max(1, at_most) :]
        found.keep_until = max(found.keep_until, keep_until)
        found.version += 1
        found.origin = Origin.RUN
        fresh = content.hashes[common:]
        self._owners.update(fresh)
        self._size += len(fresh)
        orphans = self._drop(tails)
        while self._size > self._max_hashes and len(self._sessions) > 1:
            orphans += self.forget(next(iter(self._sessions)))
        return Change(fresh, orphans)

    def set_origin(self, session: SessionKey, origin: Origin) -> None:
        """Say that what was registered last is known from hearsay."""
        self._sessions[session].origin = origin

    def forget(self, session: SessionKey) -> list[bytes]:
        """The session has given up its contexts.

        Returns:
            Hashes that nobody has registered any more.
        """
        found = self._sessions.pop(session, None)
        return [] if found is None else self._drop([c.hashes for c in found.contents])

    def owned_alone(self, session: SessionKey) -> list[bytes]:
        """Hashes that no other session has registered, first to last of each context."""
        found = self._sessions.get(session)
        if found is None:
            return []
        own = Counter(h for content in found.contents for h in content.hashes)
        return [h for h, count in own.items() if self._owners[h] == count]

    def _drop(self, dropped: Iterable[Sequence[bytes]]) -> list[bytes]:
        orphans: list[bytes] = []
        for hashes in dropped:
            self._size -= len(hashes)
            for h in hashes:
                left = self._owners[h] - 1
                if left:
                    self._owners[h] = left
                else:
                    del self._owners[h]
                    orphans.append(h)
        return orphans


def _count_in_common(one: Content, other: Content) -> int:
    """How many hashes two contexts begin with alike. O(log hashes)."""
    low, high = 0, min(len(one.hashes), len(other.hashes))
    while low < high:
        middle = (low + high) // 2
        if one.hashes[middle] == other.hashes[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _goes_on_with(content: Content, earlier: Content) -> bool:
    """A hash stands for all before it, so one comparison in the middle decides."""
    half = max(0, -(-len(earlier.hashes) // 2) - 1)
    return not earlier.hashes or (
        half < len(content.hashes) and content.hashes[half] == earlier.hashes[half]
    )
