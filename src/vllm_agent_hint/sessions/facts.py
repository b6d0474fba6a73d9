"""What the front end has seen of a turn's end, and the engine can't."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self, get_args

MAX_TOOLS: Final = 16
MAX_TOOL_NAME: Final = 64

Ended = Literal["tool_call", "final_message", "cut", "disconnected", "unknown"]


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """How a turn ended.

    Args:
        ended: ``tool_call``: the client is to run a tool and come back. ``final_message``: the
            model has said all that it wanted to. ``cut``: it ran out of tokens.
            ``disconnected``: the client did not wait for the end. ``unknown``: nobody can tell.
        tools: Names of the tools called, first to last, each once; what a model wrote, so it is
            never shown.
    """

    ended: Ended
    tools: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, ended: Any, tools: Iterable[Any] = ()) -> Self:
        """Within bounds, whatever came: an ending of another name is ``unknown``."""
        known: Ended = ended if ended in get_args(Ended) else "unknown"
        names: dict[str, None] = {}
        for tool in tools:
            if isinstance(tool, str) and tool and len(names) < MAX_TOOLS:
                # A lone surrogate is JSON and has no UTF-8, in which it travels to the engine.
                clean = tool[:MAX_TOOL_NAME].encode(errors="replace").decode()
                names[clean] = None
        return cls(known, tuple(names))
