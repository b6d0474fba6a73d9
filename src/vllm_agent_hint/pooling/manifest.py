"""Which session has which content, kept beside the content for servers that have never seen it.

A page per session in a place that servers share: a directory (``pages``), or a store of their own
(``adapters.mooncake_pages``). Its name is a digest of the session's full name, so that the place
tells nobody who the sessions are; what it holds are hashes.
"""

import hashlib
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final

from vllm_agent_hint.pooling.capability import Content
from vllm_agent_hint.pooling.pages import Pages, PagesInDirectory
from vllm_agent_hint.sessions.intent import SessionKey

_MAX_HASHES: Final = 1_000_000


class IncompatibleError(ValueError):
    """Another server has hashed the session's content in a way that this one does not know."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a manifest says of a session.

    Args:
        contents: Its contexts, the latest last.
        ttl: Seconds that are left of it.
    """

    contents: tuple[Content, ...]
    ttl: float


class SessionManifest:
    """The pages of all sessions.

    They are written by a thread of its own, the latest of each session only: a step of the
    scheduler must not wait for a disk.

    Args:
        pages: Where. A folder stands for files in it, and is made when the first one is written.
        scheme: Names how this server makes hashes of tokens, which may be known only once it has
            begun to. Pages of another one are of no use.
        wall_clock: Seconds since the epoch: monotonic ones mean nothing to another server.
    """

    def __init__(
        self,
        pages: Pages | Path,
        scheme: Callable[[], str],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._pages = PagesInDirectory(pages, wall_clock) if isinstance(pages, Path) else pages
        self._scheme = scheme
        self._wall_clock = wall_clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agent-hint-manifest")
        self._lock = Lock()
        self._wanted: dict[str, tuple[dict[str, Any], float] | None] = {}

    def write(self, session: SessionKey, contents: list[Content], ttl: float) -> None:
        """Note what a session has, soon."""
        page = {
            "scheme": self._scheme(),
            "until": self._wall_clock() + ttl,
            "contents": [_as_plain(content) for content in contents],
        }
        self._soon(_name(session), (page, ttl))

    def forget(self, session: SessionKey) -> None:
        """Delete a session's page, soon."""
        self._soon(_name(session), None)

    def read(self, session: SessionKey) -> Page | None:
        """A session's page; None if there is none that could be read.

        Raises:
            IncompatibleError: There is one, of another scheme.
        """
        name = _name(session)
        with self._lock:
            if name in self._wanted and self._wanted[name] is None:
                return None
        try:
            page = json.loads(self._pages.get(name))
            if page["scheme"] != self._scheme():
                raise IncompatibleError("its hashes were made in another way than this server's")
            contents = tuple(_from_plain(plain, session) for plain in page["contents"])
            ttl = max(0.0, float(page["until"]) - self._wall_clock())
        except IncompatibleError:
            raise
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Page(contents, ttl) if contents else None

    def holds(self, session: SessionKey) -> bool:
        """Whether there is a page of a session, of whatever scheme."""
        return self._pages.holds(_name(session))

    def finish(self) -> None:
        """Wait until all is written. For tests, and when the server ends."""
        self._thread.submit(lambda: None).result()

    def _soon(self, name: str, wanted: tuple[dict[str, Any], float] | None) -> None:
        with self._lock:
            is_queued = name in self._wanted
            self._wanted[name] = wanted
        if not is_queued:
            self._thread.submit(self._write_now, name)

    def _write_now(self, name: str) -> None:
        with self._lock:
            wanted = self._wanted.pop(name)
        with suppress(OSError):
            if wanted is None:
                self._pages.delete(name)
                return
            page, ttl = wanted
            self._pages.put(name, json.dumps(page).encode(), ttl)


def _name(session: SessionKey) -> str:
    return hashlib.sha256(json.dumps(list(session)).encode()).hexdigest()


def _as_plain(content: Content) -> dict[str, Any]:
    return {
        "hashes": [h.hex() for h in content.hashes],
        "tokens_per_hash": content.tokens_per_hash,
        "servable_tokens": content.servable_tokens,
        "lora": getattr(content.lora_request, "lora_name", None),
    }


def _from_plain(plain: dict[str, Any], session: SessionKey) -> Content:
    """The adapter is named for people; its hashes stand for it."""
    hashes = [bytes.fromhex(h) for h in plain["hashes"][:_MAX_HASHES]]
    servable = plain["servable_tokens"]
    return Content(
        hashes,
        int(plain["tokens_per_hash"]),
        session.cache_salt,
        servable_tokens=None if servable is None else int(servable),
    )
