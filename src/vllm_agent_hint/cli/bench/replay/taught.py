"""The reuse index taught beforehand: what its classes can bring, and what can be learnt of them."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from vllm_agent_hint.cli.bench.replay.arms import Arm, Taught
from vllm_agent_hint.cli.bench.replay.workload import Arrival, Traffic, Workload
from vllm_agent_hint.hookspecs import retention_policy
from vllm_agent_hint.sessions.conversations import Conversations
from vllm_agent_hint.sessions.policy import RestingTurn, RetentionPolicy, reuse_class
from vllm_agent_hint.sessions.reuse import (
    EDGES,
    NEVER,
    TurnClass,
    bin_of,
    index_at,
    reuse_index,
)
from vllm_agent_hint.settings import Settings


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
        for turn, gap in gaps_of(workload.arrivals, workload.block_size, arm):
            seen[reuse_class(turn)][NEVER if gap is None else bin_of(gap)] += 1
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


def taught_policy(workload: Workload, arm: Arm, settings: Settings) -> RetentionPolicy:
    """The policy of a server with these settings, as far as an arm has taught it.

    Taught by others, it begins with whatever can be learnt of such traffic from the sessions that
    the workload leaves out of its traces, and goes on to learn.

    Args:
        workload: That it is going to see.
        arm: What is known of each turn.
        settings: Of the server.
    """
    if arm.taught is Taught.BY_ITSELF:
        return HindsightPolicy(workload, arm)
    policy = retention_policy(settings)
    if arm.taught is Taught.BY_OTHERS:
        for turn, gap in gaps_of(workload.unplayed, workload.block_size, arm):
            # By then its blocks are ordinary again: a server does not learn that it came.
            is_lost = turn.conversation_turns and (gap or 0.0) >= settings.associated_seconds
            policy.observe(policy.class_of(turn), None if is_lost else gap)
    return policy


def gaps_of(
    arrivals: Sequence[Arrival], block_size: int, arm: Arm
) -> Iterator[tuple[RestingTurn, float | None]]:
    """Each turn after which a session or a conversation rests, and the seconds until it is back.

    Args:
        arrivals: By time.
        block_size: Tokens in a block.
        arm: What is known of each turn.

    Yields:
        The gap is None if nothing comes back.
    """
    conversations = Conversations(block_size, len(arrivals) + 1)
    resting: dict[Hashable, tuple[RestingTurn, float]] = {}
    for arrival in arrivals:
        request = arrival.request
        if arrival.session.traffic is Traffic.AGENTS:
            key: Hashable = arrival.session.name
            facts = arm.facts(arrival)
            turn = RestingTurn(
                ended="unknown" if facts is None else facts.ended,
                tool=facts.tools[-1] if facts is not None and facts.tools else "",
                output_tokens=request.output_tokens,
            )
        else:
            hashes = request.blocks.tolist()
            known_by, conversation = conversations.find(hashes) or (None, None)
            if conversation is None or not conversation.is_continued_by(hashes):
                conversations.begin(hashes, arrival.at)
                continue
            conversation, last_gap = conversations.go_on(known_by, hashes, arrival.at)
            key = conversation.key
            turn = RestingTurn(
                last_gap=last_gap,
                output_tokens=request.output_tokens,
                conversation_turns=conversation.num_turns,
                prompt_tokens=len(hashes) * block_size,
            )
        if key in resting:
            before, ended_at = resting[key]
            gap = max(0.0, arrival.at - ended_at)
            yield before, gap
            turn = replace(turn, last_gap=gap)
        resting[key] = turn, arrival.at + (request.service_seconds or 0.0)
    for turn, _ in resting.values():
        yield turn, None
