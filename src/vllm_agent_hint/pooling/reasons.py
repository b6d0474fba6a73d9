"""Reasons that results of pooling give in more than one place, in words for a client."""

from typing import Final

from vllm_agent_hint.sessions.reasons import NOTHING_RECORDED as NOTHING_RECORDED

NOTHING_IN_RANGE: Final = "nothing is recorded for the range"
STORE_LOST_IT: Final = "the store has nothing of it any more"
TOO_MANY_WAIT: Final = "more prefetches wait than max_prefetches_queued"
