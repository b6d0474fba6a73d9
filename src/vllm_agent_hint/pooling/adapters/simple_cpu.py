"""vLLM's ``SimpleCPUOffloadConnector``: a second block pool, in host memory or on a disk."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.simple_kv_offload.manager import TransferMeta

from vllm_agent_hint.pooling.adapters.request_users import user_of
from vllm_agent_hint.pooling.capability import Content, Operation
from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.pooling.manifest import SessionManifest
from vllm_agent_hint.pooling.tier.users import OwnRequest, SoleUsers
from vllm_agent_hint.sessions.intent import SessionKey

logger = logging.getLogger("vllm.agent_hint")


class SimpleCPUStore:
    """See ``Store``.

    The connector keeps its copies in one more of vLLM's block pools, under the hashes of the GPU
    cache. So everything can be asked for: saves go the way that the connector sends the blocks of
    a request that has finished, pinned on both sides until they are copied; a look-up pins
    nothing; a copy without its hash is deleted, and its free block is the next to be used.

    The pool goes by use alone. Contexts are refreshed from their end, so that a prefix outlives
    what comes behind it; the connector's own saves enter the other way round.

    Args:
        scheduler: vLLM's.
        connector: A ``SimpleCPUOffloadConnector`` of the scheduler's side.
    """

    needs_tokens = False
    manifest: SessionManifest | None = None

    def __init__(self, scheduler: Any, connector: Any) -> None:
        self._scheduler = scheduler
        self._gpu = scheduler.kv_cache_manager.block_pool
        self._side = connector.scheduler_manager
        self._copies = self._side.cpu_block_pool
        self.name = type(connector).__name__
        self._saves: dict[str, set[int]] = {}
        """Copies that are not written yet, by save."""
        self._doomed: dict[int, set[int]] = {}
        """Copies to be deleted once they are written, by the event that says so."""
        self._users = SoleUsers()
        """By hash, of all KV cache groups together."""
        self._has_named_fault = False
        self._looked_up = ("", 0)
        """The request that the connector was asked about last, and what the GPU cache has of it."""
        self._look_up = self._side.get_num_new_matched_tokens
        self._side.get_num_new_matched_tokens = self._note_look_up
        self._take_up = self._side.update_state_after_alloc
        self._side.update_state_after_alloc = self._note_use
        self._end = self._side.request_finished
        self._side.request_finished = self._note_generated
        self._store_ended = self._side._process_store_event
        self._side._process_store_event = self._end_of_store

    def why_not(self, operation: Operation) -> str:
        """See ``Store``."""
        return ""

    # -- saving --------------------------------------------------------------------------------

    def start_save(self, save_id: str, content: Content, blocks: Sequence[Sequence[int]]) -> None:
        """See ``Store``. The prefix goes first where there is no room for all."""
        writing = self._writing
        there = list(self._find(content.hashes))
        self._use(there)
        room = self._copies.get_num_free_blocks() - sum(copy.ref_cnt == 0 for copy in there)
        awaited: set[int] = set()
        missing: list[int] = []
        for block_id in self._from_the_start(blocks):
            block_hash = self._gpu.blocks[block_id].block_hash
            if block_id in writing:
                awaited.add(writing[block_id])
            elif block_hash is not None and not self._holds(block_hash) and len(missing) < room:
                missing.append(block_id)
        self._take_back(awaited)
        hashes = [get_block_hash(self._gpu.blocks[block_id].block_hash) for block_id in missing]
        self._users.brought((h for h in hashes if h not in self._users), OwnRequest.TRANSFER)
        # What is named first is reused first.
        awaited.update(self._send(missing[::-1]))
        self._saves[save_id] = awaited

    def is_saving(self, save_id: str) -> bool:
        """See ``Store``."""
        if save_id not in self._saves:
            return False
        self._saves[save_id].intersection_update(self._writing.values())
        if self._saves[save_id]:
            return True
        del self._saves[save_id]
        return False

    def _from_the_start(self, blocks: Sequence[Sequence[int]]) -> Iterator[int]:
        """Blocks in the order of what they end, over all KV cache groups."""
        sizes = self._side.group_block_sizes
        ends = [
            ((k + 1) * sizes[group], block_id)
            for group, ids in enumerate(blocks)
            for k, block_id in enumerate(ids)
            if block_id
        ]
        return (block_id for _, block_id in sorted(ends, key=lambda one: one[0]))

    def _send(self, block_ids: list[int]) -> list[int]:
        """Have blocks copied with the next step.

        Returns:
            Block ids of the copies.
        """
        side = self._side
        if not block_ids:
            return []
        copies = [copy.block_id for copy in self._copies.get_new_blocks(len(block_ids))]
        with_events = side.enable_kv_cache_events and not side._lazy_mode
        events: list[Any] | None = [{} for _ in block_ids] if with_events else None
        side._pending_finished_stores.append(TransferMeta(block_ids, copies, events))
        if not side._lazy_mode:
            side._in_flight_store_gpu_blocks.update(block_ids)
        self._gpu.touch([self._gpu.blocks[block_id] for block_id in block_ids])
        return copies

    @property
    def _transfers(self) -> Iterator[tuple[int, Any]]:
        """Saves that are not over, each with the event that will say so."""
        yield from self._side._store_event_to_blocks.items()
        for transfer in self._side._pending_finished_stores:
            # All that wait are sent in one, with the next step.
            yield self._side._store_event_counter, transfer

    @property
    def _writing(self) -> dict[int, int]:
        """Blocks of the GPU cache that are being copied, and their copies."""
        return {
            block_id: copy_id
            for _, transfer in self._transfers
            for block_id, copy_id in zip(
                transfer.gpu_block_ids, transfer.cpu_block_ids, strict=True
            )
        }

    # -- who uses what -------------------------------------------------------------------------

    def _note_look_up(self, request: Any, num_computed_tokens: int) -> Any:
        """As the connector, which is asked right before a request comes to run."""
        self._looked_up = (request.request_id, num_computed_tokens)
        return self._look_up(request, num_computed_tokens)

    def _note_use(self, request: Any, blocks: Any, num_external_tokens: int) -> Any:
        """As the connector, when a request comes to run."""
        self._note(self._use_of, request, num_external_tokens)
        return self._take_up(request, blocks, num_external_tokens)

    def _use_of(self, request: Any, num_external_tokens: int) -> None:
        """What was nowhere yet, it brings."""
        user = user_of(self._scheduler, request.request_id)
        hashes = list(request.block_hashes)
        brought: list[bytes] = []
        if user is not None and user is not OwnRequest.TRANSFER:
            looked_up, local_tokens = self._looked_up
            found = (local_tokens + num_external_tokens) // self._side.hash_block_size
            if looked_up == request.request_id and not request.skip_reading_prefix_cache:
                brought = [h for h in hashes[found:] if not any(self._find([h]))]
        self._users.used(hashes, user)
        self._users.brought(brought, user)
        if self._doomed:
            self._take_back(self._copies_being_written(set(hashes)))

    def _note_generated(self, request: Any, block_ids: Any) -> Any:
        """As the connector, when a request has ended."""
        self._note(self._generated_by, request)
        return self._end(request, block_ids)

    def _generated_by(self, request: Any) -> None:
        """What it has generated, it has brought too.

        Also what is there by now, if its prompt is nobody else's: who could have generated it?
        """
        user = user_of(self._scheduler, request.request_id)
        if user is not None and user is not OwnRequest.TRANSFER:
            first = request.num_prompt_tokens // self._side.hash_block_size
            hashes = list(request.block_hashes)
            is_own = first > 0 and self._users.is_alone(hashes[first - 1], user)
            new = [h for h in hashes[first:] if h not in self._users]
            self._users.brought((h for h in new if is_own or not any(self._find([h]))), user)

    def _note(self, note: Callable[..., None], *args: Any) -> None:
        """What we don't know the users of is deleted by nobody; requests go on."""
        try:
            note(*args)
        except Exception:
            self._users.clear()
            if not self._has_named_fault:
                self._has_named_fault = True
                logger.exception("vllm-agent-hint: noting who uses what failed (said once)")

    def _copies_being_written(self, hashes: set[bytes]) -> set[int]:
        blocks = self._gpu.blocks
        return {
            copy_id
            for block_id, copy_id in self._writing.items()
            if blocks[block_id].block_hash and get_block_hash(blocks[block_id].block_hash) in hashes
        }

    def _take_back(self, copy_ids: set[int]) -> None:
        """Copies that are being written are wanted after all."""
        for doomed in self._doomed.values():
            doomed -= copy_ids

    # -- looking -------------------------------------------------------------------------------

    def loadable_tokens(self, content: Content) -> int | None:
        """See ``Store``."""
        if not content.hashes:
            return 0
        found = self._side.cpu_coordinator.find_longest_cache_hit(
            list(content.hashes), content.num_tokens
        )
        return int(found[1])

    def _holds(self, block_hash: Any) -> bool:
        return self._copies.cached_block_hash_to_block.get_one_block(block_hash) is not None

    def _find(self, hashes: Iterable[bytes], *, attention_only: bool = False) -> Iterator[Any]:
        """Copies of content, one per hash and KV cache group that has one, last hash first."""
        groups = [g for g in self._groups if not attention_only or self._is_attention(g)]
        for h in reversed(list(hashes)):
            for group in groups:
                if found := self._copies.get_cached_block(h, [group]):
                    yield found[0]

    @property
    def _groups(self) -> Sequence[int]:
        return list(self._side.prefix_cacheable_group_ids)

    def _is_attention(self, group: int) -> bool:
        """Whether it keeps something for every block; others do at some boundaries only."""
        spec = self._side.cpu_kv_cache_config.kv_cache_groups[group].kv_cache_spec
        return isinstance(spec, FullAttentionSpec)

    # -- keeping -------------------------------------------------------------------------------

    def refresh(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        """See ``Store``. Counts attention only: a checkpoint is not there for every block."""
        hashes = list(hashes)
        self._use(list(self._find(hashes)))
        found = sum(1 for _ in self._find(hashes, attention_only=True))
        unit = self._side.hash_block_size
        sizes = [self._side.group_block_sizes[g] for g in self._groups if self._is_attention(g)]
        expected = sum(len(hashes) * unit // size for size in sizes)
        return found, max(0, expected - found)

    def claim(self, hashes: Iterable[bytes], claim: Claim) -> None:
        """See ``Store``. What nobody wants goes first; for others the pool knows use alone."""
        if claim is Claim.DEAD:
            self._let_go_first(self._find(h for h in hashes if h in self._users))

    def delete(self, hashes: Iterable[bytes], session: SessionKey | None = None) -> int:
        """See ``Store``. What is being written goes as soon as that is over."""
        if session is not None:
            hashes = [h for h in hashes if self._users.is_alone(h, session)]
        hashes = list(hashes)
        for h in hashes:
            self._users.forget(h)
        keys = {make_block_hash_with_group_id(h, group) for h in hashes for group in self._groups}
        deleted = set()
        for key in keys:
            while copy := self._copies.cached_block_hash_to_block.get_one_block(key):
                deleted.add(key)
                self._drop([copy.block_id])
        for event, transfer in self._transfers:
            for block_id, copy_id in zip(
                transfer.gpu_block_ids, transfer.cpu_block_ids, strict=True
            ):
                key = self._gpu.blocks[block_id].block_hash
                if key in keys:
                    deleted.add(key)
                    self._doomed.setdefault(event, set()).add(copy_id)
        return len(deleted)

    def _end_of_store(self, event: int) -> None:
        """As the connector, then delete what was not to be kept."""
        self._store_ended(event)
        self._drop(self._doomed.pop(event, ()))

    def _drop(self, copy_ids: Iterable[int]) -> None:
        copy_ids = set(copy_ids)
        self._copies.evict_blocks(copy_ids)
        self._let_go_first(self._copies.blocks[copy_id] for copy_id in copy_ids)

    def _use(self, copies: Sequence[Any]) -> None:
        """Make copies the most recently used, in this order."""
        self._copies.touch(copies)
        self._copies.free_blocks(copies)

    def _let_go_first(self, copies: Iterable[Any]) -> None:
        """Make copies the next to be reused; those that are in use become so by being freed."""
        queue = self._copies.free_block_queue
        idle = {copy.block_id: copy for copy in copies if copy.ref_cnt == 0}
        for copy in idle.values():
            queue.remove(copy)
        queue.prepend_n(list(idle.values()))
