"""KV chunks as files: what survives this server, and what another one can take up.

A chunk appears at once or not at all (it is written aside and linked), and says how long it is
and what its checksum is: what a dying writer has left behind is never taken for a chunk.

Servers that share a directory know of each other by the files alone. One that makes use of a
chunk that it has not written itself marks it, and a marked chunk is deleted by nobody but for
want of room.
"""

import hashlib
import json
import os
import stat
import struct
import uuid
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SUFFIX: Final = ".kv"
ASIDE: Final = "."
"""What is being written begins with it."""

_HEADER: Final = struct.Struct("<4sIQ")
_MAGIC: Final = b"AHK1"
_MARK: Final = stat.S_IXUSR
"""The mode bit that says that others than its writer use a chunk. It means nothing to a file that
nobody runs, a look at the file shows it, and no time that anybody sets touches it."""


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
        return f"{self.folder}/{self.name[:2]}/{self.name}.{rank}{SUFFIX}"

    def path(self, rank: int) -> Path:
        return Path(self.location(rank))

    def write(self, rank: int, content: bytes | memoryview) -> None:
        """
        Raises:
            OSError: Nothing was written.
        """
        target = self.path(rank)
        target.parent.mkdir(parents=True, exist_ok=True)
        # No process id: in two containers it may be the same.
        aside = target.with_name(f"{ASIDE}{target.name}.{uuid.uuid4().hex}")
        try:
            with aside.open("wb") as file:
                file.write(_HEADER.pack(_MAGIC, zlib.crc32(content), len(content)))
                file.write(content)
            self._appear(aside, target, rank)
        finally:
            unlink(aside)

    def _appear(self, aside: Path, target: Path, rank: int) -> None:
        try:
            target.hardlink_to(aside)
        except FileExistsError:
            # Another server has written it at the same time.
            self.mark(rank)
        except OSError:
            # A file system without links.
            aside.replace(target)

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
            unlink(self.path(rank))
            raise DamagedChunkError(f"{self.name} is not what was written")
        return content

    def mark(self, rank: int) -> None:
        """Say that others than its writer use the chunk, if it is there."""
        path = self.location(rank)
        with suppress(OSError):
            os.chmod(path, os.stat(path).st_mode | _MARK)

    def is_marked(self, rank: int) -> bool:
        """Whether others than its writer use the chunk."""
        try:
            return bool(os.stat(self.location(rank)).st_mode & _MARK)
        except OSError:
            return False


def unlink(path: str | Path) -> bool:
    """Delete a file.

    Returns:
        Whether it was there.
    """
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
