"""Which earlier prompt of its session a request goes on with, and whether it may replace it.

A session may run several prompts: a main agent beside a title writer, parallel tool calls, the
answers of ``n > 1``. A request goes on with a lineage if its prompt contains what that lineage
had one turn earlier. What of the last turn it does not repeat (stripped reasoning, a branch that
was rewound) is superseded, unless somebody else of the session may still be at it.
"""

from collections.abc import Sequence
from typing import Final

from vllm_agent_hint.sessions.lineage import Chain, GroupLayout, Lineage
from vllm_agent_hint.sessions.session import LiveRequest, Session

PASSED_AFTER_TURNS: Final = 2
"""Turns for which a session goes on with other prompts before one counts as over."""

Prompt = Sequence[Sequence[bytes]]
"""Per KV cache group, the hashes of a prompt's complete blocks, without the group's number."""


def place(live: LiveRequest, prompt: Prompt, layouts: Sequence[GroupLayout]) -> None:
    """Find the lineage that a request goes on with, when it comes to run.

    O(log blocks) per lineage of the session.
    """
    live.is_placed = True
    live.prompt_tokens = max(
        (len(hashes) * layout.block_size for hashes, layout in zip(prompt, layouts, strict=True)),
        default=0,
    )
    for lineage in live.session.lineages:
        shared = shared_tokens(lineage, prompt, layouts)
        if shared and shared >= live.shared_tokens:
            live.nearest, live.shared_tokens = lineage, shared
    if live.nearest is not None and (
        # That it goes on is how a conversation was recognised.
        live.conversation_turns or live.shared_tokens >= live.nearest.base_tokens
    ):
        live.continues = live.nearest
    for other in live.session.live:
        if other is not live and other.is_placed:
            live.company.add(other.continues)
            other.company.add(live.continues)


def leave(live: LiveRequest) -> None:
    """A request has ended; those that it ran beside remember what it went on with."""
    for other in live.session.live:
        other.company.add(live.continues)


def may_replace(live: LiveRequest) -> bool:
    """Whether a request that has succeeded may end what it does not repeat of its lineage."""
    return (
        live.continues is not None
        and not live.intent.is_sibling
        and live.continues not in live.company
        and all(other.is_placed for other in live.session.live)
    )


def passed_by(session: Session, lineage: Lineage) -> list[Lineage]:
    """A session that runs one request at a time has gone on: which other prompts it has passed by.

    After a compaction the old context is over. But a title writer or a rewound branch looks the
    same, and comes back within a turn or two: one wrong release costs more than a right one
    brings. Measured on real traces: see docs/policy.md.

    Args:
        session: Whose.
        lineage: With which it has gone on.
    """
    lineage.turns_passed = 0
    passed: list[Lineage] = []
    for other in session.lineages:
        if other is not lineage:
            other.turns_passed += 1
            if other.turns_passed >= PASSED_AFTER_TURNS:
                passed.append(other)
    return passed


def base_after(live: LiveRequest, lineage: Lineage, layouts: Sequence[GroupLayout]) -> int:
    """What the next prompt has to share, in tokens, to go on with a lineage.

    After a first turn its prompt, but for the last block, in which a chat template may have put
    something for this turn only. After a later turn what that had in common with the one before.
    """
    if live.continues is lineage:
        return live.shared_tokens
    unit = min(layout.block_size for layout in layouts)
    return max(unit, live.prompt_tokens - unit)


def shared_tokens(lineage: Lineage, prompt: Prompt, layouts: Sequence[GroupLayout]) -> int:
    """The prefix that a prompt has in common with a lineage's records, in tokens.

    A block's hash stands for everything up to its end, so that a binary search finds the last
    block in common.
    """
    shared = 0
    for chain, hashes, layout in zip(lineage.chains, prompt, layouts, strict=True):
        count = _count_in_common(chain, hashes)
        if count:
            shared = max(shared, (chain.logical_index(count - 1) + 1) * layout.block_size)
    return shared


def _count_in_common(chain: Chain, hashes: Sequence[bytes]) -> int:
    """How many records at the start of a chain a prompt contains."""
    low, high = 0, len(chain)
    while low < high:
        middle = (low + high) // 2
        logical = chain.logical_index(middle)
        if logical < len(hashes) and _is_same(chain.hashes[middle], hashes[logical]):
            low = middle + 1
        else:
            high = middle
    return low


def _is_same(recorded: bytes, asked: bytes) -> bool:
    """A recorded hash ends with the group's number, or is a digest; the prompt's is bare."""
    return recorded.startswith(asked) or asked.startswith(recorded)
