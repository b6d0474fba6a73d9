"""A look at vLLM's KV core before it is extended: at its features, never at its version."""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final


def resolve(path: str) -> Any:
    """Import ``package.module:name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, slots=True)
class Finding:
    """What the probe found at one place.

    Args:
        seam: The place in vLLM.
        ok: Whether it looks as expected.
        detail: What was expected and is not there, or what the place is for.
    """

    seam: str
    ok: bool
    detail: str


_QUEUE_NAMES: Final = {
    "popleft",
    "popleft_n",
    "remove",
    "append",
    "append_n",
    "prepend_n",
    "get_all_free_blocks",
    "iter_blocks_after",
}
_BLOCK_FIELDS: Final = {
    "block_id",
    "ref_cnt",
    "pool",
    "_block_hash",
    "_block_hash_num_tokens",
    "prev_free_block",
    "next_free_block",
    "is_null",
}
_SIGNATURES: Final = (
    # module, class, method, the parameters that ours names or passes by position
    ("vllm.v1.core.sched.scheduler", "Scheduler", "add_request", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "finish_requests", ("request_ids",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "schedule", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "make_stats", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "has_requests", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "set_pause_state", ("pause_state",)),
    (
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        "reset_prefix_cache",
        ("reset_running_requests",),
    ),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "_preempt_request", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "_free_request", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "_free_blocks", ("request",)),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", "get_computed_blocks", ("request",)),
    (
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        "get_computed_blocks_for_connector",
        ("request",),
    ),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", "record_prefix_cache_stats", ("request",)),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", "free", ("request",)),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", "pop_blocks_for_free", ("request",)),
    ("vllm.v1.core.block_pool", "BlockPool", "get_new_blocks", ("num_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool", "free_blocks", ("ordered_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool", "touch", ("blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool", "evict_blocks", ("block_ids",)),
    ("vllm.v1.core.block_pool", "BlockPool", "move_block_hashes", ("src_block", "dst_block")),
    ("vllm.v1.core.block_pool", "BlockPool", "reset_prefix_cache", ()),
    ("vllm.v1.core.block_pool", "BlockPool", "cache_partial_block", ("request", "block")),
    (
        "vllm.v1.core.block_pool",
        "BlockPool",
        "cache_full_blocks",
        ("request", "blocks", "num_cached_blocks", "num_full_blocks"),
    ),
)

_NOT_IN_EVERY_VERSION: Final = {"record_prefix_cache_stats"}
"""Without it hinted prompt tokens count as unhinted, and nothing else is amiss."""


def probe_engine(scheduler: Any) -> list[Finding]:
    """Look at all of vLLM's KV core that the mixin will touch, by its features.

    Args:
        scheduler: The class that vLLM would use.
    """
    return [*_probe_scheduler(scheduler), *_probe_signatures(), *_probe_classes()]


def _probe_scheduler(scheduler: Any) -> Iterator[Finding]:
    stock = resolve("vllm.v1.core.sched.scheduler:Scheduler")
    ok = isinstance(scheduler, type) and issubclass(scheduler, stock)
    name = getattr(scheduler, "__name__", repr(scheduler))
    detail = "the class to extend" if ok else f"{name} does not derive from vLLM's Scheduler"
    yield Finding("scheduler class", ok, detail)


def _probe_signatures() -> Iterator[Finding]:
    for module, owner, method, expected in _SIGNATURES:
        place = f"{module}:{owner}.{method}"
        if method in _NOT_IN_EVERY_VERSION and not hasattr(resolve(f"{module}:{owner}"), method):
            continue
        try:
            found = tuple(
                inspect.signature(getattr(resolve(f"{module}:{owner}"), method)).parameters
            )
        except (ImportError, AttributeError) as error:
            yield Finding(place, False, str(error))
            continue
        ok = found[1 : 1 + len(expected)] == expected
        detail = "overridden" if ok else f"takes {found[1:]}, not {expected}"
        yield Finding(place, ok, detail)


def _probe_classes() -> Iterator[Finding]:
    place = "vllm.v1.core.kv_cache_utils:KVCacheBlock"
    block = resolve(place)
    strange = {f.name for f in fields(block)} - _BLOCK_FIELDS if is_dataclass(block) else {"?"}
    yield Finding(
        place, not strange, f"unknown fields {strange}" if strange else "two scalars more"
    )

    place = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue"
    queue = resolve(place)
    names = {name for name in vars(queue) if not name.startswith("_")}
    # An unknown method might walk over the boundaries between the zones.
    ok = names == _QUEUE_NAMES
    detail = "two boundaries more" if ok else f"methods differ: {sorted(names ^ _QUEUE_NAMES)}"
    yield Finding(place, ok, detail)

    place = "vllm.v1.core.kv_cache_coordinator:BlockPool"
    same = resolve(place) is resolve("vllm.v1.core.block_pool:BlockPool")
    yield Finding(place, same, "built as ours" if same else "is another class than block_pool's")

    place = "vllm.v1.core.kv_cache_utils:make_block_hash_with_group_id"
    ok = len(resolve(place)(b"h", 1)) == len(b"h") + 4
    yield Finding(place, ok, "the form of a block hash" if ok else "a block hash has another form")
