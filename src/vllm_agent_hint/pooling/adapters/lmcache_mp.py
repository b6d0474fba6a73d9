"""``LMCacheMPConnector``: LMCache in a process of its own, which several servers may share."""

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, Final

from vllm_agent_hint.pooling.adapters.write_through import WriteThroughStore
from vllm_agent_hint.pooling.capability import Content, Operation
from vllm_agent_hint.pooling.probe import PROBE_ID

_OURS: Final = "agent-hint-"
_ANSWER_SECONDS: Final = 0.05
"""A look-up is a round trip between two processes; with a dead server each costs so much."""
_PAUSE_SECONDS: Final = 0.001
_MAX_CONTENTS: Final = 1_024


class LMCacheMPStore(WriteThroughStore):
    """See ``Store``.

    Keys are made of tokens, in chunks of the LMCache server's size: with larger chunks than vLLM's
    blocks, the last blocks of a context are never saved, and an offload is ``partial``. Generated
    tokens are saved as the connector is told to.

    A look-up is answered a few steps later, to the request that asked. Ours is another one with
    each step, so that it gets the time for its answer at once. What a look-up has found is locked
    until it is given back, and that makes it the most recently used.

    Args:
        scheduler: vLLM's.
        connector: An ``LMCacheMPConnector`` of the scheduler's side, as LMCache's package has it.
    """

    needs_tokens = True

    def __init__(self, scheduler: Any, connector: Any) -> None:
        super().__init__(scheduler, connector)
        self._contents: OrderedDict[bytes, Content] = OrderedDict()
        """What somebody has asked about, by its last hash: hashes alone are no keys here."""
        self._probe_ids = count()
        self._ask_once = connector.get_num_new_matched_tokens
        self._matched_tokens = self._wait_for_answer
        connector.get_num_new_matched_tokens = self._wait_for_answer

    def why_not(self, operation: Operation) -> str:
        """See ``Store``."""
        if operation is Operation.OFFLOAD and not self._connector._can_store:
            return "kv_role has it that this server only loads"
        return super().why_not(operation)

    def start_save(self, save_id: str, content: Content, blocks: Sequence[Sequence[int]]) -> None:
        """See ``Store``."""
        self._note(content)
        super().start_save(save_id, content, blocks)

    def loadable_tokens(self, content: Content) -> int | None:
        """See ``Store``."""
        self._note(content)
        return super().loadable_tokens(content)

    def _next_probe_id(self) -> str:
        return f"{PROBE_ID}-{next(self._probe_ids)}"

    def _wait_for_answer(self, request: Any, *args: Any, **more: Any) -> Any:
        answer = self._ask_once(request, *args, **more)
        if answer[0] is None and request.request_id.startswith(_OURS):
            give_up_at = time.monotonic() + _ANSWER_SECONDS
            while answer[0] is None and time.monotonic() < give_up_at:
                time.sleep(_PAUSE_SECONDS)
                answer = self._ask_once(request, *args, **more)
            if answer[0] is None:
                # Else the end of the request would wait for it, and with it the engine.
                self._connector.scheduler_adapter.cleanup_lookup_result(request.request_id)
        return answer

    def _forget(self, request: Any) -> None:
        """As for a request that ends after its look-up, and give back what that has locked."""
        tracker = self._connector.request_trackers.get(request.request_id)
        if tracker is not None and tracker.num_lmcache_hit_tokens:
            self._connector.scheduler_adapter.free_lookup_locks(
                tracker.get_token_ids(),
                0,
                tracker.num_lmcache_hit_tokens,
                request.request_id,
                cache_salt=tracker.cache_salt,
                request_configs=tracker.request_configs,
            )
        self._connector.request_finished(request, [])

    def refresh(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        """See ``Store``. Of content that nobody has asked about nothing can be told."""
        hashes = list(hashes)
        content = self._contents.get(hashes[-1]) if hashes else None
        if content is None:
            return 0, 0
        found = (self.loadable_tokens(content) or 0) // content.tokens_per_hash
        gone = min(len(hashes), len(content.hashes) - found)
        return len(hashes) - gone, gone

    def _note(self, content: Content) -> None:
        if content.hashes and content.token_ids is not None:
            self._contents[content.hashes[-1]] = content
            self._contents.move_to_end(content.hashes[-1])
            if len(self._contents) > _MAX_CONTENTS:
                self._contents.popitem(last=False)

    @property
    def _tokens_per_hash(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.hash_block_size)
