"""The reuse index with nothing left to learn: what its classes can know at most."""

from collections import defaultdict
from collections.abc import Hashable, Iterator

from vllm_agent_hint.cli.bench.replay.arms import Arm
from vllm_agent_hint.cli.bench.replay.workload import Arrival, Traffic, Workload
from vllm_agent_hint.sessions.conversations import ConversationKey, Conversations
from vllm_agent_hint.sessions.policy import RestingTurn, RetentionPolicy, reuse_class
from vllm_agent_hint.sessions.reuse import (
    EDGES,
    NEVER,
    TurnClass,
    bin_of,
    index_at,
    reuse_index,
)


class HindsightPolicy(RetentionPolicy):
    """Knows how the gaps of each class are distributed in the workload that it is going to see.

    Of each class it takes the gaps as they will be: it leans on nothing and forgets nothing, and
    of a class with one turn it knows that very gap. So it knows more than anybody could learn of
    the classes, and is a bound for whoever orders by them; not for one who knows more.

    Args:
        workload: The very one.
        arm: What is known of each turn.
    """

    def __init__(self, workload: Workload, arm: Arm) -> None:
        super().__init__()
        seen: defaultdict[TurnClass, list[int]] = defaultdict(lambda: [0] * len(EDGES))
        for session in workload.sessions:
            if session.traffic is not Traffic.AGENTS:
                continue
            last_gap = None
            for turn, request in enumerate(session.requests):
                arrival = Arrival(session.starts_at + request.at, session, turn)
                facts = arm.facts(arrival)
                turns = self.class_of(
                    RestingTurn(
                        ended="unknown" if facts is None else facts.ended,
                        tool=facts.tools[-1] if facts is not None and facts.tools else "",
                        last_gap=last_gap,
                        output_tokens=request.output_tokens,
                    )
                )
                gap = None
                if not arrival.is_last:
                    ended_at = request.at + (request.service_seconds or 0.0)
                    gap = max(0.0, session.requests[turn + 1].at - ended_at)
                seen[turns][NEVER if gap is None else bin_of(gap)] += 1
                last_gap = gap
        for turns, gap in _conversation_gaps(workload):
            seen[turns][NEVER if gap is None else bin_of(gap)] += 1
        self._indices = {
            turns: reuse_index([count / sum(counts) for count in counts])
            for turns, counts in seen.items()
        }

    def class_of(self, turn: RestingTurn) -> TurnClass:
        """See ``RetentionPolicy``. The classes of ``ReusePolicy``."""
        return reuse_class(turn)

    def worth(self, turns: Hashable, resting: float) -> float:
        """See ``RetentionPolicy``. 0 for a class that stands until more is known of its turn."""
        index = self._indices.get(turns)  # type: ignore[call-overload]
        return 0.0 if index is None else index_at(index, resting)


def _conversation_gaps(workload: Workload) -> Iterator[tuple[TurnClass, float | None]]:
    """The class of each turn that a conversation is recognised by, and the gap behind it."""
    size = workload.block_size
    conversations = Conversations(size, len(workload.arrivals) + 1)
    resting: dict[ConversationKey, TurnClass] = {}
    for arrival in workload.arrivals:
        if arrival.session.traffic is Traffic.AGENTS:
            continue
        hashes = arrival.request.blocks.tolist()
        known_by, conversation = conversations.find(hashes) or (None, None)
        if conversation is None or not conversation.is_continued_by(hashes):
            conversations.begin(hashes, arrival.at)
        else:
            conversation, gap = conversations.go_on(known_by, hashes, arrival.at)
            before = resting.get(conversation.key)
            if before is not None:
                yield before, gap
            resting[conversation.key] = reuse_class(
                RestingTurn(
                    last_gap=gap,
                    output_tokens=arrival.request.output_tokens,
                    conversation_turns=conversation.num_turns,
                    prompt_tokens=len(hashes) * size,
                )
            )
    for turns in resting.values():
        yield turns, None
