"""Polls a server for its traffic until the time is up or somebody presses Ctrl-C."""

import gzip
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, TextIO, cast

from vllm_agent_hint.cli.capture.assembly import CaptureTotals, TraceAssembly
from vllm_agent_hint.cli.capture.reader import CaptureError, CaptureReader
from vllm_agent_hint.traces.plain import PlainWriter

POLL_SECONDS: Final = 1.0


def record(
    url: str, out: Path, seconds: float | None = None, api_key: str | None = None
) -> CaptureTotals:
    """Record into a file, compressed if its name ends with ``.gz``.

    What has been taken stays in the file, however the capture ends.

    Args:
        url: Of the server.
        out: The file; one that is there is replaced as soon as the capture runs.
        seconds: For how long; None until SIGINT or SIGTERM.
        api_key: Where the server has one.

    Raises:
        CaptureError: It could not begin, or the server has ended it.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    with _told_to_stop() as stop, CaptureReader(url, api_key) as reader, _open(out) as file:
        assembly = TraceAssembly(PlainWriter(file, reader.block_size))
        try:
            _poll(reader, assembly, stop, deadline)
        except CaptureError as error:
            raise CaptureError(f"{error}; {summary(assembly.finish())} are in {out}") from None
        return assembly.finish()


def summary(totals: CaptureTotals) -> str:
    """One line for people."""
    unhinted = totals.requests - totals.hinted
    return (
        f"{totals.requests:,} requests ({totals.hinted:,} hinted, {unhinted:,} not) of "
        f"{totals.sessions:,} named sessions, {totals.prompt_tokens:,} prompt and "
        f"{totals.output_tokens:,} output tokens, {totals.dropped:,} dropped, "
        f"{totals.unfinished:,} not finished and left out"
    )


def _poll(
    reader: CaptureReader,
    assembly: TraceAssembly,
    stop: threading.Event,
    deadline: float | None,
) -> None:
    """Take what there is once a second, and to the end before leaving."""
    while True:
        is_last = stop.is_set() or (deadline is not None and time.monotonic() >= deadline)
        part = reader.take()
        assembly.add(part)
        if part["more"]:
            continue
        if is_last:
            return
        left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
        stop.wait(max(0.0, min(POLL_SECONDS, left)))


@contextmanager
def _told_to_stop() -> Iterator[threading.Event]:
    """Set by Ctrl-C or SIGTERM, in place of an exception that could lose a part on its way."""
    stop = threading.Event()

    def note(_signum: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _open(out: Path) -> TextIO:
    if out.suffix == ".gz":
        return cast(TextIO, gzip.open(out, "wt", encoding="utf-8"))
    return out.open("w", encoding="utf-8")
