"""Agents that fit into the cache, and one-shot traffic that flushes it while their tools run."""

import random
from typing import Final

from vllm_agent_hint.cli.bench.serve.scale import Scale
from vllm_agent_hint.cli.bench.serve.script import Actor, Piece, Script, Turn
from vllm_agent_hint.cli.demo.client import Traffic

FEWEST_AGENTS: Final = 3
TURNS: Final = 5
AGENTS_PART: Final = 0.6
"""Of the cache, all agents at their end: below the 0.8 that sessions may claim by default."""
SYSTEM_PART: Final = 1 / 6
FIRST_PART: Final = 0.8
"""Of the longest prompt, an agent's first: a large task that then grows slowly."""
REPLY_TOKENS: Final = 24
ONE_SHOT_PART: Final = 1 / 3
FLUSH: Final = 1.6
"""One-shot tokens that pass in a pause, by the room that the agents leave."""
BUSY: Final = 0.5
"""Part of the time that one-shot prefill takes: arms differ by what they compute, not by how
they queue."""
TTL_SECONDS: Final = 120.0


def mixed_script(scale: Scale, seed: str) -> Script:
    """The demo's load in the bench's sizes: agents in a closed loop, one-shots by a Poisson clock.

    The pause is as long as it takes the one-shots to flush what the agents leave free.
    """
    longest = scale.longest_prompt
    if scale.cache_tokens is not None:
        longest = min(longest, round(scale.cache_tokens * AGENTS_PART / FEWEST_AGENTS))
    system = round(longest * SYSTEM_PART)
    own = longest - system
    if scale.cache_tokens is None:
        agents = FEWEST_AGENTS
        cache = round((system + agents * (own + REPLY_TOKENS)) / AGENTS_PART)
    else:
        cache = scale.cache_tokens
        agents = max(FEWEST_AGENTS, int((cache * AGENTS_PART - system) / (own + REPLY_TOKENS)))
    held = system + agents * (own + REPLY_TOKENS)
    one_shot = round(longest * ONE_SHOT_PART)
    rate = BUSY * scale.prefill_rate / one_shot
    pause = FLUSH * max(cache - held, one_shot) / (rate * one_shot)
    first = round(longest * FIRST_PART) - system
    later = (longest - system - first) // (TURNS - 1) - REPLY_TOKENS
    dice = random.Random(f"{seed}/mixed")
    actors = [
        _agent(seed, number, pause * number / agents, (system, first, later), pause, dice)
        for number in range(agents)
    ]
    arrival = 0.0
    while (arrival := arrival + dice.expovariate(rate)) < pause * TURNS:
        name = f"one-shot-{len(actors) - agents}"
        piece = Piece(f"{seed}/{name}", round(one_shot * dice.uniform(0.5, 1.5)))
        turn = Turn((piece,), False, 0.0, REPLY_TOKENS, 0.0)
        actors.append(Actor(name, Traffic.ONE_SHOT, arrival, (turn,)))
    return Script(
        "mixed",
        tuple(actors),
        cache,
        0,
        f"{agents} agents of up to {longest:,} tokens, {held / cache:.0%} of the cache of "
        f"{cache:,} tokens; tools take {pause:.1f} s; {rate:.2f} one-shots a second of "
        f"{one_shot:,} tokens, which in a pause fill {FLUSH:.1f} x what the agents leave",
    )


def _agent(
    seed: str,
    number: int,
    starts_at: float,
    lengths: tuple[int, int, int],
    pause: float,
    dice: random.Random,
) -> Actor:
    system, first, later = lengths
    name = f"agent-{number}"
    opening = (Piece(f"{seed}/system", system), Piece(f"{seed}/{name}/0", first))
    turns = [Turn(opening, False, 0.0, REPLY_TOKENS, TTL_SECONDS)]
    turns += [
        Turn(
            (Piece(f"{seed}/{name}/{turn}", later),),
            keeps_context=True,
            gap_seconds=pause * dice.uniform(0.75, 1.25),
            reply_tokens=REPLY_TOKENS,
            ttl_seconds=TTL_SECONDS,
        )
        for turn in range(1, TURNS)
    ]
    return Actor(name, Traffic.AGENTS, starts_at, tuple(turns))
