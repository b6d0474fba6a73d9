"""What a request without a hint pays beside sessions, for being looked at."""

from itertools import islice
from typing import Final

from vllm_agent_hint.cli.bench.engine import BLOCK_SIZE
from vllm_agent_hint.cli.bench.figure import Measured
from vllm_agent_hint.cli.bench.paired import quiet_collector, seconds
from vllm_agent_hint.cli.bench.pools import fresh_hashes
from vllm_agent_hint.sessions.conversations import Conversations
from vllm_agent_hint.settings import Settings

PROMPT_BLOCKS: Final = 131_072 // BLOCK_SIZE
KNOWN_BLOCKS: Final = 2_048 // BLOCK_SIZE


def recognition(*, prompts: int) -> Measured:
    """Microseconds in which a prompt of 131,072 tokens is found to go on with nothing.

    As many conversations are remembered as may be, so that each prompt also makes one forgotten.
    """
    bound = Settings.model_fields["max_conversations"].default
    conversations = Conversations(BLOCK_SIZE, bound)
    hashes = fresh_hashes()
    for _ in range(bound):
        conversations.begin(list(islice(hashes, KNOWN_BLOCKS)), 0.0)
    spent = []
    with quiet_collector():
        for _ in range(prompts):
            prompt = list(islice(hashes, PROMPT_BLOCKS))

            def look(prompt: list[bytes] = prompt) -> None:
                assert conversations.find(prompt) is None
                conversations.begin(prompt, 0.0)

            spent.append(seconds(look) * 1e6)
    spent.sort()
    return Measured(spent[len(spent) // 2], parts={"max": spent[-1]})
