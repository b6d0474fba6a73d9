"""Hashing the prompts of prefetches between two steps, so that no step has to wait for it."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from vllm_agent_hint.engine.own_prompts import PromptHasher, PromptInHashing
from vllm_agent_hint.hints import EditStatus
from vllm_agent_hint.pooling.capability import Content, OperationHandle, Outcome
from vllm_agent_hint.pooling.own_contents import Take
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
        take: Gets each that is known.
        handle: See ``AskOwnContents``.
        current: The one that is being hashed.
    """

    session: SessionKey
    plain: list[Mapping[str, Any]]
    take: Take
    handle: OperationHandle = field(default_factory=OperationHandle)
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

    def __len__(self) -> int:
        """Prefetches that wait for their prompts."""
        return len(self._jobs)

    @cached_property
    def _hasher(self) -> PromptHasher:
        return PromptHasher(self._scheduler)

    def ask(
        self, session: SessionKey, prompts: Sequence[Mapping[str, Any]], take: Take
    ) -> OperationHandle:
        """Find out what prompts would leave in a cache. See ``AskOwnContents``."""
        job = _Job(session, list(reversed(prompts)), take)
        self._jobs.append(job)
        self._work()
        return job.handle

    def step(self) -> None:
        """On the path of every step: hash a slice, less what was hashed since the last step."""
        if self._jobs:
            self._work()
        self._left = SLICE_TOKENS

    def drop(self, session: SessionKey, reason: str) -> None:
        """A session no longer wants what it has asked for."""
        for job in [job for job in self._jobs if job.session == session]:
            self._jobs.remove(job)
            job.handle.finish(Outcome.refused(reason))

    def abort_all(self, reason: str) -> None:
        """Nobody may have what was asked for."""
        jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            job.handle.finish(Outcome.refused(reason))

    def _work(self) -> None:
        if self._is_working:
            return
        self._is_working = True
        try:
            while self._jobs and self._left > 0:
                self._go_on(self._jobs[0])
        finally:
            self._is_working = False

    def _go_on(self, job: _Job) -> None:
        """Hash a part of a job, and hand over what is known by it."""
        try:
            content = self._hash_part(job)
        except Exception:
            logger.exception("vllm-agent-hint: hashing the prompt of a prefetch failed")
            self._end(job, Outcome(EditStatus.FAILED))
            return
        if content is not None and content.hashes:
            # Whoever takes it looks it up: in one slice one that is longer than a slice, at most.
            job.take(content)
        if job.current is None and not job.plain:
            self._end(job, Outcome(EditStatus.APPLIED))

    def _hash_part(self, job: _Job) -> Content | None:
        """
        Returns:
            The prompt that is known by that, if one is.
        """
        if job.current is None:
            if not job.plain:
                return None
            job.current = self._hasher.begin(job.plain.pop(), needs_tokens=self._needs_tokens)
        self._left -= job.current.go_on(self._left)
        if not job.current.is_done:
            return None
        content, job.current = job.current.content(), None
        return content

    def _end(self, job: _Job, outcome: Outcome) -> None:
        self._jobs.popleft()
        job.handle.finish(outcome)
