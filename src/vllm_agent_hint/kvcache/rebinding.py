"""Giving a global of vLLM's modules another value while something is built from it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def rebound(modules: Iterable[Any], name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Give a global of some modules another value while something is built from it.

    Stock names a class of its module's globals where we want a subclass. Scoped, so that the
    pools and managers which vLLM builds elsewhere stay stock, and independent of the order in
    which modules were imported.

    Args:
        modules: Those without such a global are passed over.
        name: The global.
        replacement: Makes the new value from the old one.
    """
    found = [(module, vars(module)[name]) for module in modules if name in vars(module)]
    try:
        for module, value in found:
            setattr(module, name, replacement(value))
        yield
    finally:
        for module, value in found:
            setattr(module, name, value)
