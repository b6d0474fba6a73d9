"""Second turns: how long they take on each arm, and what a prefetch is worth to them."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console

from vllm_agent_hint.cli.bench.pooling.arms import Arm, tokens

CONTEXT_TOKENS: Final = 6_000
HYBRID_CONTEXT_TOKENS: Final = 2_500
PAUSE_SECONDS: Final = 1.5
"""Between the end of the flood and the resume: a tool runs."""


@dataclass(slots=True)
class Resumes:
    """What the second turns of all agents have shown, by arm.

    Args:
        ttft: Seconds.
        cached: Tokens.
        said: The answers.
        hits: Seconds to the first token of a turn whose context had not left the cache.
        in_time: Whether the prefetch was over before the resume.
    """

    ttft: dict[str, list[float]] = field(default_factory=dict)
    cached: dict[str, list[int]] = field(default_factory=dict)
    said: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    hits: list[float] = field(default_factory=list)
    in_time: list[bool] = field(default_factory=list)

    def median(self, arm: str) -> float:
        return statistics.median(self.ttft[arm])

    def ratios(self, of: str, to: str) -> list[float]:
        """Agent by agent, since both arms were asked the same right after each other."""
        return [a / b for a, b in zip(self.ttft[of], self.ttft[to], strict=True)]

    @property
    def are_told_the_same(self) -> bool:
        """Whether the greedy answers of all arms are equal, token for token."""
        return all(len({*answers}) == 1 for answers in zip(*self.said.values(), strict=True))


@dataclass(frozen=True, slots=True)
class Restored:
    """What one prefetch of a hybrid model's session was worth.

    Args:
        tokens: That it had brought, none of which was in the cache before.
        hit: Of those, the ones that the resume took from the cache.
    """

    tokens: int
    hit: int


def measure_resumes(arms: Sequence[Arm], agents: int, console: Console) -> Resumes:
    """Each agent's second turn on each arm, the arms in turn; the first agent warms up."""
    found = Resumes()
    for agent in range(agents + 1):
        for k in range(len(arms)):
            arm = arms[(agent + k) % len(arms)]
            _one_agent(arm, agent, found if agent else Resumes())
        if agent:
            last = {name: f"{values[-1]:.3f}" for name, values in found.ttft.items()}
            console.print(f"agent {agent}: TTFT {last}")
    return found


def _one_agent(arm: Arm, agent: int, found: Resumes) -> None:
    session = f"agent-{agent}"
    context = tokens(CONTEXT_TOKENS, agent + 1)
    first = arm.ask(context, session, max_tokens=8)
    if arm.parks:
        # By the session itself: what a stranger has used of it outlives it for a while.
        found.hits.append(arm.ask([*context, *tokens(40, 7_000 + agent)], session).ttft)
        arm.edit(session, "offload", wait_seconds=30)
    arm.flood(agent)
    if arm.parks:
        operation = arm.edit(session, "prefetch").operation_id
        time.sleep(PAUSE_SECONDS)
        found.in_time.append(arm.status_of(operation) == "applied")
    grown = [*context, *first.token_ids, *tokens(100, 5_000 + agent)]
    second = arm.ask(grown, session, max_tokens=8)
    if arm.parks:
        arm.free(session)
    found.ttft.setdefault(arm.name, []).append(second.ttft)
    found.cached.setdefault(arm.name, []).append(second.cached_tokens)
    found.said.setdefault(arm.name, []).append(second.token_ids)


def measure_hybrid(arm: Arm, agents: int, console: Console) -> list[Restored]:
    """Sessions of a hybrid model: attention without the state at its end serves nothing."""
    found: list[Restored] = []
    for agent in range(agents):
        session = f"hybrid-{agent}"
        context = tokens(HYBRID_CONTEXT_TOKENS, 40_000 + agent)
        first = arm.ask(context, session, max_tokens=40)
        arm.edit(session, "offload", wait_seconds=30)
        arm.flood(100 + agent)
        before = arm.local_tokens(session)
        brought = arm.edit(session, "prefetch", wait_seconds=30).tokens - before
        on_demand = _loaded_on_demand(arm)
        grown = [*context, *first.token_ids, *tokens(100, 45_000 + agent)]
        resumed = arm.ask(grown, session, max_tokens=8)
        on_demand = _loaded_on_demand(arm) - on_demand
        arm.free(session)
        hit = max(0, min(brought, resumed.cached_tokens - before - on_demand))
        found.append(Restored(brought, hit))
        console.print(f"hybrid {agent}: {brought} tokens restored, {hit} of them hit")
    return found


def _loaded_on_demand(arm: Arm) -> int:
    """Tokens that the connector has brought for requests that asked for them themselves."""
    return int(arm.total("vllm:external_prefix_cache_hits_total"))
