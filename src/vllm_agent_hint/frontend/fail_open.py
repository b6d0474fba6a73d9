"""Failing open: an error of ours is named once, and vLLM goes on as if we weren't there."""

import logging
from typing import Final

# A child of vLLM's own logger, so that the operator's logging set-up applies to it.
logger: Final = logging.getLogger("vllm.agent_hint")

_named: Final[set[str]] = set()


def name_once(what: str, error: BaseException | None = None) -> None:
    """Log a failure with its traceback, the first time only.

    Args:
        what: What failed and what happens instead, as one clause: the log line's text.
        error: The failure; by default the exception that is being handled.
    """
    if what not in _named:
        _named.add(what)
        logger.warning("vllm-agent-hint: %s (said once)", what, exc_info=error or True)
