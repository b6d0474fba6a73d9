"""The workers' side of the tier: copies between the KV cache, host memory and files.

With torch's own indexing, so that it runs wherever the KV cache is a torch tensor, the CPU
platform included; vLLM's worker needs a GPU.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from vllm_agent_hint.pooling.tier.files import ChunkFile, DamagedChunkError
from vllm_agent_hint.pooling.tier.manager import NOT_IN_HOST, TierSpec


@dataclass(frozen=True, slots=True)
class _Piece:
    """The GPU blocks of one transfer that lie in one chunk.

    Args:
        group: KV cache group.
        block_ids: In the GPU cache.
        slots: Which of the chunk's blocks they are.
        chunk_id: In host memory.
        file: Of the chunk; None without a directory.
    """

    group: int
    block_ids: list[int]
    slots: list[int]
    chunk_id: int
    file: ChunkFile | None


_Read = dict[int, list[torch.Tensor]]
"""Per piece that could be read: its pages, layer by layer."""


@dataclass(slots=True)
class _Job:
    job_id: int
    pieces: list[_Piece]
    num_bytes: int
    started_at: float
    due_at: float
    is_load: bool
    contents: list[bytes]
    """Of a save: what goes into the files."""
    files: "Future[_Read] | None" = None
    """Of a load from files: what is being read."""
    is_finished: bool = False
    """Whether it has happened and is only to be reported."""


class TorchTierWorker(OffloadingWorker):
    """One worker's part of the tier.

    A throttle makes a transfer take as long as it would on a slower store, without keeping the
    engine waiting: a save has left the GPU cache when it is submitted, and only its end is late;
    a load happens when it is due. Files are read in a thread of their own: one whose reading takes
    long keeps nobody waiting but who loads it.

    Args:
        kv_caches: vLLM's ``CanonicalKVCaches``.
        blocks_per_chunk: GPU blocks in a chunk.
        num_chunks: Chunks in host memory.
        rank: This worker's.
        load_bytes_per_second: None for no throttle.
        save_bytes_per_second: The same.
        clock: Monotonic seconds.
        sleep: For ``wait``.
    """

    def __init__(
        self,
        kv_caches: Any,
        *,
        blocks_per_chunk: int,
        num_chunks: int,
        rank: int,
        load_bytes_per_second: float | None = None,
        save_bytes_per_second: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._kv_caches = kv_caches
        self._blocks_per_chunk = blocks_per_chunk
        self._rank = rank
        self._speeds = {True: load_bytes_per_second, False: save_bytes_per_second}
        self._free_at = {True: 0.0, False: 0.0}
        self._clock = clock
        self._sleep = sleep
        self._jobs: deque[_Job] = deque()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="agent-hint-tier")
        self.failed_loads: dict[int, set[int]] = {}
        """GPU blocks that could not be loaded, by job id, until they are taken."""
        # Written once, so that the system gives the memory now and not in the middle of a save.
        self._host = [
            torch.empty(
                (num_chunks, blocks_per_chunk, tensor.page_size_bytes), dtype=torch.int8
            ).zero_()
            for tensor in kv_caches.tensors
        ]

    @property
    def num_groups(self) -> int:
        """KV cache groups."""
        return len(self._kv_caches.group_data_refs)

    # -- what vLLM asks ------------------------------------------------------------------------

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """See ``OffloadingWorker``. The blocks may be overwritten from now on."""
        pieces = list(self._pieces(src_spec, dst_spec))
        contents: list[bytes] = []
        for piece in pieces:
            if piece.chunk_id != NOT_IN_HOST:
                for gpu, host in self._pairs(piece):
                    host.copy_(gpu)
            if piece.file is not None:
                contents.append(self._content_for_file(piece))
        self._queue(job_id, pieces, contents, is_load=False)
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """See ``OffloadingWorker``."""
        self._queue(job_id, list(self._pieces(dst_spec, src_spec)), [], is_load=True)
        return True

    def get_finished(self) -> list[TransferResult]:
        """See ``OffloadingWorker``. A failed load is reported as done: see ``failed_loads``."""
        now = self._clock()
        finished: list[TransferResult] = []
        waiting: deque[_Job] = deque()
        for job in self._jobs:
            if not job.is_finished:
                if not self._is_ready(job, now):
                    waiting.append(job)
                    continue
                self._finish(job)
            seconds = max(now - job.started_at, 0.0)
            finished.append(TransferResult(job.job_id, True, job.num_bytes, seconds))
        self._jobs = waiting
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """See ``OffloadingWorker``: until blocks and chunks of these jobs may be used anew.

        A save has its blocks' content already, in its chunks if there is room for it.
        """
        for job in self._jobs:
            if job.job_id in job_ids and job.is_load and not job.is_finished:
                self._sleep(max(0.0, job.due_at - self._clock()))
                self._finish(job)
                job.is_finished = True

    def shutdown(self) -> None:
        """See ``OffloadingWorker``."""
        self._jobs.clear()
        self._reader.shutdown(wait=False, cancel_futures=True)

    def take_failed_loads(self) -> dict[int, set[int]]:
        """GPU blocks that were not loaded although their job has ended, by job id."""
        failed, self.failed_loads = self.failed_loads, {}
        return failed

    # -- within --------------------------------------------------------------------------------

    def _queue(
        self, job_id: int, pieces: list[_Piece], contents: list[bytes], *, is_load: bool
    ) -> None:
        now = self._clock()
        num_bytes = sum(
            ref.page_size_bytes * len(piece.block_ids)
            for piece in pieces
            for ref in self._kv_caches.group_data_refs[piece.group]
        )
        due_at, speed = now, self._speeds[is_load]
        if speed is not None:
            # One transfer after the other, as on a single link.
            due_at = max(now, self._free_at[is_load]) + num_bytes / speed
            self._free_at[is_load] = due_at
        job = _Job(job_id, pieces, num_bytes, now, due_at, is_load, contents)
        self._jobs.append(job)
        self._is_ready(job, now)

    def _is_ready(self, job: _Job, now: float) -> bool:
        """Whether a job can be finished without waiting. Begins to read files that are due."""
        if job.due_at > now:
            return False
        self._begin_to_read(job)
        return job.files is None or job.files.done()

    def _begin_to_read(self, job: _Job) -> None:
        is_filed = any(piece.chunk_id == NOT_IN_HOST for piece in job.pieces)
        if job.is_load and is_filed and job.files is None:
            job.files = self._reader.submit(self._read, list(job.pieces))

    def _read(self, pieces: list[_Piece]) -> _Read:
        """In the reader's thread: touches nothing but files and what it returns."""
        found: _Read = {}
        for k, piece in enumerate(pieces):
            if piece.chunk_id == NOT_IN_HOST:
                with suppress(DamagedChunkError):
                    found[k] = self._pages_of_file(piece)
        return found

    def _finish(self, job: _Job) -> None:
        if not job.is_load:
            self._write_files(job)
            return
        self._begin_to_read(job)
        read = {} if job.files is None else job.files.result()
        failed: set[int] = set()
        for k, piece in enumerate(job.pieces):
            if piece.chunk_id != NOT_IN_HOST:
                for gpu, host in self._pairs(piece):
                    gpu.copy_(host)
            elif k in read:
                self._take_in(piece, read[k])
            else:
                failed.update(piece.block_ids)
        if failed:
            self.failed_loads[job.job_id] = failed

    def _write_files(self, job: _Job) -> None:
        """What can't be written is not there; whoever asks for it computes it anew."""
        for piece, content in zip(job.pieces, job.contents, strict=False):
            assert piece.file is not None
            try:
                piece.file.write(self._rank, content)
            except OSError:
                continue

    def _take_in(self, piece: _Piece, layers: list[torch.Tensor]) -> None:
        refs = self._kv_caches.group_data_refs[piece.group]
        for ref, pages in zip(refs, layers, strict=True):
            target = self._kv_caches.tensors[ref.tensor_idx].tensor
            for block_id, page in zip(piece.block_ids, pages, strict=True):
                target[block_id, : ref.page_size_bytes].copy_(page)

    def _pairs(self, piece: _Piece) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Page by page: where it is in the GPU cache, and where in host memory.

        One copy each, which is a ``memcpy``: torch's indexing by a list goes byte by byte, and
        takes ten times as long. On the path of every save and load.
        """
        for ref in self._kv_caches.group_data_refs[piece.group]:
            gpu = self._kv_caches.tensors[ref.tensor_idx].tensor
            host = self._host[ref.tensor_idx][piece.chunk_id]
            size = ref.page_size_bytes
            for block_id, slot in zip(piece.block_ids, piece.slots, strict=True):
                yield gpu[block_id, :size], host[slot, :size]

    def _pages_of_file(self, piece: _Piece) -> list[torch.Tensor]:
        """
        Raises:
            DamagedChunkError: The file can't be used.
        """
        if piece.file is None:
            raise DamagedChunkError("neither in memory nor in a file")
        refs = self._kv_caches.group_data_refs[piece.group]
        sizes = [ref.page_size_bytes for ref in refs]
        blocks = self._blocks_per_chunk
        raw = piece.file.read(self._rank, blocks * sum(sizes))
        whole = torch.frombuffer(bytearray(raw), dtype=torch.int8)
        pages = []
        first = 0
        for size in sizes:
            pages.append(whole[first : first + blocks * size].view(blocks, size)[piece.slots])
            first += blocks * size
        return pages

    def _content_for_file(self, piece: _Piece) -> bytes:
        """Layer after layer, the pages of the piece's blocks."""
        refs = self._kv_caches.group_data_refs[piece.group]
        content = torch.empty(
            len(piece.block_ids) * sum(ref.page_size_bytes for ref in refs), dtype=torch.int8
        )
        first = 0
        for ref in refs:
            gpu, size = self._kv_caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes
            for block_id in piece.block_ids:
                content[first : first + size].copy_(gpu[block_id, :size])
                first += size
        return content.numpy().tobytes()

    def _pieces(self, gpu: Any, tier: TierSpec) -> Iterator[_Piece]:
        """Cut a transfer into chunks: per group, the blocks are logically contiguous."""
        per_chunk = self._blocks_per_chunk
        block_ids = gpu.block_ids.tolist()
        chunk_ids = tier.block_ids.tolist()
        first_block = first_chunk = 0
        for group, (count, start) in enumerate(
            zip(gpu.group_sizes, gpu.block_indices, strict=True)
        ):
            if not count:
                continue
            skipped = start % per_chunk
            for k in range(-(-(count + skipped) // per_chunk)):
                slots = range(max(0, skipped - k * per_chunk), per_chunk)
                low = max(0, k * per_chunk - skipped)
                ids = block_ids[first_block + low : first_block + count][: len(slots)]
                which = first_chunk + k
                file = tier.files[which] if tier.files else None
                yield _Piece(group, ids, list(slots)[: len(ids)], chunk_ids[which], file)
            first_block += count
            first_chunk += -(-(count + skipped) // per_chunk)
