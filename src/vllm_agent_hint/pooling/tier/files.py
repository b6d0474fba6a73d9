"""KV chunks as files: what survives this server, and what another one can take up.

A chunk appears at once or not at all (it is written aside and renamed), and says how long it is
and what its checksum is: what a dying writer has left behind is never taken for a chunk.
"""

import hashlib
import json
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct("<4sIQ")
_MAGIC: Final = b"AHK1"
_SWEEP_SECONDS: Final = 5.0
_SUFFIX: Final = ".kv"


class DamagedChunkError(OSError):
    """A file is gone, short, or holds other bytes than were written."""


def namespace(parts: dict[str, object]) -> str:
    """A folder name for all that has to be the same for chunks to be exchangeable."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """Where one worker's part of a chunk lies. Travels from the scheduler to the workers."""

    folder: str
    name: str

    def location(self, rank: int) -> str:
        """As text: thousands of them are looked at between two steps, and each ``Path`` costs
        several times what the look does."""
        return f"{self.folder}/{self.name[:2]}/{self.name}.{rank}{_SUFFIX}"

    def path(self, rank: int) -> Path:
        return Path(self.location(rank))

    def write(self, rank: int, content: bytes | memoryview) -> None:
        """
        Raises:
            OSError: Nothing was written.
        """
        target = self.path(rank)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with aside.open("wb") as file:
                file.write(_HEADER.pack(_MAGIC, zlib.crc32(content), len(content)))
                file.write(content)
            aside.replace(target)
        finally:
            with suppress(OSError):
                aside.unlink()

    def read(self, rank: int, length: int) -> bytes:
        """A file that is damaged is deleted, so that it is not asked for again and again.

        Raises:
            DamagedChunkError: There is no such chunk that could be used.
        """
        try:
            raw = self.path(rank).read_bytes()
        except OSError as error:
            raise DamagedChunkError(str(error)) from error
        content = raw[_HEADER.size :]
        if len(raw) != _HEADER.size + length or _HEADER.unpack_from(raw) != (
            _MAGIC,
            zlib.crc32(content),
            length,
        ):
            _unlink(self.path(rank))
            raise DamagedChunkError(f"{self.name} is not what was written")
        return content


class ChunkFolder:
    """The scheduler's side: which chunks there are. It never reads one.

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
        self._next_sweep = 0.0

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

    def delete(self, keys: Iterable[bytes]) -> int:
        """
        Returns:
            How many were there.
        """
        deleted = 0
        for key in keys:
            paths = [self.file_of(key).path(rank) for rank in range(self._world_size)]
            deleted += sum(map(_unlink, paths)) > 0
        return deleted

    def leave_behind(self) -> None:
        """What is here is not to be used any more: other chunks go into another folder."""
        self.group = namespace({"after": self.group, "at": time.time_ns(), "by": os.getpid()})
        self._folder = str(self.root / self.group)

    def sweep(self, now: float) -> int:
        """Keep the bound, now and then: the least recently used go first.

        Args:
            now: Monotonic seconds.

        Returns:
            Files deleted.
        """
        if now < self._next_sweep:
            return 0
        self._next_sweep = now + _SWEEP_SECONDS
        files = sorted(_files_below(Path(self._folder)), reverse=True)
        kept = deleted = 0
        for _, size, path in files:
            kept += size
            if kept > self._bound:
                deleted += _unlink(path)
        return deleted


def _files_below(folder: Path) -> Iterator[tuple[float, int, Path]]:
    for path in folder.glob(f"*/*{_SUFFIX}"):
        with suppress(OSError):
            status = path.stat()
            yield status.st_mtime, status.st_size, path


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
