"""vLLM's ``OffloadingConnector``, whatever tier is behind it.

What can be done depends on the tier's manager: any of them saves, loads and refreshes; the one of
this project also knows claims and deletes.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.request import RequestStatus

from vllm_agent_hint.pooling.adapters.request_users import user_of
from vllm_agent_hint.pooling.capability import Content, Operation
from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.pooling.manifest import SessionManifest
from vllm_agent_hint.pooling.probe import PROBE_ID, request_of
from vllm_agent_hint.pooling.tier.files import namespace
from vllm_agent_hint.pooling.tier.manager import SessionAwareOffloadingManager
from vllm_agent_hint.pooling.tier.users import OwnRequest, User
from vllm_agent_hint.sessions.intent import SessionKey


class OffloadingStore:
    """See ``Store``.

    Saves go the connector's own way: a request that has finished, with blocks to store. The
    connector fences the blocks itself, so that none is overwritten before it has been copied.

    Args:
        scheduler: vLLM's.
        connector: An ``OffloadingConnector`` of the scheduler's side.
    """

    needs_tokens = False

    def __init__(self, scheduler: Any, connector: Any) -> None:
        self._scheduler = scheduler
        self._connector = connector
        self._side = connector.connector_scheduler
        self._sessions: SessionAwareOffloadingManager | None = None
        if isinstance(self._side.manager, SessionAwareOffloadingManager):
            self._sessions = self._side.manager
            self._sessions.user_of = self._user_of
        self.manifest = self._open_manifest()
        self._states: dict[str, list[tuple[int, int, int, bytes]]] = {}
        """Of saves that begin with the next step: ``(group, block, end token, its hash)`` of the
        state checkpoints, which the connector takes by hand-over only."""
        self._build_meta = self._side.build_connector_meta
        self._side.build_connector_meta = self._build_meta_with_ours
        self._users: dict[str, Hashable] = {}
        """Of what the connector may have to store once the request is over, by its id."""

    def _open_manifest(self) -> SessionManifest | None:
        folder = None if self._sessions is None else self._sessions.folder
        if folder is None:
            return None
        return SessionManifest(folder.root / "sessions" / folder.group, self._hash_scheme)

    def _hash_scheme(self) -> str:
        config = self._scheduler.vllm_config.cache_config
        return namespace(
            {
                "algorithm": getattr(config, "prefix_caching_hash_algo", None),
                "begins_with": kv_cache_utils.NONE_HASH.hex(),
                "unit": self._side.config.tokens_per_hash,
            }
        )

    @property
    def name(self) -> str:
        """See ``Store``."""
        return f"OffloadingConnector over {type(self._side.manager).__name__}"

    def why_not(self, operation: Operation) -> str:
        """See ``Store``."""
        if operation is Operation.EVICT and self._sessions is None:
            return f"{type(self._side.manager).__name__} can't delete: its copy goes when it is old"
        return ""

    # -- saving --------------------------------------------------------------------------------

    def start_save(self, save_id: str, content: Content, blocks: Sequence[Sequence[int]]) -> None:
        """See ``Store``."""
        request = _finished_request(content, save_id)
        self._connector.on_new_request(request)
        status = self._side._req_status[save_id]
        status.update_offload_keys()
        groups = [list(ids) for ids in blocks]
        per_chunk = self._side.config.blocks_per_chunk
        for config in self._side.config.kv_group_configs:
            ids = groups[config.group_idx]
            if getattr(config, "requires_cow_source", False):
                self._note_states(save_id, config, content, ids)
                groups[config.group_idx] = [0] * len(ids)
            else:
                groups[config.group_idx] = _whole_chunks(ids, per_chunk)
        status.update_block_id_groups(tuple(groups))
        self._users[save_id] = OwnRequest.TRANSFER
        self._scheduler.finished_req_ids.add(save_id)

    def is_saving(self, save_id: str) -> bool:
        """See ``Store``."""
        return save_id in self._side._req_status

    def _note_states(self, save_id: str, config: Any, content: Content, ids: Sequence[int]) -> None:
        step = config.tokens_per_block // content.tokens_per_hash
        self._states.setdefault(save_id, []).extend(
            (
                config.group_idx,
                block_id,
                (k + 1) * config.tokens_per_block,
                content.hashes[(k + 1) * step - 1],
            )
            for k, block_id in enumerate(ids)
            if block_id
        )

    def _build_meta_with_ours(self, scheduler_output: Any) -> Any:
        """As the connector, which stores what requests have left until a step after their end."""
        tracked = self._scheduler.agent_hint.tracked
        if tracked:
            for new in scheduler_output.scheduled_new_reqs:
                if new.req_id in tracked:
                    self._users[new.req_id] = tracked[new.req_id].live.session.key
        meta = self._hand_over_states(scheduler_output)
        if self._users:
            for request_id in scheduler_output.finished_req_ids or ():
                self._users.pop(request_id, None)
        return meta

    def _user_of(self, request_id: str) -> User:
        """Whose a request is. One that comes to run is not noted yet."""
        found = self._users.get(request_id)
        return user_of(self._scheduler, request_id) if found is None else found

    def _hand_over_states(self, scheduler_output: Any) -> Any:
        """As the connector, with the checkpoints that our saves add to vLLM's own hand-over.

        The step has given out blocks since: one that holds something else by now is left out.
        """
        if self._states:
            states, self._states = self._states, {}
            block_state = getattr(scheduler_output, "kv_connector_block_state", None)
            blocks = self._scheduler.kv_cache_manager.block_pool.blocks
            for save_id, entries in states.items():
                whole = [
                    (group, block_id, end)
                    for group, block_id, end, h in entries
                    if (blocks[block_id].block_hash or b"").startswith(h)
                ]
                if block_state is not None and whole:
                    block_state.boundary_state_offloads[save_id] = whole
        return self._build_meta(scheduler_output)

    # -- looking -------------------------------------------------------------------------------

    def loadable_tokens(self, content: Content) -> int | None:
        """See ``Store``. Asks as for a request, and leaves nothing behind.

        Of what lies in a tier below, the answer is that it can't be told without waiting. A load
        asks anew with each step, until it has been brought up.
        """
        request = _finished_request(content)
        self._connector.on_new_request(request)
        try:
            found, _ = self._side.get_num_new_matched_tokens(request, 0)
        finally:
            status = self._side._req_status.pop(PROBE_ID, None)
            if status is not None:
                self._side.manager.on_request_finished(status.req_context)
        return None if found is None else int(found)

    # -- keeping -------------------------------------------------------------------------------

    def refresh(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        """See ``Store``. Counts attention only: a checkpoint is not there for every block.

        What lies in a tier below is neither found nor gone: to look there would bring it up.
        """
        hashes = list(hashes)
        keys = list(self._keys(hashes, attention_only=True))
        per_chunk = [c.hashes_per_chunk for c in self._attention_groups]
        expected = sum(len(hashes) // step for step in per_chunk)
        if self._sessions is not None:
            found = self._sessions.refresh(keys)
            self._sessions.refresh(self._keys(hashes, checkpoints_only=True))
            return found, max(0, expected - found)
        manager = self._side.manager
        top, context = getattr(manager, "primary_tier", manager), ReqContext(req_id=PROBE_ID)
        keys += self._keys(hashes, checkpoints_only=True)
        there = [key for key in keys if top.lookup(key, context) is not LookupResult.MISS]
        manager.touch(there, context)
        attention = {config.group_idx for config in self._attention_groups}
        found = sum(get_offload_group_idx(key) in attention for key in there)
        return found, 0 if self._has_tiers_below else max(0, expected - found)

    def claim(self, hashes: Iterable[bytes], claim: Claim) -> None:
        """See ``Store``. A tier that knows no claims goes by use alone."""
        if self._sessions is None:
            return
        keys = self._keys(list(hashes))
        if claim is Claim.DEAD:
            self._sessions.forget_claims(keys)
        else:
            self._sessions.claim(keys, claim)

    def delete(self, hashes: Iterable[bytes], session: SessionKey | None = None) -> int:
        """See ``Store``."""
        assert self._sessions is not None
        return self._sessions.delete(self._keys(list(hashes)), session)

    # -- within --------------------------------------------------------------------------------

    @property
    def _has_tiers_below(self) -> bool:
        return bool(getattr(self._side.manager, "secondary_tiers", ()))

    @property
    def _attention_groups(self) -> list[Any]:
        return [
            config
            for config in self._side.config.kv_group_configs
            if config.sliding_window_size_in_chunks is None
        ]

    def _keys(
        self,
        hashes: Sequence[bytes],
        *,
        attention_only: bool = False,
        checkpoints_only: bool = False,
    ) -> Iterator[bytes]:
        """Keys of content, in each group that is asked for.

        A chunk may span several hashes and is named by its last one. Which one that is can't be
        told from a part of a context, so that every hash is tried; those that name none are none.
        """
        for config in self._side.config.kv_group_configs:
            is_checkpoint = config.sliding_window_size_in_chunks is not None
            if (attention_only and is_checkpoint) or (checkpoints_only and not is_checkpoint):
                continue
            for h in hashes:
                yield make_offload_key(h, config.group_idx)


def _finished_request(content: Content, request_id: str = PROBE_ID) -> Any:
    """A request that has run: such a one may be saved."""
    request = request_of(content, request_id)
    request.status = RequestStatus.FINISHED_STOPPED
    return request


def _whole_chunks(ids: list[int], per_chunk: int) -> list[int]:
    """A chunk of which a block is missing can't be saved: leave all of it out."""
    if per_chunk > 1:
        for first in range(0, len(ids), per_chunk):
            if 0 in ids[first : first + per_chunk]:
                ids[first : first + per_chunk] = [0] * len(ids[first : first + per_chunk])
    return ids
