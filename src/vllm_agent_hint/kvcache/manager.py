"""vLLM's KV cache manager, which knows which requests are hinted and what they leave behind."""

from collections.abc import Callable, Container, Iterator, Sequence
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

from vllm_agent_hint.hints import RetentionResult
from vllm_agent_hint.kvcache.pool import AgentBlockPool
from vllm_agent_hint.kvcache.rebinding import rebound
from vllm_agent_hint.sessions.blockmeta import BlockMetaUpdateResult
from vllm_agent_hint.sessions.lineage import GroupLayout, RecordedPrefix, eviction_order
from vllm_agent_hint.sessions.manager import SessionAwareManager
from vllm_agent_hint.sessions.session import LiveRequest
from vllm_agent_hint.stamp import Stamp


@dataclass(slots=True)
class TrackedRequest:
    """A request of a session, or of a recognised conversation, while the scheduler has it.

    Args:
        live: SAM's handle.
        stamp: What the front end said of it, if it came through one.
        num_hits: Logical blocks per KV cache group that it found cached, at the time when it
            found fewest: what it computed itself and found again after a preemption is its own.
        is_complete: The front end has all that it wanted of it, so that its abort is a success.
        retention: What became of it, once it has ended.
        checkpoints: Per KV cache group of states or windows, what was recorded of it last, by
            logical index.
    """

    live: LiveRequest
    stamp: Stamp | None = None
    num_hits: dict[int, int] = field(default_factory=dict)
    is_complete: bool = False
    retention: RetentionResult | None = None
    checkpoints: dict[int, dict[int, KVCacheBlock]] = field(default_factory=dict)

    @property
    def is_conversation(self) -> bool:
        """Whether it carries no hint, and goes on with others that carry none."""
        return self.live.session.is_conversation


