"""The directory of the tier, as the scheduler sees it: which chunks there are, and for how long."""

import os
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from vllm_agent_hint.pooling.tier.files import ChunkFile, unlink
from vllm_agent_hint.pooling.tier.sweep import OWN_GROUP, Sweep, delete_group

_SWEEP_SECONDS: Final = 5.0
_SWEEP_SHARE: Final = 0.05
"""Of the time may be spent in sweeping, however many files there are."""


class ChunkFolder:
    """Which chunks there are. It never reads one.

    What can wait is done by a thread of its own: a step of the scheduler must not wait for a disk.

    Args:
        root: The operator's directory.
        group: Of exchangeable chunks; see ``namespace``.
        world_size: Workers, each with files of its own.
        bound: Bytes of all files below ``root / group``.
    """

    def __init__(self, root: Path, group: str, world_size: int, bound: int) -> None:
        self.root = root
        self.group = group
        self._folder = str(root / group)
        self._world_size = world_size
        self._bound = bound
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agent-hint-tier-files")
        self._sweep: Future[int] | None = None
        self._next_sweep = 0.0
        self._sweep_took = 0.0

    def file_of(self, key: bytes) -> ChunkFile:
        return ChunkFile(self._folder, key.hex())

    def holds(self, key: bytes) -> bool:
        """A look into the file system for each worker."""
        file = self.file_of(key)
        return all(os.path.exists(file.location(rank)) for rank in range(self._world_size))

    def touch(self, keys: Iterable[bytes]) -> int:
        """Make chunks the most recently used.

        Returns:
            How many are there.
        """
        found = 0
        for key in keys:
            with suppress(OSError):
                for rank in range(self._world_size):
                    os.utime(self.file_of(key).location(rank))
                found += 1
        return found

    def mark_soon(self, keys: Iterable[bytes]) -> None:
        """Say to the servers that have written chunks that this one uses them."""
        self._thread.submit(_mark, [self.file_of(key) for key in keys])

    def is_marked(self, key: bytes) -> bool:
        """Whether another server than its writer uses a chunk."""
        return self.file_of(key).is_marked(0)

    def delete(self, keys: Iterable[bytes]) -> int:
        """
        Returns:
            How many were there.
        """
        deleted = 0
        for key in keys:
            file = self.file_of(key)
            deleted += sum(unlink(file.location(rank)) for rank in range(self._world_size)) > 0
        return deleted

    def leave_behind(self) -> None:
        """What is here is not to be used any more: other chunks go into another folder.

        The first one may be other servers'; the later ones are this server's alone.
        """
        if self.group.startswith(OWN_GROUP):
            self._thread.submit(delete_group, self._folder)
        self.group = f"{OWN_GROUP}{uuid.uuid4().hex[:24]}"
        self._folder = str(self.root / self.group)

    def sweep_soon(self, now: float) -> None:
        """Keep the bound, now and then.

        Args:
            now: Monotonic seconds.
        """
        if now < self._next_sweep or (self._sweep is not None and not self._sweep.done()):
            return
        self._next_sweep = now + max(_SWEEP_SECONDS, self._sweep_took / _SWEEP_SHARE)
        self._sweep = self._thread.submit(self._timed_sweep)

    def finish(self) -> None:
        """Wait until all is done that can wait. For tests."""
        self._thread.submit(lambda: None).result()

    def _timed_sweep(self) -> int:
        began = time.monotonic()
        try:
            return Sweep(str(self.root), self.group, self._bound).run()
        finally:
            self._sweep_took = time.monotonic() - began


def _mark(files: list[ChunkFile]) -> None:
    for file in files:
        file.mark(0)
