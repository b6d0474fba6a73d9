"""The traffic of an engine, recorded for ``bench replay``: hashes and times, never text.

Nobody who has the recording can test a guess of a prompt or of a session's name against it: every
digest is keyed with a secret that lives as long as the capture, in the server alone.
"""

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_agent_hint.sessions.facts import TurnFacts

MAX_BLOCKS: Final = 4_000_000
"""Digests that may wait to be taken, 8 bytes each."""

MAX_REQUESTS: Final = 100_000
"""Requests that may wait to be taken."""

PART_BLOCKS: Final = 200_000
"""Digests after which a part ends, so that no call holds up the engine for long."""

PART_REQUESTS: Final = 5_000
"""Requests after which it ends, too."""

IDLE_SECONDS: Final = 60.0
"""A capture whose reader does not come for so long is over."""

DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from, as far as it says so.

    Args:
        tenant: Whose it is.
        cache_salt: A part of the session's name.
        session_id: Its session; None without one.
        parent_session_id: The session that started that one.
        is_hinted: Whether it carries a hint.
        operation_id: Names the turn to the front end; empty where it does not know it.
    """

    tenant: str = ""
    cache_salt: str | None = None
    session_id: str | None = None
    parent_session_id: str | None = None
    is_hinted: bool = False
    operation_id: str = ""


@dataclass(slots=True)
class _Pending:
    arrived_at: float
    origin: Origin
    is_complete: bool = False


class TrafficCapture:
    """Requests that have arrived and ended since the capture began, until its reader takes them.

    What is more than the bounds is dropped, whole requests, and counted.

    Args:
        capture_id: Names the capture to its reader.
        key: Of all digests; the engines of one server share it.
        block_size: Tokens per hashed block.
        now: Monotonic seconds, from which all times count.
        max_blocks: See ``MAX_BLOCKS``.
    """

    def __init__(
        self,
        capture_id: str,
        key: bytes,
        block_size: int,
        now: float,
        *,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        self.capture_id = capture_id
        self.block_size = block_size
        self.num_dropped = 0
        self._block_hash = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES, person=b"block")
        self._name_hash = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES, person=b"name")
        self._started_at = now
        self._read_at = now
        self._pending: dict[str, _Pending] = {}
        """Arrived and not ended, in the order of arrival."""
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque()
        """Ended and not taken, each with its operation."""
        self._by_operation: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        """Those of them of which the front end can still say how they ended."""
        self._num_blocks = 0
        """Digests in ``_waiting``."""
        self._max_blocks = max_blocks

    @property
    def num_unfinished(self) -> int:
        return len(self._pending)

    def has_lapsed(self, now: float) -> bool:
        """Whether its reader has gone without a word."""
        return now - self._read_at > IDLE_SECONDS

    def request_added(self, request_id: str, origin: Origin, now: float) -> None:
        """A request has arrived."""
        self._pending[request_id] = _Pending(now, origin)

    def request_complete(self, request_id: str) -> None:
        """However the request ends now, it has come to a regular end."""
        if request_id in self._pending:
            self._pending[request_id].is_complete = True

    def request_ended(
        self,
        request_id: str,
        prompt_hashes: Sequence[bytes],
        *,
        prompt_tokens: int,
        output_tokens: int,
        finish: str,
        now: float,
    ) -> None:
        """A request has ended; no-op for one that had arrived before the capture began.

        About 0.3 us per block.

        Args:
            request_id: As it was added.
            prompt_hashes: Of the complete blocks of its prompt.
            prompt_tokens: Of all of its prompt.
            output_tokens: That it has made.
            finish: vLLM's finish reason.
            now: Monotonic seconds.
        """
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        num_blocks = len(prompt_hashes)
        too_many = len(self._waiting) >= MAX_REQUESTS
        if too_many or self._num_blocks + num_blocks > self._max_blocks:
            self.num_dropped += 1
            return
        origin = pending.origin
        self._num_blocks += num_blocks
        ended: dict[str, Any] = {
            "t": pending.arrived_at - self._started_at,
            "seconds": now - pending.arrived_at,
            "session": self._session_name(origin, origin.session_id),
            "parent": self._session_name(origin, origin.parent_session_id),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "finish": "stop" if pending.is_complete else finish,
            "ended": None,
            "tool": None,
            "hinted": origin.is_hinted,
            "blocks": b"".join(self._digest(block) for block in prompt_hashes),
        }
        self._waiting.append((origin.operation_id, ended))
        if origin.operation_id:
            self._by_operation[origin.operation_id].append(ended)

    def turn_ended(self, operation_id: str, facts: TurnFacts) -> None:
        """The front end has seen how a turn ended; what has been handed out stays as it was."""
        for ended in self._by_operation.get(operation_id, ()):
            ended["ended"] = None if facts.ended == "unknown" else facts.ended
            ended["tool"] = self._name("tool", *facts.tools) if facts.tools else None

    def take(self, now: float) -> dict[str, Any]:
        """The next part of what has ended, for the reader.

        Returns:
            Plain data for msgpack: ``requests`` in the order of their ends; ``more``, whether
            there are others already; ``until``: every request that arrived before this many
            seconds has been handed out or dropped; ``dropped`` so far; ``unfinished``.
        """
        self._read_at = now
        part: list[dict[str, Any]] = []
        taken = 0
        while self._waiting and taken < PART_BLOCKS and len(part) < PART_REQUESTS:
            operation_id, request = self._waiting.popleft()
            self._by_operation.pop(operation_id, None)
            taken += len(request["blocks"]) // DIGEST_BYTES
            part.append(request)
        self._num_blocks -= taken
        return {
            "requests": part,
            "more": bool(self._waiting),
            "until": self._settled_until(now),
            "dropped": self.num_dropped,
            "unfinished": self.num_unfinished,
        }

    def _settled_until(self, now: float) -> float:
        """O(requests that wait)."""
        open_since = next(iter(self._pending.values())).arrived_at if self._pending else now
        return min([open_since - self._started_at, *(ended["t"] for _, ended in self._waiting)])

    def _digest(self, block_hash: bytes) -> bytes:
        keyed = self._block_hash.copy()
        keyed.update(block_hash)
        return keyed.digest()

    def _session_name(self, origin: Origin, session_id: str | None) -> str | None:
        if session_id is None:
            return None
        return self._name("session", origin.tenant, origin.cache_salt, session_id)

    def _name(self, *parts: str | None) -> str:
        keyed = self._name_hash.copy()
        keyed.update(json.dumps(parts).encode())
        return keyed.hexdigest()
