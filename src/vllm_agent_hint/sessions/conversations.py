"""Which requests without a hint go on with one another, as far as their prompts tell.

A chat sends its whole conversation every turn, like an agent, but says nothing. Its next prompt
begins with the last one, so it is known by a hash that the last one had near its end. Without
that, hints would harm it: what sessions record goes after ordinary blocks, which are reused the
sooner, those of a conversation with ten turns as soon as those of a prompt that nobody repeats.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

STRIDE_TOKENS: Final = 512
"""A prompt is known by the last of its blocks that ends at a multiple of so many tokens. What
comes behind may be the template's, for one turn only."""

MIN_TOKENS: Final = 1024
"""A shorter prompt is not worth keeping, and may be little more than a system prompt."""

MAX_GROWTH: Final = 4
"""A prompt so many times as long as the last one goes on with a prefix that many have."""


class ConversationKey(NamedTuple):
    """Names the session of a conversation; no client can."""

    number: int


class Conversation:
    """Requests that go on with one another.

    Args:
        key: Its session's.
        tenant: Whose.
        num_hashes: Complete blocks of its last prompt.
        came_at: Monotonic seconds at which that came.
    """

    __slots__ = ("came_at", "is_shared", "key", "num_hashes", "num_turns", "tenant")

    def __init__(self, key: ConversationKey, tenant: str, num_hashes: int, came_at: float) -> None:
        self.key = key
        self.tenant = tenant
        self.num_turns = 1
        self.num_hashes = num_hashes
        self.came_at = came_at
        self.is_shared = False
        """Whether two went on from it at once: then it is a prefix that many have."""

    def is_continued_by(self, hashes: Sequence[Hashable]) -> bool:
        """Whether a prompt that begins with what it is known by is a turn more of it.

        One that is no longer is the last one again: a retry, or its sibling of ``n > 1``.
        """
        if self.is_shared:
            return False
        return self.num_hashes < len(hashes) <= MAX_GROWTH * self.num_hashes


class Conversations:
    """Remembers by which hash a conversation will be known again.

    Args:
        block_size: Tokens in a block of the hashes.
        max_conversations: How many to remember; beyond that the one that came longest ago goes.
    """

    def __init__(self, block_size: int, max_conversations: int) -> None:
        self._stride = -(-STRIDE_TOKENS // block_size)
        self._min = self._stride * (MIN_TOKENS // STRIDE_TOKENS)
        self._max = max_conversations
        self._by_hash: OrderedDict[Hashable, Conversation] = OrderedDict()
        self._number = 0

    def __len__(self) -> int:
        return len(self._by_hash)

    def clear(self) -> None:
        """Nobody is known any more."""
        self._by_hash.clear()

    def find(self, hashes: Sequence[Hashable]) -> tuple[Hashable, Conversation] | None:
        """What a prompt could go on with: the longest that it begins with.

        O(prompt tokens / 512), 50 ns each.
        """
        stride = self._stride
        for end in range(len(hashes) // stride * stride, self._min - 1, -stride):
            known = self._by_hash.get(hashes[end - 1])
            if known is not None:
                return hashes[end - 1], known
        return None

    def begin(
        self, hashes: Sequence[Hashable], now: float, tenant: str = ""
    ) -> Conversation | None:
        """A prompt goes on with nothing, and may be the first of a conversation.

        Args:
            hashes: Of its complete blocks.
            now: Monotonic seconds.
            tenant: Whose.

        Returns:
            The conversation that is forgotten for it, if there is not room for all.
        """
        last = self._last(hashes)
        if last is None or last in self._by_hash:
            return None
        self._number += 1
        self._by_hash[last] = Conversation(ConversationKey(self._number), tenant, len(hashes), now)
        if len(self._by_hash) <= self._max:
            return None
        return self._by_hash.popitem(last=False)[1]

    def go_on(
        self, known_by: Hashable, hashes: Sequence[Hashable], now: float
    ) -> tuple[Conversation, float]:
        """A prompt goes on with a conversation, which will be known by it from now on.

        Args:
            known_by: From ``find``.
            hashes: Of the prompt's complete blocks.
            now: Monotonic seconds.

        Returns:
            The conversation, and seconds since its last prompt came.
        """
        conversation = self._by_hash.pop(known_by)
        last = self._last(hashes)
        assert last is not None, "it begins with what the last one was known by"
        gap = now - conversation.came_at
        conversation.num_turns += 1
        conversation.num_hashes = len(hashes)
        conversation.came_at = now
        self._by_hash[last] = conversation
        self._by_hash.move_to_end(last)
        return conversation, gap

    def _last(self, hashes: Sequence[Hashable]) -> Hashable | None:
        end = len(hashes) // self._stride * self._stride
        return hashes[end - 1] if end >= self._min else None
