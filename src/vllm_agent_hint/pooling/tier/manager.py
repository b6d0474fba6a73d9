"""The scheduler's side of the tier: which chunk is where, and which goes when room is needed."""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
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
from vllm_agent_hint.pooling.tier.files import ChunkFile, ChunkFolder

NOT_IN_HOST: Final = -1
"""Chunk id of what lies in the directory only."""

_WRITING: Final = -1


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
    is_doomed: bool = False


class SessionAwareOffloadingManager(OffloadingManager):
    """Chunks by claim, and within a claim by use: dead ones go first, protected ones last.

    As with the free queue of the GPU cache, a claim changes the order and nothing else: when only
    protected chunks are left, they are reused. Every operation is O(1) per key.

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
        if chunk is not None and not chunk.is_doomed:
            return LookupResult.HIT_PENDING if chunk.readers == _WRITING else LookupResult.HIT
        if key in self._writing_files:
            return LookupResult.HIT_PENDING
        if self.folder is not None and self.folder.holds(key):
            return LookupResult.HIT
        return LookupResult.MISS

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """See ``OffloadingManager``."""
        self.refresh(keys)

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> TierSpec:
        """See ``OffloadingManager``."""
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
        new = [key for key in dict.fromkeys(keys) if not self._is_there(key)]
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
            if chunk is None or chunk.readers != _WRITING:
                continue
            if success:
                chunk.readers = 0
                self._rest(key, chunk)
            else:
                self._drop(key)
        if self.folder is not None:
            self.folder.sweep(self._clock())

    def reset_cache(self) -> None:
        """See ``OffloadingManager``. vLLM reports none of the transfers that are under way."""
        self._free = list(range(self._num_chunks - 1, -1, -1))
        self._chunks.clear()
        self._writing_files.clear()
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
        """Nobody speaks for these keys any more: those that are here are dead."""
        for key in keys:
            if key in self._chunks:
                self.claim((key,), Claim.DEAD)
            else:
                self._claims.pop(key, None)

    def refresh(self, keys: Iterable[bytes]) -> int:
        """Make chunks the most recently used of their claim.

        Returns:
            How many are here.
        """
        found = 0
        for key in keys:
            idle = self._idle[self._claim(key)]
            if key in idle:
                idle.move_to_end(key)
            is_filed = self.folder is not None and self.folder.touch((key,)) > 0
            found += is_filed or key in self._chunks
        return found

    def delete(self, keys: Iterable[bytes]) -> int:
        """Delete chunks; those that are being read or written go as soon as that is over.

        Returns:
            How many were there.
        """
        keys = list(keys)
        deleted = set()
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and not chunk.is_doomed:
                deleted.add(key)
                if chunk.readers == 0:
                    self._drop(key)
                else:
                    chunk.is_doomed = True
            self._claims.pop(key, None)
        if self.folder is not None:
            deleted.update(key for key in keys if self.folder.delete((key,)))
        return len(deleted)

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

    def _is_there(self, key: bytes) -> bool:
        return key in self._chunks or self.lookup(key, None) is not LookupResult.MISS

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
        if chunk.is_doomed:
            self._drop(key)
            if self.folder is not None:
                self.folder.delete((key,))
        else:
            self._idle[self._claim(key)][key] = None

    def _drop(self, key: bytes) -> None:
        chunk = self._chunks.pop(key)
        claim = self._claim(key)
        self._idle[claim].pop(key, None)
        if claim is Claim.DEAD:
            self._claims.pop(key)
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
