"""What a command needs beyond the plugin itself."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_of_extra(name: str) -> Iterator[None]:
    """Around imports that need an extra of this package: without it, exit and say the cure."""
    try:
        yield
    except ModuleNotFoundError as missing:
        sys.exit(f"{missing.name} is missing. Cure: pip install 'vllm-agent-hint[{name}]'")
