"""One line of a trace file, whose fields are read with errors that name place and cure."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vllm_agent_hint.traces.model import ChainIds, TraceError, ids_of


class Line:
    """A JSON object, or a part of one.

    Args:
        file: For errors.
        number: Of the line, counted from 1.
        values: The object.
        inside: Where in the line it lies, such as ``requests.3.``; empty for the line itself.
    """

    def __init__(self, file: str, number: int, values: Any, inside: str = "") -> None:
        self.file = file
        self.number = number
        self.inside = inside
        if not isinstance(values, Mapping):
            raise self.error(inside.rstrip(".") or "the line", "must be a JSON object")
        self.values = values

    def error(self, field: str, cure: str) -> TraceError:
        """What is wrong with a field."""
        where = field if field == "the line" else f"field {self.inside + field!r}"
        return TraceError(f"{self.file}, line {self.number}, {where}: {cure}")

    def whole(self, field: str, *, default: int | None = None, minimum: int = 0) -> int:
        """A whole number.

        Raises:
            TraceError: It is none, too small, or missing where there is no default.
        """
        value = self.values.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(field, f"must be a whole number of at least {minimum}")
        if value < minimum:
            raise self.error(field, f"must be at least {minimum}")
        return value

    def seconds(self, field: str, *, scale: float = 1.0) -> float:
        """A time that has to be there; ``scale`` makes it seconds."""
        value = self.maybe_seconds(field, scale=scale)
        if value is None:
            raise self.error(field, "is missing; give a time, 0 or later")
        return value

    def maybe_seconds(self, field: str, *, scale: float = 1.0) -> float | None:
        """A time, or None where there is none."""
        value = self.values.get(field)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            raise self.error(field, "must be a time, 0 or later; leave it out if unknown")
        return float(value) * scale

    def text(self, field: str) -> str | None:
        """A string, or None where there is none."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, str):
            raise self.error(field, "must be a string; leave it out if unknown")
        return value

    def flag(self, field: str) -> bool | None:
        """True, false, or None where there is neither."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.error(field, "must be true or false; leave it out if unknown")
        return value

    def parts(self, field: str) -> Iterator["Line"]:
        """The objects of a list."""
        value = self.values.get(field)
        if not isinstance(value, list):
            raise self.error(field, "must be a list of objects")
        for k, part in enumerate(value):
            yield Line(self.file, self.number, part, f"{self.inside}{field}.{k}.")

    def ids(self, field: str) -> list[int]:
        """A list of whole numbers, 0 or above."""
        value = self.values.get(field)
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise self.error(field, "must be a list of whole numbers, 0 or above")
        return value

    def runs(self, field: str = "runs") -> ChainIds:
        """The ids of ``[start, length, ...]``."""
        value = self.ids(field)
        if len(value) % 2:
            raise self.error(field, "must hold pairs of start and length; one number is over")
        return ids_of(value)

    def complete_blocks(self, field: str, ids: ChainIds, tokens: int, block_size: int) -> ChainIds:
        """The ids of a prompt's complete blocks, an id of the incomplete one at its end left out.

        Raises:
            TraceError: There are not as many ids as blocks.
        """
        complete = tokens // block_size
        if not complete <= len(ids) <= -(-tokens // block_size):
            raise self.error(
                field,
                f"names {len(ids)} blocks, but a prompt of {tokens} tokens has {complete} complete "
                f"blocks of {block_size}; correct the prompt's length or the ids",
            )
        return ids[:complete]


def read_lines(file: str, lines: Iterable[str]) -> Iterator[Line]:
    """The objects of a JSONL file; empty lines are passed over.

    Raises:
        TraceError: A line is no JSON object.
    """
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            raise TraceError(
                f"{file}, line {number}, the line: is no JSON; was the file cut off? Remove it"
            ) from None
        yield Line(file, number, values)
