"""How a load that failed in the tier becomes known to vLLM.

``OffloadingConnector`` knows no failed transfer: it asserts that every one has succeeded. So the
tier's worker reports a failed load as over, and says here which blocks or which request it has
failed. vLLM then does with the request what ``kv_load_failure_policy`` says.
"""

from collections.abc import Callable
from typing import Any, Final

from vllm_agent_hint.pooling.tier.worker import TorchTierWorker

_FAILED_BLOCKS: Final = "_agent_hint_failed_blocks"


def get_transfer_results(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``OffloadingConnector.get_transfer_results(finished_req_ids)``, once per step of a worker.

    Stock: names the requests whose loads are over. Ours: adds those whose load has failed, where
    block ids don't say which group they belong to.
    If it moves: a load from a damaged file is not noticed, so that the tier must not be used.
    """
    side = instance.connector_worker
    worker = getattr(side, "worker", None)
    if not isinstance(worker, TorchTierWorker):
        return wrapped(*args, **kwargs)
    jobs = dict(side._load_jobs)
    results = wrapped(*args, **kwargs)
    for job_id, block_ids in worker.take_failed_loads().items():
        if worker.num_groups == 1:
            vars(instance).setdefault(_FAILED_BLOCKS, set()).update(block_ids)
        elif job_id in jobs:
            results.failed_recving.add(jobs[job_id])
    return results


def get_block_ids_with_load_errors(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> set[int]:
    """``OffloadingConnector.get_block_ids_with_load_errors()``, right after the above.

    Stock: none. Ours: the blocks of failed loads, where there is one KV cache group.
    If it moves: as above.
    """
    failed: set[int] = wrapped(*args, **kwargs)
    return failed | vars(instance).pop(_FAILED_BLOCKS, set())
