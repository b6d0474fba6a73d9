"""The scheduler's side of the tier: which chunk is where, and which goes when room is needed."""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from vllm_agent_hint.pooling.claims import Claim
from vllm_agent_hint.pooling.tier.files import ChunkFile
from vllm_agent_hint.pooling.tier.folder import ChunkFolder
from vllm_agent_hint.pooling.tier.users import SoleUsers, User

NOT_IN_HOST: Final = -1
"""Chunk id of what lies in the directory only."""

_WRITING: Final = -1
_MAX_NOTED: Final = 1 << 20


class TierSpec(CPULoadStoreSpec):
    """Chunks of one transfer, as the workers need them.

    Args:
        block_ids: Chunk ids in host memory, or ``NOT_IN_HOST``.
        files: One per chunk; empty where the tier has no directory.
    """

    def __init__(self, block_ids: list[int], files: list[ChunkFile]) -> None:
        super().__init__(block_ids)
        self.files = files


@dataclass(slots=True)
class _Chunk:
    """A chunk in host memory; ``readers`` is ``_WRITING`` until it can be read."""

    chunk_id: int
    readers: int = _WRITING


class SessionAwareOffloadingManager(OffloadingManager):
    """Chunks by claim, and within a claim by use: dead ones go first, protected ones last.

    As with the free queue of the GPU cache, a claim changes the order and nothing else: when only
    protected chunks are left, they are reused. Every operation is O(1) per key.

    It goes by requests: what those of one session alone have brought and used is deleted when the
    session is evicted, and goes first when it has ended; everything else may be anybody's.

    Args:
        num_chunks: Chunks in host memory.
        folder: Where chunks also lie as files; None for host memory only.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        num_chunks: int,
        folder: ChunkFolder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._clock = clock
        self._num_chunks = num_chunks
        self._free = list(range(num_chunks - 1, -1, -1))
        self._chunks: dict[bytes, _Chunk] = {}
        self._idle: tuple[OrderedDict[bytes, None], ...] = tuple(OrderedDict() for _ in Claim)
        """Chunks that could go at once, per claim, least recently used first."""
        self._claims: dict[bytes, Claim] = {}
        """Of keys that are not ordinary, in the tier or not."""
        self._writing_files: set[bytes] = set()
        self._doomed: set[bytes] = set()
        """To be deleted as soon as they are not read or written any more."""
        self._noted: set[bytes] = set()
        """Chunks whose files this server has written, or said that it uses them."""
        self._users = SoleUsers()
        self.user_of: Callable[[str], User] = lambda request_id: None
        """Whose a request is, by its id."""
        self.evicted = 0
        """Chunks that have made room for others."""
        self.refused = 0
        """Chunks that found no room."""

    # -- what vLLM asks ------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """See ``OffloadingManager``."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """See ``OffloadingManager``. A look into the directory only for what is not in memory."""
        chunk = self._chunks.get(key)
        if key in self._doomed:
            return LookupResult.MISS
        if chunk is not None:
            return LookupResult.HIT_PENDING if chunk.readers == _WRITING else LookupResult.HIT
        if key in self._writing_files:
            return LookupResult.HIT_PENDING
        if self.folder is not None and self.folder.holds(key):
            return LookupResult.HIT
        return LookupResult.MISS

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """See ``OffloadingManager``. By vLLM before 0.32: what a request finds on the GPU, too."""
        self._use(keys, req_context)
        self.refresh(keys)

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> TierSpec:
        """See ``OffloadingManager``."""
        # What it has found on the GPU before them is nowhere else named.
        all_keys = getattr(req_context, "_offload_key_positions", None) or keys
        self._users.used(all_keys, self._user(req_context))
        self._want(keys)
        chunk_ids: list[int] = []
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None or chunk.readers == _WRITING:
                chunk_ids.append(NOT_IN_HOST)
                continue
            if chunk.readers == 0:
                self._idle[self._claim(key)].pop(key, None)
            chunk.readers += 1
            chunk_ids.append(chunk.chunk_id)
        return TierSpec(chunk_ids, self._files(keys))

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """See ``OffloadingManager``."""
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.readers > 0:
                chunk.readers -= 1
                self._rest(key, chunk)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        """See ``OffloadingManager``. All of the keys find room, or none."""
        new: list[bytes] = []
        there: list[bytes] = []
        for key in dict.fromkeys(keys):
            (there if self._is_there(key) else new).append(key)
        self._use(there, req_context)
        evicted: list[bytes] = []
        missing = len(new) - len(self._free)
        if missing > 0:
            evicted = self._victims(missing, set(keys))
        if len(evicted) < missing and self.folder is None:
            self.refused += len(new)
            return None
        for key in evicted:
            self._drop(key)
        self.evicted += len(evicted)
        chunk_ids = [self._place(key) for key in new]
        self._users.brought(new, self._user(req_context))
        if self.folder is not None:
            self._note(new)
        return PrepareStoreOutput(
            keys_to_store=new,
            store_spec=TierSpec(chunk_ids, self._files(new)),
            evicted_keys=evicted,
        )

    def complete_store(
        self, keys: Collection[bytes], req_context: Any, success: bool = True
    ) -> None:
        """See ``OffloadingManager``."""
        for key in keys:
            self._writing_files.discard(key)
            chunk = self._chunks.get(key)
            if chunk is None:
                self._delete_if_doomed(key)
                continue
            if chunk.readers != _WRITING:
                continue
            if success:
                chunk.readers = 0
                self._rest(key, chunk)
            else:
                self._drop(key)
        if self.folder is not None:
            self.folder.sweep_soon(self._clock())

    def reset_cache(self) -> None:
        """See ``OffloadingManager``. vLLM reports none of the transfers that are under way."""
        self._free = list(range(self._num_chunks - 1, -1, -1))
        self._chunks.clear()
        self._writing_files.clear()
        self._doomed.clear()
        self._noted.clear()
        self._users.clear()
        for idle in self._idle:
            idle.clear()
        if self.folder is not None:
            self.folder.leave_behind()

    # -- what sessions ask ---------------------------------------------------------------------

    def holds(self, key: bytes) -> bool:
        """Whether a chunk could be loaded now."""
        return self.lookup(key, None) is LookupResult.HIT

    def claim(self, keys: Iterable[bytes], claim: Claim) -> None:
        """Say who wants chunks, whether they are here yet or not."""
        for key in keys:
            before = self._claim(key)
            if claim is Claim.ORDINARY:
                self._claims.pop(key, None)
            else:
                self._claims[key] = claim
            if claim is not before and key in self._idle[before]:
                del self._idle[before][key]
                self._idle[claim][key] = None

    def forget_claims(self, keys: Iterable[bytes]) -> None:
        """No session speaks for these keys any more: what it alone has used is dead."""
        for key in keys:
            is_dead = key in self._chunks and key in self._users
            self.claim((key,), Claim.DEAD if is_dead else Claim.ORDINARY)

    def refresh(self, keys: Iterable[bytes]) -> int:
        """Make chunks the most recently used of their claim.

        Returns:
            How many are here.
        """
        found = 0
        filed: list[bytes] = []
        for key in keys:
            idle = self._idle[self._claim(key)]
            if key in idle:
                idle.move_to_end(key)
            is_filed = self.folder is not None and self.folder.touch((key,)) > 0
            if is_filed:
                filed.append(key)
            found += is_filed or key in self._chunks
        self._note_files(filed)
        return found

    def delete(self, keys: Iterable[bytes], session: Hashable = None) -> int:
        """Delete chunks; those that are being read or written go as soon as that is over.

        Args:
            keys: Of chunks that nobody but the session has registered.
            session: Only what it alone has brought and used is deleted; the rest is no longer
                protected. None: all are deleted.

        Returns:
            How many were there.
        """
        deleted = 0
        keys = list(keys)
        self.claim(keys, Claim.ORDINARY)
        for key in keys:
            if session is None or self._is_alone(key, session):
                deleted += self._delete(key)
        return deleted

    @property
    def num_resident(self) -> int:
        """Chunks in host memory."""
        return len(self._chunks)

    @property
    def num_busy(self) -> int:
        """Chunks in host memory that are being read or written."""
        return len(self._chunks) - sum(map(len, self._idle))

    # -- within --------------------------------------------------------------------------------

    def _claim(self, key: bytes) -> Claim:
        return self._claims.get(key, Claim.ORDINARY)

    def _user(self, req_context: Any) -> User:
        return None if req_context is None else self.user_of(req_context.req_id)

    def _use(self, keys: Collection[bytes], req_context: Any) -> None:
        """A request makes use of chunks that are there."""
        self._users.used(keys, self._user(req_context))
        self._want(keys)

    def _want(self, keys: Collection[bytes]) -> None:
        """Whichever of these was to go stays."""
        if self._doomed:
            self._doomed.difference_update(keys)
        if self._claims:
            claim_of = self._claims.get
            self.claim([key for key in keys if claim_of(key) is Claim.DEAD], Claim.ORDINARY)
        self._note_files(keys)

    def _note_files(self, keys: Iterable[bytes]) -> None:
        """Tell the servers that have written these files, once, that this one uses them."""
        if self.folder is None:
            return
        fresh = [key for key in keys if key not in self._noted]
        if fresh:
            self._note(fresh)
            self.folder.mark_soon(fresh)

    def _note(self, keys: Iterable[bytes]) -> None:
        """Forgotten, a chunk is marked once more: then it is deleted by nobody."""
        if len(self._noted) >= _MAX_NOTED:
            self._noted.clear()
        self._noted.update(keys)

    def _is_alone(self, key: bytes, session: Hashable) -> bool:
        """Whether nobody but a session has used a chunk, here or on another server."""
        if not self._users.is_alone(key, session):
            return False
        return self.folder is None or not self.folder.is_marked(key)

    def _delete(self, key: bytes) -> bool:
        chunk = self._chunks.get(key)
        was_there = chunk is not None and key not in self._doomed
        self._users.forget(key)
        if key in self._writing_files or (chunk is not None and chunk.readers):
            self._doomed.add(key)
        elif chunk is not None:
            self._drop(key)
        was_filed = self.folder is not None and self.folder.delete((key,)) > 0
        return was_there or was_filed

    def _delete_if_doomed(self, key: bytes) -> None:
        """Nobody reads or writes a chunk any more."""
        if key not in self._doomed:
            return
        self._doomed.discard(key)
        if key in self._chunks:
            self._drop(key)
        if self.folder is not None and not self.folder.is_marked(key):
            self.folder.delete((key,))

    def _is_there(self, key: bytes) -> bool:
        if key in self._chunks or key in self._writing_files:
            return True
        return self.lookup(key, None) is not LookupResult.MISS

    def _files(self, keys: Iterable[bytes]) -> list[ChunkFile]:
        return [] if self.folder is None else [self.folder.file_of(key) for key in keys]

    def _place(self, key: bytes) -> int:
        if self.folder is not None:
            self._writing_files.add(key)
        if not self._free:
            return NOT_IN_HOST
        chunk = _Chunk(self._free.pop())
        self._chunks[key] = chunk
        return chunk.chunk_id

    def _rest(self, key: bytes, chunk: _Chunk) -> None:
        """A transfer of a chunk is over."""
        if chunk.readers:
            return
        if key in self._doomed:
            self._delete_if_doomed(key)
        else:
            self._idle[self._claim(key)][key] = None

    def _drop(self, key: bytes) -> None:
        chunk = self._chunks.pop(key)
        claim = self._claim(key)
        self._idle[claim].pop(key, None)
        if claim is Claim.DEAD:
            self._claims.pop(key)
        self._doomed.discard(key)
        if self.folder is None:
            self._users.forget(key)
        self._free.append(chunk.chunk_id)

    def _victims(self, wanted: int, spared: set[bytes]) -> list[bytes]:
        """At most ``wanted`` chunks that may go, the first ones to go first."""
        victims: list[bytes] = []
        for idle in self._idle:
            for key in idle:
                if len(victims) == wanted:
                    return victims
                if key not in spared:
                    victims.append(key)
        return victims
