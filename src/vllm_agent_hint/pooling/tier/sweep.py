"""What is too much in the tier's directory goes: least recently used chunks, and what was left.

Nothing here is on the scheduler's thread: there may be a million files.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from vllm_agent_hint.pooling.tier.files import ASIDE, SUFFIX, unlink

OWN_GROUP: Final = "own-"
"""Begins the names of folders that one server has for itself, after a reset."""

_ASIDE_SECONDS: Final = 3_600.0
"""So long nobody writes one chunk: who has begun it is dead."""
_LEFT_SECONDS: Final = 86_400.0
"""What nobody has used for so long in a server's own folder was left by one that is gone."""


@dataclass(slots=True)
class Sweep:
    """One round through a directory.

    Args:
        root: The operator's directory.
        group: This server's folder in it.
        bound: Bytes of all chunks there.
        wall_clock: Seconds since the epoch.
    """

    root: str
    group: str
    bound: int
    wall_clock: Callable[[], float] = time.time
    _now: float = field(init=False, default=0.0)

    def run(self) -> int:
        """
        Returns:
            Files deleted.
        """
        self._now = self.wall_clock()
        return self._keep_the_bound() + self._delete_what_was_left()

    def _keep_the_bound(self) -> int:
        """The least recently used go first, and what a dead writer has left aside goes anyway."""
        deleted = kept = 0
        chunks: list[tuple[float, int, str]] = []
        for name, path, status in _files(f"{self.root}/{self.group}"):
            if name.endswith(SUFFIX) and not name.startswith(ASIDE):
                chunks.append((status.st_mtime, status.st_size, path))
            elif name.startswith(ASIDE) and self._now - status.st_mtime > _ASIDE_SECONDS:
                deleted += unlink(path)
        chunks.sort(reverse=True)
        for _, size, path in chunks:
            kept += size
            if kept > self.bound:
                deleted += unlink(path)
        return deleted

    def _delete_what_was_left(self) -> int:
        """Folders that other servers had for themselves, and use no more."""
        deleted = 0
        for entry in _entries(self.root):
            if not entry.name.startswith(OWN_GROUP) or entry.name == self.group:
                continue
            for _, path, status in _files(entry.path):
                if self._now - status.st_mtime > _LEFT_SECONDS:
                    deleted += unlink(path)
            _delete_empty(entry.path, unchanged_since=self._now - _LEFT_SECONDS)
        return deleted


def delete_group(folder: str) -> None:
    """Delete a folder of chunks that nobody else uses."""
    for _, path, _ in _files(folder):
        unlink(path)
    _delete_empty(folder, unchanged_since=math.inf)


def _delete_empty(folder: str, *, unchanged_since: float) -> None:
    """A folder that is not empty stays, and so does one in which somebody may be about to write."""
    for path in [*(entry.path for entry in _entries(folder)), folder]:
        with suppress(OSError):
            if os.stat(path).st_mtime < unchanged_since:
                os.rmdir(path)


def _files(folder: str) -> Iterator[tuple[str, str, os.stat_result]]:
    """Name, path and status of all files of chunks."""
    for below in _entries(folder):
        for entry in _entries(below.path):
            with suppress(OSError):
                yield entry.name, entry.path, entry.stat(follow_symlinks=False)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