@dataclass(slots=True)
class HintedTokens:
    """What stock's prefix cache statistics say of hinted requests.

    Args:
        queried: Prompt tokens.
        cached: Those of them that were found in the prefix cache.
    """

    queried: int = 0
    cached: int = 0


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
        self.on_served: Callable[[Any, Sequence[Sequence[KVCacheBlock]]], None] | None = None
        """Called with a request and the cached blocks that it was served from."""
        self.on_fault: Callable[[str], object] | None = None
        """Called, from an ``except``, with what has failed in the session core."""
        self.tracked: dict[str, TrackedRequest] = {}
        """Requests of sessions and conversations by request id; the scheduler keeps it."""
        self.loads: Container[str] = ()
        """Ids of requests that never run: nothing of them is counted as anybody's use."""
        self.is_shadow = False
        """Whether accounts are kept and no order is changed."""
        self.hinted_tokens = HintedTokens()
        """Of the hinted requests admitted since it was last taken."""
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
            GroupLayout(
                manager.block_size,
                is_checkpoint=isinstance(manager, _CHECKPOINT_MANAGERS),
                stands_alone=isinstance(manager, MambaManager),
            )
            for manager in self.coordinator.single_type_managers
        ]

    @property
    def logical_block_size(self) -> int:
        """Tokens in the logical block of a range: the smallest block that attention uses."""
        layouts = self.group_layouts()
        sizes = [layout.block_size for layout in layouts if not layout.is_checkpoint]
        return min(sizes or [layout.block_size for layout in layouts])

    def prompt_hashes(self, request: Any) -> list[list[bytes]]:
        """The hashes of a request's complete blocks, per group, without the group's number."""
        unit = self.block_pool.hash_block_size
        hashes = request.block_hashes
        steps = [layout.block_size // unit for layout in self.group_layouts()]
        return [hashes if step == 1 else hashes[step - 1 :: step] for step in steps]

    def keep_stock_order(self) -> None:
        """Shadow mode, before the first request: keep every account, change no order."""
        self.is_shadow = True
        self.block_pool.keep_stock_order()

    # -- what a request was served from ---------------------------------------------------------

    def record_prefix_cache_stats(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """As stock, once per admitted request; then take what it has counted for a hinted one.

        Stock counts a request's tokens and those that it found cached, apart from what it
        computes again after a preemption. The front end knows the sum over all requests, so an
        unhinted one costs a look-up.
        """
        if self.loads and request.request_id in self.loads:
            return
        stats = getattr(self, "prefix_cache_stats", None)
        tracked = self.tracked.get(request.request_id)
        if tracked is None or tracked.is_conversation or stats is None:
            super().record_prefix_cache_stats(request, *args, **kwargs)  # type: ignore[misc]
            return
        queries, hits = stats.queries, stats.hits
        super().record_prefix_cache_stats(request, *args, **kwargs)  # type: ignore[misc]
        self.hinted_tokens.queried += stats.queries - queries
        self.hinted_tokens.cached += stats.hits - hits

    def take_hinted_tokens(self) -> HintedTokens:
        """Tokens of hinted requests since the last time, in step with stock's own statistics."""
        taken, self.hinted_tokens = self.hinted_tokens, HintedTokens()
        return taken

    def get_computed_blocks(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """As stock, once per attempt to schedule a request; then say what it was served from."""
        result = super().get_computed_blocks(request, *args, **kwargs)  # type: ignore[misc]
        if self.on_served is not None and request.request_id not in self.loads:
            self.on_served(request, result[0].blocks)
        return result

    def get_computed_blocks_for_connector(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """As stock: the look-up of hybrid models beside a connector doesn't pass the one above."""
        result = super().get_computed_blocks_for_connector(request, *args, **kwargs)  # type: ignore[misc]
        if self.on_served is not None and request.request_id not in self.loads:
            self.on_served(request, result[0].blocks)
        return result

    def note_hits(
        self, sam: SessionAwareManager, request: Any, groups: Sequence[Sequence[KVCacheBlock]]
    ) -> None:
        """Tell SAM which cached blocks a request was served from. O(blocks)."""
        tracked = self.tracked.get(request.request_id)
        for group, blocks in enumerate(groups):
            if tracked is not None:
                known = tracked.num_hits.get(group, len(blocks))
                tracked.num_hits[group] = min(known, len(blocks))
                hit = blocks
            elif self._frees_early(group):
                # A running request may have freed the block already, and record it at its end.
                hit = blocks
            else:
                # A block that nobody runs on or records is nobody's to protect.
                hit = [b for b in blocks if b._session_ref_cnt or b.ref_cnt]
            if hit and hit[0].is_null:
                hit = [b for b in hit if not b.is_null]
            if tracked is not None and len(tracked.live.session.live) > 1:
                own = self._held_beside(tracked, request.request_id, group)
                hit = [b for b in hit if b._session_ref_cnt or b.block_id not in own]
            if hit:
                sam.ledger.usage.note_hits(
                    tracked.live.session if tracked is not None else None,
                    group,
                    [b.block_id for b in hit],
                    (b._block_hash for b in hit),
                )

    def _held_beside(self, tracked: TrackedRequest, request_id: str, group: int) -> set[int]:
        """Blocks that other live requests of a session hold, and will record at their end."""
        tables = self.coordinator.single_type_managers[group].req_to_blocks
        return {
            block.block_id
            for other_id, other in self.tracked.items()
            if other.live.session is tracked.live.session and other_id != request_id
            for block in tables.get(other_id, ())
        }

    def _frees_early(self, group: int) -> bool:
        return isinstance(self.coordinator.single_type_managers[group], _CHECKPOINT_MANAGERS)

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
                found = self._checkpoints(request, group, manager, blocks)
                tracked.checkpoints[group] = found
                logical = sorted(found)
                prefix = RecordedPrefix(
                    [found[i].block_id for i in logical],
                    [found[i]._block_hash for i in logical],
                    logical,
                )
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
    ) -> dict[int, KVCacheBlock]:
        """State or window blocks at the boundaries where the context can be taken up again.

        The request's own table has only the last of them: the others were freed while it ran,
        past every hook, and are found by the request's own hashes. Beyond what it has computed
        there are none of its own.

        Returns:
            By logical index.
        """
        found: dict[int, KVCacheBlock] = {
            i: block
            for i, block in enumerate(blocks)
            if block._block_hash is not None and not block.is_null
        }
        prompt = request.num_prompt_tokens
        # The last token of a context is sampled and never computed.
        ends = {prompt, prompt - 1, request.num_tokens - 1}
        for boundary in ends | {getattr(request, "shared_prefix_boundary", 0)}:
            reached = min(boundary, request.num_computed_tokens)
            for index, block in self._cached_at(request, group, manager, reached):
                found.setdefault(index, block)
        return found

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
        if request.request_id in self.tracked and self._has_own_order:
            early = self._freed_early(self.tracked[request.request_id])
            self.block_pool.free_blocks(self._pop_tail_first(request, early))
        else:
            super().free(request)  # type: ignore[misc]

    def pop_blocks_for_free(self, request: Any) -> list[KVCacheBlock]:
        """As stock: the caller frees them in reverse."""
        if request.request_id in self.tracked and self._has_own_order:
            early: list[dict[int, KVCacheBlock]] = [{} for _ in self.group_layouts()]
            return self._pop_tail_first(request, early)[::-1]
        return super().pop_blocks_for_free(request)  # type: ignore[misc]

    @property
    def _has_own_order(self) -> bool:
        """Whether hinted requests are freed in another order than stock's."""
        return len(self.coordinator.single_type_managers) > 1 and not self.is_shadow

    def _freed_early(self, tracked: TrackedRequest) -> list[dict[int, KVCacheBlock]]:
        """Recorded checkpoints that are free already: their place is among the other blocks."""
        return [
            {
                i: block
                for i, block in tracked.checkpoints.get(group, {}).items()
                if block.ref_cnt == 0 and block._session_ref_cnt
            }
            for group in range(len(self.coordinator.single_type_managers))
        ]

    def _pop_tail_first(
        self, request: Any, early: Sequence[dict[int, KVCacheBlock]]
    ) -> list[KVCacheBlock]:
        """Take a request's blocks and what it has freed early, in the order of reuse."""
        held: list[dict[int, KVCacheBlock]] = []
        for manager, freed in zip(self.coordinator.single_type_managers, early, strict=True):
            length = len(manager.req_to_blocks.get(request.request_id) or ())
            table = manager.pop_blocks_for_free(request.request_id)
            # vLLM 0.33 leaves out the null blocks at the front.
            first = max(0, length - len(table))
            blocks = {first + i: block for i, block in enumerate(table) if not block.is_null}
            missing = {i: block for i, block in freed.items() if i not in blocks}
            self.block_pool.touch(list(missing.values()))
            held.append(dict(sorted({**missing, **blocks}.items())))
        try:
            order = eviction_order(self.group_layouts(), [list(blocks) for blocks in held])
        except Exception:
            if self.on_fault is not None:
                self.on_fault("ordering a request's blocks")
            order = [(g, k) for g, blocks in enumerate(held) for k in reversed(range(len(blocks)))]
        tables = [list(blocks.values()) for blocks in held]
        return [tables[group][k] for group, k in order]


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
