"""Where the pages of a manifest lie."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

_SUFFIX: Final = ".json"
_KEPT_SECONDS: Final = 86_400.0


class Pages(Protocol):
    """Small values by name, in a place that servers share.

    Whoever can't answer raises an ``OSError``, and soon: ``get`` and ``holds`` are asked between
    two steps of a scheduler. The others are called by one thread that may wait.
    """

    def put(self, name: str, page: bytes, seconds: float) -> None:
        """Write a page, in place of an older one; it is of use for so many seconds."""

    def get(self, name: str) -> bytes:
        """A page; empty if there is none."""

    def holds(self, name: str) -> bool:
        """Whether there is a page; False where that can't be told."""

    def delete(self, name: str) -> None:
        """No-op for what is not there."""


class PagesInDirectory:
    """See ``Pages``. A file each.

    Args:
        folder: Made when the first page is written.
        wall_clock: Seconds since the epoch, as the files' own times are.
    """

    def __init__(self, folder: Path, wall_clock: Callable[[], float]) -> None:
        self._folder = folder
        self._wall_clock = wall_clock

    def put(self, name: str, page: bytes, seconds: float) -> None:
        """See ``Pages``. Whole or not at all, whoever reads it meanwhile."""
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        # No process id: in two containers it may be the same.
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            aside.write_bytes(page)
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        self._forget_old_pages()

    def get(self, name: str) -> bytes:
        """See ``Pages``."""
        return self._path(name).read_bytes()

    def holds(self, name: str) -> bool:
        """See ``Pages``."""
        try:
            return self._path(name).exists()
        except OSError:
            return False

    def delete(self, name: str) -> None:
        """See ``Pages``."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def _forget_old_pages(self) -> None:
        """Once in a while the directory loses pages of which nobody has heard for a day, and what
        servers that have died were writing."""
        if self._wall_clock() % 64 > 1:
            return
        for path in (*self._folder.glob(f"*{_SUFFIX}"), *self._folder.glob(f".*{_SUFFIX}.*")):
            if path.stat().st_mtime < self._wall_clock() - _KEPT_SECONDS:
                path.unlink(missing_ok=True)
