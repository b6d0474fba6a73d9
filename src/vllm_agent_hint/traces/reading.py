"""Reading a trace file, whatever its format."""

import gzip
import io
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

from vllm_agent_hint.traces.line import Line, read_lines
from vllm_agent_hint.traces.lmcache import read_lmcache
from vllm_agent_hint.traces.model import Trace, TraceError
from vllm_agent_hint.traces.mooncake import read_mooncake
from vllm_agent_hint.traces.plain import read_plain
from vllm_agent_hint.traces.weka import read_weka

GZIP_MAGIC: Final = b"\x1f\x8b"

Reader = Callable[[str, Iterable[Line]], Trace]

_MARKS: Final[tuple[tuple[frozenset[str], Reader], ...]] = (
    (frozenset({"format", "version"}), read_plain),
    (frozenset({"id", "requests", "block_size"}), read_weka),
    (frozenset({"timestamp", "input_length", "hash_ids"}), read_mooncake),
    (frozenset({"s", "t", "in", "runs"}), read_lmcache),
)
"""What the first line of each format has."""


def read_trace(path: Path) -> Trace:
    """Read a trace, compressed with gzip or not. The format is recognised by the first line.

    Raises:
        TraceError: It can't be read, or is of no known format.
    """
    try:
        content = path.read_bytes()
        if content.startswith(GZIP_MAGIC):
            content = gzip.decompress(content)
        text = content.decode()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}; give a trace file") from None
    except (EOFError, UnicodeDecodeError):
        raise TraceError(f"{path}: is no complete text file; fetch it anew") from None
    lines = read_lines(path.name, io.StringIO(text))
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path.name}: is empty; give a file with one request or session a line")
    trace = _reader_for(first)(path.name, chain([first], lines))
    if not trace.sessions:
        raise TraceError(f"{path.name}: holds no request; give a file with one at least")
    return trace


def _reader_for(first: Line) -> Reader:
    values: Mapping[str, Any] = first.values
    for marks, reader in _MARKS:
        if marks <= values.keys():
            return reader
    raise first.error(
        "the line",
        "is of no known format; write the plain one, whose first line is "
        '{"format":"vllm-agent-hint-trace","version":1,"block_size":16} (docs/traces.md)',
    )
