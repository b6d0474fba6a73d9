"""Telling the engine which requests it aborts because they are complete."""

from collections.abc import Callable
from typing import Any


def process_outputs(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``OutputProcessor.process_outputs(...)``, once per batch of engine outputs.

    Stock: finds stop strings, which only the front end can see, and lists the requests that they
    end in ``reqs_to_abort``. To the engine such an end looks like a client that has gone.
    Ours: names each of them twice. Stock's engine takes the ids as a set; ours reads a repeated
    id as a regular end, after which edits run and the context is recorded.
    If it moves: a turn that ends with a stop string counts as aborted.
    """
    processed = wrapped(*args, **kwargs)
    if processed.reqs_to_abort:
        processed.reqs_to_abort = [*processed.reqs_to_abort, *processed.reqs_to_abort]
    return processed
