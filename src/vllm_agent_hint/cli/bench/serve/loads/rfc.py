"""The RFC's direct test: 20 sessions, five requests at a time, prompts of 10k to 30k tokens."""

import random
from typing import Final

from vllm_agent_hint.cli.bench.serve.scale import RFC_LONGEST_PROMPT, Scale
from vllm_agent_hint.cli.bench.serve.script import Actor, Piece, Script, Turn
from vllm_agent_hint.cli.demo.client import Traffic

SESSIONS: Final = 20
SLOTS: Final = 5
FEWEST_TURNS: Final = 4
MOST_TURNS: Final = 6
FIRST_PART: Final = 1 / 3
"""Of the longest prompt: 10k of 30k tokens."""
REPLY_TOKENS: Final = 24
CACHE_PART: Final = 0.5
"""Of all contexts at their end: the RFC names no cache size, only that it did not suffice."""
TTL_SECONDS: Final = 300.0


def rfc_script(scale: Scale, seed: str) -> Script:
    """All sessions are alive side by side and take turns at five places, first come first served.

    Each grows from a third of the longest prompt to all of it in four to six turns, so that some
    end before others. A turn repeats the whole conversation; nobody waits for a tool.
    """
    longest = scale.rfc_longest_prompt
    if scale.cache_tokens is not None:
        longest = min(longest, round(scale.cache_tokens / CACHE_PART / SESSIONS))
    dice = random.Random(f"{seed}/rfc")
    actors = []
    contexts = 0
    for number in range(SESSIONS):
        turns = dice.randint(FEWEST_TURNS, MOST_TURNS)
        first = round(longest * FIRST_PART * dice.uniform(0.9, 1.1))
        later = (longest - first) // (turns - 1) - REPLY_TOKENS
        name = f"session-{number}"
        actors.append(
            Actor(
                name,
                Traffic.AGENTS,
                0.0,
                tuple(
                    Turn(
                        (Piece(f"{seed}/{name}/{turn}", later if turn else first),),
                        keeps_context=turn > 0,
                        gap_seconds=0.0,
                        reply_tokens=REPLY_TOKENS,
                        ttl_seconds=TTL_SECONDS,
                    )
                    for turn in range(turns)
                ),
            )
        )
        contexts += longest
    cache = scale.cache_tokens or round(contexts * CACHE_PART)
    return Script(
        "rfc",
        tuple(actors),
        cache,
        SLOTS,
        f"{SESSIONS} sessions, {SLOTS} requests at a time, prompts from "
        f"{longest * FIRST_PART:,.0f} to {longest:,} tokens "
        f"({longest / RFC_LONGEST_PROMPT:.2f} of the RFC's); contexts at their end "
        f"{contexts / cache:.1f} x the cache of {cache:,} tokens",
    )
