"""No fault of the session core reaches vLLM."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from vllm_agent_hint.sessions.manager import SessionAwareManager


class HasSessions(Protocol):
    """What a guarded hook is a method of."""

    sam: SessionAwareManager | None

    def drop_sessions(self, where: str) -> None:
        """Go on without sessions. Called in the handler of the fault."""


H = TypeVar("H", bound=HasSessions)
P = ParamSpec("P")
T = TypeVar("T")


def answers(
    otherwise: T,
) -> Callable[[Callable[Concatenate[H, P], T]], Callable[Concatenate[H, P], T]]:
    """Let no fault of a hook reach its caller: drop the session core and go on as plain LRU.

    Args:
        otherwise: What the hook answers without it.
    """

    def guard(hook: Callable[Concatenate[H, P], T]) -> Callable[Concatenate[H, P], T]:
        @wraps(hook)
        def guarded(self: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
            if self.sam is None:
                return otherwise
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                self.drop_sessions(hook.__name__)
                return otherwise

        return guarded

    return guard
