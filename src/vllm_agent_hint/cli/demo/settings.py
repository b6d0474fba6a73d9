"""The named settings that fix the demo's load; they are printed with its results."""

from dataclasses import dataclass, fields
from typing import Final, Self

GPU_SCALE: Final = 4


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """One load, the same for every column.

    Agents work in a closed loop: ask, wait for a tool, ask again with the answer appended. The
    small pool holds all of their contexts (below the 0.8 of it that sessions may claim) beside a
    few running one-shots, but in a pause more one-shot blocks pass through it than the rest of it
    has: least recently used loses every waiting agent. The rates leave the machine idle for half of
    the time or more, so that the columns differ by what they compute, not by how they queue.

    Args:
        seed: Of every prompt, pause and arrival.
        model: A key of ``model.KINDS``.
        dtype: Of weights and KV cache. In float32 a greedy answer does not depend on how its
            prompt was cut into batches, so every column is asked the same prompts.
        block_size: Tokens per KV cache block.
        max_model_len: Longest context, in tokens.
        agents: Sessions side by side.
        turns: Requests of each agent.
        system_tokens: System prompt, shared by all agents.
        task_tokens: Each agent's own first message.
        tool_tokens: Tool output that each later turn appends.
        agent_reply_tokens: Tokens that an agent asks for in each turn.
        pause_seconds: Mean duration of a tool call; each lasts 0.75 to 1.25 of it.
        ttl_seconds: How long an agent asks to keep its context from the end of a turn.
        one_shots: One-shot requests; each prompt is its own.
        one_shots_per_second: Mean rate of their arrivals (Poisson).
        one_shot_tokens: Mean length of their prompts; each has 0.5 to 1.5 of it.
        one_shot_reply_tokens: Tokens that each asks for.
        small_pool_tokens: KV cache under pressure.
        big_pool_tokens: KV cache that holds everything.
    """

    seed: int = 52113
    model: str = "qwen3"
    dtype: str = "float32"
    block_size: int = 128
    max_model_len: int = 8192
    agents: int = 3
    turns: int = 8
    system_tokens: int = 1024
    task_tokens: int = 4096
    tool_tokens: int = 192
    agent_reply_tokens: int = 24
    pause_seconds: float = 7.0
    ttl_seconds: float = 120.0
    one_shots: int = 92
    one_shots_per_second: float = 1.6
    one_shot_tokens: int = 2048
    one_shot_reply_tokens: int = 24
    small_pool_tokens: int = 236 * 128
    big_pool_tokens: int = 2048 * 128

    @classmethod
    def for_cpu(cls) -> Self:
        return cls()

    @classmethod
    def for_gpu(cls) -> Self:
        """Everything that is counted in tokens is larger; a GPU prefills the rest in no time."""
        cpu = cls()
        longer = {
            field.name: getattr(cpu, field.name) * GPU_SCALE
            for field in fields(cls)
            if field.name.endswith("_tokens") or field.name == "max_model_len"
        }
        return cls(**{**longer, "model": "qwen3-gpu", "dtype": "auto", "block_size": 16})

    @property
    def longest_context(self) -> int:
        per_turn = self.tool_tokens + self.agent_reply_tokens
        return self.system_tokens + self.task_tokens + self.turns * per_turn

    @property
    def small_pool_blocks(self) -> int:
        return self.small_pool_tokens // self.block_size

    @property
    def big_pool_blocks(self) -> int:
        return self.big_pool_tokens // self.block_size

    @property
    def agents_share_of_small_pool(self) -> float:
        """What all agents together fill at their end, as a share of the small pool."""
        own = self.longest_context - self.system_tokens
        return (self.system_tokens + self.agents * own) / self.small_pool_tokens
