"""Whether the engine requests of one HTTP request may run on several data-parallel engines.

Each engine of a dense model takes itself for the only one. Only the front end, whose load
balancer gives out the requests one by one, knows that there are others.
"""

from typing import Any, Final

_RANK_HEADER: Final = "X-data-parallel-rank"


def may_spread(serving: Any, raw_request: Any) -> bool:
    """Whether those of a request that came through a door may.

    Args:
        serving: vLLM's handler of the API.
        raw_request: FastAPI's request, or None. Its header can pin the request to one engine.
    """
    if raw_request is not None and _is_rank(raw_request.headers.get(_RANK_HEADER)):
        return False
    core_client = serving.engine_client.engine_core
    return len(getattr(core_client, "core_engines", ())) > 1


def may_spread_unseen(parallel_config: Any, data_parallel_rank: int | None) -> bool:
    """The same for one that came through no door, from what ``process_inputs`` knows.

    Counts the engines of this front end as vLLM's ``MPClient`` does.
    """
    if data_parallel_rank is not None or parallel_config.data_parallel_rank_local is not None:
        return False
    engines: int = (
        parallel_config.data_parallel_size_local
        if parallel_config.local_engines_only
        else parallel_config.data_parallel_size
    )
    return engines > 1


def _is_rank(value: str | None) -> bool:
    """vLLM takes no notice of a header that is no number."""
    if value is None:
        return False
    try:
        int(value)
    except ValueError:
        return False
    return True
