"""The GPU cache, seen from pooling: what of a content is in it, and what sessions hold of that."""

import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from vllm_agent_hint.hints import EditType
from vllm_agent_hint.pooling.capability import Content, Span
from vllm_agent_hint.pooling.store import Wish
from vllm_agent_hint.sessions.intent import Edit, Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.lineage import RecordedPrefix
from vllm_agent_hint.sessions.manager import SessionAwareManager


class GpuCache:
    """One scheduler's cache, with the sessions beside it. A ``LocalCache``.

    Args:
        manager: Of its KV cache.
        sam: Its session core.
        on_fault: Ends all sessions, told where, in the handler of a fault. What the core has half
            done must not stay: it might protect blocks for ever.
    """

    def __init__(
        self, manager: Any, sam: SessionAwareManager, on_fault: Callable[[str], None]
    ) -> None:
        self._manager = manager
        self._sam = sam
        self._on_fault = on_fault

    # -- contents ------------------------------------------------------------------------------

    def content_of(self, request: Any, *, with_tokens: bool) -> Content:
        """What a request that still holds its blocks leaves in the cache."""
        unit = self._manager.block_pool.hash_block_size
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        count = min(len(request.block_hashes), computed // unit)
        tokens = array("I", request.all_token_ids[: count * unit]) if with_tokens else None
        content = Content(
            request.block_hashes[:count], unit, request.cache_salt, request.lora_request, tokens
        )
        if len(self._manager.group_layouts()) == 1:
            return content
        return replace(content, servable_tokens=self.prefix_tokens(content))

    @cached_property
    def bytes_per_token(self) -> int:
        """Of the groups that keep something for every token."""
        groups = self._manager.kv_cache_config.kv_cache_groups
        layouts = self._manager.group_layouts()
        return sum(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names) // layout.block_size
            for group, layout in zip(groups, layouts, strict=True)
            if not layout.is_checkpoint
        )

    def blocks_of(self, content: Content, span: Span) -> list[list[int]]:
        """See ``LocalCache``."""
        pool = self._manager.block_pool
        groups: list[list[int]] = []
        for group, layout in enumerate(self._manager.group_layouts()):
            step = layout.block_size // content.tokens_per_hash
            ids: list[int] = []
            for k, h in enumerate(content.hashes[step - 1 :: step]):
                inside = k * layout.block_size >= span.start_token
                found = pool.get_cached_block(h, [group]) if inside else None
                ids.append(found[0].block_id if found else 0)
            groups.append(ids)
        return groups

    def prefix_tokens(self, content: Content) -> int:
        """See ``LocalCache``."""
        if not content.hashes:
            return 0
        coordinator = self._manager.coordinator
        found = coordinator.find_longest_cache_hit(content.hashes, content.num_tokens)
        return int(found[1])

    # -- sessions ------------------------------------------------------------------------------

    def has_session(self, session: SessionKey) -> bool:
        """See ``LocalCache``."""
        return session in self._sam.sessions

    def release(self, session: SessionKey, span: Span, done: Callable[[], object]) -> str:
        """See ``LocalCache``."""
        edit = Edit(EditType.OFFLOAD, span.start_token, span.end_token)
        try:
            return self._sam.release_offloaded(session, edit, time.monotonic(), done)
        except Exception:
            self._on_fault("releasing what was offloaded")
            return "all sessions were dropped"

    def adopt(self, wish: Wish, local_tokens: int) -> None:
        """Record what is cached of a wish, as an unfinished request of its session would be.

        Args:
            wish: What has been brought.
            local_tokens: The prefix that was there before: it may be others' as well.
        """
        try:
            self._record(wish, local_tokens)
        except Exception:
            self._on_fault("recording what was loaded")

    def _record(self, wish: Wish, local_tokens: int) -> None:
        sam, key, now = self._sam, wish.session, time.monotonic()
        session = sam.sessions.get(key)
        if session is not None and session.live:
            return
        protections: tuple[Protection, ...] = ()
        if wish.ttl and (session is None or not session.protections):
            protections = (Protection(wish.ttl),)
        live = sam.request_added(SessionIntent(key, protections=protections), now)
        if live is None:
            return
        sam.request_scheduled(live, self._prompt_of(wish.content))
        prefixes = self._cached_prefixes(wish.content, local_tokens)
        sam.request_finished(live, prefixes, now, succeeded=False)

    def _prompt_of(self, content: Content) -> list[list[bytes]]:
        """A content's hashes per KV cache group, as ``prompt_hashes`` has those of a request."""
        steps = [
            layout.block_size // content.tokens_per_hash for layout in self._manager.group_layouts()
        ]
        return [list(content.hashes[step - 1 :: step]) for step in steps]

    def _cached_prefixes(self, content: Content, local_tokens: int) -> list[RecordedPrefix]:
        """What is cached of a content: of attention the blocks from the first on, without a gap;
        of states and windows those that there are."""
        pool = self._manager.block_pool
        prefixes: list[RecordedPrefix] = []
        for group, (layout, hashes) in enumerate(
            zip(self._manager.group_layouts(), self._prompt_of(content), strict=True)
        ):
            logical: list[int] = []
            blocks: list[Any] = []
            for k, h in enumerate(hashes):
                found = pool.get_cached_block(h, [group])
                if found:
                    logical.append(k)
                    blocks.append(found[0])
                elif not layout.is_checkpoint:
                    break
            prefixes.append(
                RecordedPrefix(
                    [block.block_id for block in blocks],
                    [block._block_hash for block in blocks],
                    logical if layout.is_checkpoint else None,
                    local_tokens // layout.block_size,
                )
            )
        return prefixes
