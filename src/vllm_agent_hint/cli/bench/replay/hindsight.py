"""The reuse index with nothing left to learn: what its classes can know at most."""

from collections.abc import Hashable

from vllm_agent_hint.cli.bench.replay.arms import Arm
from vllm_agent_hint.cli.bench.replay.workload import Arrival, Traffic, Workload
from vllm_agent_hint.sessions.policy import RestingTurn, ReusePolicy


class HindsightPolicy(ReusePolicy):
    """Knows how the gaps of each class are distributed in the workload that it is going to see.

    A bound for everybody who knows the same classes and orders by the reuse index; not for one
    who knows more.

    Args:
        workload: The very one.
        arm: What is known of each turn.
    """

    def __init__(self, workload: Workload, arm: Arm) -> None:
        super().__init__()
        for session in workload.sessions:
            if session.traffic is not Traffic.AGENTS:
                continue
            last_gap = None
            for turn, request in enumerate(session.requests):
                arrival = Arrival(session.starts_at + request.at, session, turn)
                facts = arm.facts(arrival)
                seen = RestingTurn(
                    ended="unknown" if facts is None else facts.ended,
                    tool=facts.tools[-1] if facts is not None and facts.tools else "",
                    last_gap=last_gap,
                    output_tokens=request.output_tokens,
                )
                gap = None if arrival.is_last else session.requests[turn + 1].at - request.at
                super().observe(self.class_of(seen), gap)
                last_gap = gap

    def observe(self, turns: Hashable, gap: float | None) -> None:
        """See ``RetentionPolicy``. It knows all that there is to know."""
