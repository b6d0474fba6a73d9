"""Hashing the prompts of prefetches between two steps, so that no step has to wait for it."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from vllm_agent_hint.engine.own_prompts import PromptHasher, PromptInHashing
from vllm_agent_hint.hints import EditStatus
from vllm_agent_hint.pooling.capability import Outcome
from vllm_agent_hint.pooling.own_contents import OwnContents
from vllm_agent_hint.sessions.intent import SessionKey

logger = logging.getLogger("vllm.agent_hint")

SLICE_TOKENS: Final = 4_096
"""Hashed between two steps, of all prompts together: a millisecond with blocks of 16 tokens."""


@dataclass(eq=False, slots=True)
class _Job:
    """The prompts of one prefetch.

    Args:
        session: Whose.
        plain: Those that are still to be hashed, as the front end has sent them, last first.
        own: What becomes known of them.
        current: The one that is being hashed.
    """

    session: SessionKey
    plain: list[Mapping[str, Any]]
    own: OwnContents
    current: PromptInHashing | None = None


class OwnPromptQueue:
    """Prompts that are being hashed, first come, first served.

    What a slice has left is for those who come before the next step, so that a short prompt is
    known at once.

    Args:
        scheduler: vLLM's.
        needs_tokens: Whether contents must hold their tokens.
    """

    def __init__(self, scheduler: Any, *, needs_tokens: bool) -> None:
        self._scheduler = scheduler
        self._needs_tokens = needs_tokens
        self._jobs: deque[_Job] = deque()
        self._left = SLICE_TOKENS
        self._is_working = False
        """Whether somebody up the stack is at it: whoever is told of a prompt may ask for more."""
        self.is_paused = False
        """No step is to be expected, and none has to wait: all is hashed at once."""

    def __len__(self) -> int:
        """Prefetches that wait for their prompts."""
        return len(self._jobs)

    @cached_property
    def _hasher(self) -> PromptHasher:
        return PromptHasher(self._scheduler)

    def ask(self, session: SessionKey, prompts: Sequence[Mapping[str, Any]]) -> OwnContents:
        """Find out what prompts would leave in a cache; of those that can't be hashed, nothing."""
        own = OwnContents()
        self._jobs.append(_Job(session, list(reversed(prompts)), own))
        self._work()
        return own

    def step(self) -> None:
        """On the path of every step: hash a slice, less what was hashed since the last step."""
        if self._jobs:
            self._work()
        self._left = SLICE_TOKENS

    def drop(self, session: SessionKey, reason: str) -> None:
        """A session no longer wants what it has asked for."""
        for job in [job for job in self._jobs if job.session == session]:
            self._jobs.remove(job)
            job.own.handle.finish(Outcome.refused(reason))

    def abort_all(self, reason: str) -> None:
        """Nobody may have what was asked for."""
        jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            job.own.handle.finish(Outcome.refused(reason))

    def _work(self) -> None:
        if self._is_working:
            return
        self._is_working = True
        try:
            while self._jobs and (self._left > 0 or self.is_paused):
                job = self._jobs[0]
                if self._is_over(job):
                    self._jobs.popleft()
                    job.own.handle.finish(Outcome(EditStatus.APPLIED))
        finally:
            self._is_working = False

    def _is_over(self, job: _Job) -> bool:
        """Hash a part of a job; whether nothing is left of it then."""
        try:
            if job.current is None and job.plain:
                job.current = self._hasher.begin(job.plain.pop(), needs_tokens=self._needs_tokens)
            if job.current is not None:
                self._left -= job.current.go_on(self._left)
                if job.current.is_done:
                    content, job.current = job.current.content(), None
                    job.own.contents += [content] if content.hashes else []
        except Exception:
            logger.exception("vllm-agent-hint: hashing the prompt of a prefetch failed")
            job.own.contents.clear()
            return True
        return job.current is None and not job.plain
