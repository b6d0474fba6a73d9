"""The hint of a request that arrives at the engine: read once, and out of every log from then on.

vLLM logs the sampling parameters of scheduled requests when a step fails. What the front end put
there names session and tenant, and could be sent in again.
"""

import copy
from dataclasses import dataclass
from typing import Any

from vllm_agent_hint.hints import HINT_KEY
from vllm_agent_hint.stamp import STAMP_KEY, Stamp, open_stamp


@dataclass(frozen=True, slots=True)
class ArrivedHint:
    """What a request carried.

    Args:
        hint: Of the stamp, or what stood there without one; None if there was nothing.
        stamp: The front end's, if it verifies.
        is_foreign: Whether there was a stamp that does not.
    """

    hint: Any
    stamp: Stamp | None
    is_foreign: bool


def take_hint(request: Any) -> ArrivedHint | None:
    """Take the hint off a request; None if it carries none.

    The request gets parameters of its own without it. The old ones are never written to: the
    children of ``n > 1`` share them, and so does whoever called an engine in this process.
    """
    params = request.sampling_params
    extra_args = None if params is None else params.extra_args
    if not extra_args or not (STAMP_KEY in extra_args or HINT_KEY in extra_args):
        return None
    sealed = extra_args.get(STAMP_KEY)
    stamp = open_stamp(sealed)
    request.sampling_params = copy.copy(params)
    request.sampling_params.extra_args = {
        key: value for key, value in extra_args.items() if key not in (STAMP_KEY, HINT_KEY)
    } or None
    return ArrivedHint(
        hint=extra_args.get(HINT_KEY) if stamp is None else stamp.hint,
        stamp=stamp,
        is_foreign=sealed is not None and stamp is None,
    )
