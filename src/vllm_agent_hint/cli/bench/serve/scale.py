"""How large a load may be on the machine at hand."""

from dataclasses import dataclass
from typing import Final, Self

RFC_LONGEST_PROMPT: Final = 30_000


@dataclass(frozen=True, slots=True)
class Scale:
    """Everything in which a load may differ between machines.

    Args:
        longest_prompt: Tokens, an agent's last prompt.
        rfc_longest_prompt: The same in the RFC's direct test, which has 30,000.
        prefill_rate: Prompt tokens per second that the server computes, nothing cached.
        cache_tokens: KV cache of the servers; None where the bench starts them, and each load
            asks for the cache that puts it under pressure.
    """

    longest_prompt: int
    rfc_longest_prompt: int
    prefill_rate: float
    cache_tokens: int | None = None

    @classmethod
    def for_cpu(cls) -> Self:
        """The demo's model on one core."""
        return cls(longest_prompt=3_000, rfc_longest_prompt=6_000, prefill_rate=8_000.0)

    @classmethod
    def for_gpu(cls) -> Self:
        """The demo's GPU model."""
        return cls(RFC_LONGEST_PROMPT, RFC_LONGEST_PROMPT, prefill_rate=50_000.0)
