"""vLLM's KV cache manager, which knows which requests are hinted and what they leave behind."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import new_class
from typing import Any

from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    MambaManager,
    SlidingWindowManager,
)

from vllm_agent_hint.kvcache.pool import AgentBlockPool
from vllm_agent_hint.sessions.blockmeta import BlockMetaUpdateResult
from vllm_agent_hint.sessions.lineage import GroupLayout, RecordedPrefix, eviction_order
from vllm_agent_hint.sessions.manager import SessionAwareManager
from vllm_agent_hint.sessions.session import LiveRequest


@dataclass(slots=True)
class TrackedRequest:
    """A hinted request while the scheduler has it.

    Args:
        live: SAM's handle.
        num_hits: Logical blocks per KV cache group that it found cached, at the time when it
            found fewest: what it computed itself and found again after a preemption is its own.
        is_complete: The front end has all that it wanted of it, so that its abort is a success.
    """

    live: LiveRequest
    num_hits: dict[int, int] = field(default_factory=dict)
    is_complete: bool = False


class KVCacheManagerMixin:
    """Laid over the ``KVCacheManager`` that a scheduler builds.

    Stock builds the coordinator, and it the pool. We change which pool class it finds, remember
    what requests were served from, and free a hinted request of a hybrid model in one order
    across its groups. Breaks if the coordinator no longer takes ``BlockPool`` from its module.
    """

    block_pool: AgentBlockPool
    coordinator: Any
    kv_cache_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sam: SessionAwareManager | None = None
        self.tracked: dict[str, TrackedRequest] = {}
        """Hinted requests by request id; the scheduler keeps it."""
        with rebound([kv_cache_coordinator], "BlockPool", lambda _: AgentBlockPool):
            super().__init__(*args, **kwargs)

    def update_block_meta(
        self,
        *,
        block_id: int,
        expected_block_hash: bytes | None = None,
        session_ref_delta: int = 0,
        ttl_expire_at: float | None = None,
    ) -> BlockMetaUpdateResult:
        """See ``AgentBlockPool.update_block_meta``."""
        return self.block_pool.update_block_meta(
            block_id=block_id,
            expected_block_hash=expected_block_hash,
            session_ref_delta=session_ref_delta,
            ttl_expire_at=ttl_expire_at,
        )

    def group_layouts(self) -> list[GroupLayout]:
        """How each KV cache group cuts a prompt into blocks."""
        return [
            GroupLayout(manager.block_size, isinstance(manager, _CHECKPOINT_MANAGERS))
            for manager in self.coordinator.single_type_managers
        ]

    # -- what a request was served from ---------------------------------------------------------

    def get_computed_blocks(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """As stock, once per attempt to schedule a request; then note what it was served from."""
        result = super().get_computed_blocks(request, *args, **kwargs)  # type: ignore[misc]
        if self.sam is not None and self.sam.sessions:
            self._note_hits(self.sam, request, result[0].blocks)
        return result

    def _note_hits(
        self, sam: SessionAwareManager, request: Any, groups: Sequence[Sequence[KVCacheBlock]]
    ) -> None:
        tracked = self.tracked.get(request.request_id)
        for group, blocks in enumerate(groups):
            if tracked is not None:
                known = tracked.num_hits.get(group, len(blocks))
                tracked.num_hits[group] = min(known, len(blocks))
                hit = blocks
            else:
                # A block that nobody runs on or records is nobody's to protect.
                hit = [b for b in blocks if b._session_ref_cnt or b.ref_cnt]
            if hit and hit[0].is_null:
                hit = [b for b in hit if not b.is_null]
            if hit:
                sam.ledger.note_hits(
                    tracked.live.session if tracked is not None else None,
                    group,
                    [b.block_id for b in hit],
                    (b._block_hash for b in hit),
                )

    # -- what a request leaves behind ------------------------------------------------------------

    def recorded_prefixes(self, request: Any) -> list[RecordedPrefix]:
        """The complete cacheable prefix of a request that still holds its blocks, per group.

        O(blocks of the request); called when it ends or is preempted.
        """
        tracked = self.tracked[request.request_id]
        prefixes: list[RecordedPrefix] = []
        for group, manager in enumerate(self.coordinator.single_type_managers):
            blocks = manager.req_to_blocks.get(request.request_id) or []
            if manager.block_pool is not self.block_pool:
                blocks = []
            if isinstance(manager, _CHECKPOINT_MANAGERS):
                prefix = self._checkpoints(request, group, manager, blocks)
            else:
                hashes = [block._block_hash for block in blocks]
                if None in hashes:
                    del hashes[hashes.index(None) :]
                prefix = RecordedPrefix([b.block_id for b in blocks[: len(hashes)]], hashes)
            prefix.num_hits = tracked.num_hits.get(group, 0)
            prefixes.append(prefix)
        return prefixes

    def _checkpoints(
        self, request: Any, group: int, manager: Any, blocks: Sequence[KVCacheBlock]
    ) -> RecordedPrefix:
        """State or window blocks at the boundaries where the context can be taken up again.

        The request's own table has only the last of them: the others were freed while it ran,
        past every hook, and are found by the request's own hashes.
        """
        found: dict[int, KVCacheBlock] = {
            i: block
            for i, block in enumerate(blocks)
            if block._block_hash is not None and not block.is_null
        }
        prompt = request.num_prompt_tokens
        for boundary in {prompt, prompt - 1, getattr(request, "shared_prefix_boundary", 0)}:
            for index, block in self._cached_at(request, group, manager, boundary):
                found.setdefault(index, block)
        logical = sorted(found)
        return RecordedPrefix(
            [found[i].block_id for i in logical], [found[i]._block_hash for i in logical], logical
        )

    def _cached_at(
        self, request: Any, group: int, manager: Any, boundary: int
    ) -> Iterator[tuple[int, KVCacheBlock]]:
        """The cached blocks that make a prefix of ``boundary`` tokens usable in a group."""
        unit = self.block_pool.hash_block_size
        lookup = self.block_pool.cached_block_hash_to_block.get_one_block
        last = min(boundary // unit, len(request.block_hashes))
        window = _window_tokens(manager)
        # A state stands alone: the last one at or before the boundary. A window is a run.
        first = 0 if window == 0 else max(0, (boundary - window) // unit)
        for k in range(last, first, -1):
            block = lookup(make_block_hash_with_group_id(request.block_hashes[k - 1], group))
            if block is not None and block._block_hash is not None:
                yield (k * unit - 1) // manager.block_size, block
                if window == 0:
                    return

    # -- the order of freeing --------------------------------------------------------------------

    def free(self, request: Any) -> None:
        """As stock, but a hinted request of a hybrid model goes tail first across its groups."""
        if request.request_id in self.tracked and self._is_hybrid:
            self.block_pool.free_blocks(self._pop_tail_first(request))
        else:
            super().free(request)  # type: ignore[misc]

    def pop_blocks_for_free(self, request: Any) -> list[KVCacheBlock]:
        """As stock: the caller frees them in reverse."""
        if request.request_id in self.tracked and self._is_hybrid:
            return self._pop_tail_first(request)[::-1]
        return super().pop_blocks_for_free(request)  # type: ignore[misc]

    @property
    def _is_hybrid(self) -> bool:
        return len(self.coordinator.single_type_managers) > 1

    def _pop_tail_first(self, request: Any) -> list[KVCacheBlock]:
        managers = self.coordinator.single_type_managers
        tables = [manager.pop_blocks_for_free(request.request_id) for manager in managers]
        held = [[i for i, b in enumerate(table) if not b.is_null] for table in tables]
        order = eviction_order(self.group_layouts(), held)
        return [tables[group][held[group][k]] for group, k in order]


_CHECKPOINT_MANAGERS = (SlidingWindowManager, ChunkedLocalAttentionManager, MambaManager)


def _window_tokens(manager: Any) -> int:
    """Tokens before a boundary that a group needs there; 0 for a state, which needs itself only."""
    if isinstance(manager, SlidingWindowManager):
        return int(manager.sliding_window)
    if isinstance(manager, ChunkedLocalAttentionManager):
        return int(manager.attention_chunk_size)
    return 0


@cache
def agent_kv_cache_manager(base: type) -> type:
    """``base`` with the mixin laid over it."""
    return new_class("AgentHint" + base.__name__, (KVCacheManagerMixin, base))


@contextmanager
def rebound(modules: Iterable[Any], name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Give a global of some modules another value while something is built from it.

    Stock names a class of its module's globals where we want a subclass. Scoped, so that the
    pools and managers which vLLM builds elsewhere stay stock, and independent of the order in
    which modules were imported.

    Args:
        modules: Those without such a global are passed over.
        name: The global.
        replacement: Makes the new value from the old one.
    """
    found = [(module, vars(module)[name]) for module in modules if name in vars(module)]
    try:
        for module, value in found:
            setattr(module, name, replacement(value))
        yield
    finally:
        for module, value in found:
            setattr(module, name, value)
