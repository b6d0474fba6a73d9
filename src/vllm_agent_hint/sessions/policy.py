"""What the operator may decide: who gives way first, and where released blocks go."""

from collections.abc import Hashable
from dataclasses import dataclass

from vllm_agent_hint.sessions.reuse import (
    ReuseEstimator,
    TurnClass,
    conversation_class,
    turn_class,
)
from vllm_agent_hint.settings import GiveWay, Placement, Settings


@dataclass(frozen=True, slots=True)
class RestingTurn:
    """The turn after which a session rests, as far as anybody knows it.

    Args:
        tenant: Whose session it is.
        ended: How the turn ended; see ``TurnFacts``.
        tool: The tool that it called last; empty where nobody knows.
        last_gap: Seconds between the turn's arrival and the end of the one before; None for the
            session's first.
        output_tokens: That it made.
        ttl: Seconds of the longest lease on what it left; None without one.
        conversation_turns: Of a conversation that was recognised, this one included; 0 for a
            session.
        prompt_tokens: Of its complete blocks.
    """

    tenant: str = ""
    ended: str = "unknown"
    tool: str = ""
    last_gap: float | None = None
    output_tokens: int = 0
    ttl: float | None = None
    conversation_turns: int = 0
    prompt_tokens: int = 0


class RetentionPolicy:
    """Decides when there is not room for all. The default: one order, by time of rest (LRU).

    Resting sessions fall into classes. When blocks are short, the first and the last to rest of
    each class are asked what they are worth, and the one that is worth least gives way, from its
    tail. So an answer costs O(classes), not O(sessions), and is exact where the worth of a class
    falls with time, or rises and then falls.

    Sessions without a lease always give way before those with one. A policy belongs to one engine
    and may learn.

    Args:
        expired: Where a block whose lease has run out enters its new zone. At the back it waits
            for its turn behind what is there already; at the front it is reused before ordinary
            blocks that were used later.
        evicted: The same where its session was evicted or freed, and nobody else has use for it.
        superseded: The same where a later turn of its session does not repeat it.
        given_way: The same above the protected share.
    """

    def __init__(
        self,
        *,
        expired: Placement = Placement.BACK,
        evicted: Placement = Placement.FRONT,
        superseded: Placement = Placement.FRONT,
        given_way: Placement = Placement.FRONT,
    ) -> None:
        self.expired = expired
        self.evicted = evicted
        self.superseded = superseded
        self.given_way = given_way

    def class_of(self, turn: RestingTurn) -> Hashable:
        """The class of a session that begins to rest, or of which more has become known."""
        return None

    def worth(self, turns: Hashable, resting: float) -> float:
        """What the blocks of a session are worth.

        Args:
            turns: Its class.
            resting: Seconds for which it has rested.

        Returns:
            Comparable among all classes; the least gives way.
        """
        return -resting

    def observe(self, turns: Hashable, gap: float | None) -> None:
        """A session came back after a gap in seconds, or, with None, did not."""

    def ttl_for(self, turn: RestingTurn) -> float | None:
        """Seconds of a lease for a session that has asked for none, as its turn ends.

        None keeps it associated, which is what a session without a TTL asks for.
        """
        return None


class DeadlinePolicy(RetentionPolicy):
    """The lease that falls due soonest gives way first; among sessions without, LRU."""

    def class_of(self, turn: RestingTurn) -> Hashable:
        """See ``RetentionPolicy``."""
        return turn.ttl

    def worth(self, turns: Hashable, resting: float) -> float:
        """See ``RetentionPolicy``."""
        return (turns if isinstance(turns, (int, float)) else 0.0) - resting


class ReusePolicy(RetentionPolicy):
    """The session that is least likely to come back soon gives way first; see ``reuse``."""

    def __init__(self, **placements: Placement) -> None:
        super().__init__(**placements)
        self._estimator = ReuseEstimator()

    def class_of(self, turn: RestingTurn) -> Hashable:
        """See ``RetentionPolicy``."""
        turns = reuse_class(turn)
        self._estimator.note(turns)
        return turns

    def worth(self, turns: Hashable, resting: float) -> float:
        """See ``RetentionPolicy``."""
        return self._estimator.worth(turns, resting)  # type: ignore[arg-type]

    def observe(self, turns: Hashable, gap: float | None) -> None:
        """See ``RetentionPolicy``."""
        self._estimator.observe(turns, gap)  # type: ignore[arg-type]


def reuse_class(turn: RestingTurn) -> TurnClass:
    """The class of a turn by which ``ReusePolicy`` orders."""
    last_gap, output = turn.last_gap, turn.output_tokens
    if turn.conversation_turns:
        return conversation_class(
            turn.tenant, turn.conversation_turns, turn.prompt_tokens, last_gap, output
        )
    return turn_class(turn.tenant, turn.ended, turn.tool, last_gap, output)


def policy_of(settings: Settings) -> RetentionPolicy:
    """The policy that the settings name."""
    kinds: dict[GiveWay, type[RetentionPolicy]] = {
        GiveWay.REUSE: ReusePolicy,
        GiveWay.DEADLINE: DeadlinePolicy,
        GiveWay.LRU: RetentionPolicy,
    }
    return kinds[settings.give_way](
        expired=settings.expired_enters,
        superseded=settings.superseded_enters,
        given_way=settings.given_way_enters,
    )
