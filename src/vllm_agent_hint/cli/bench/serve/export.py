"""Writes a script down for public load generators, as Mooncake traces.

Each line is a request on its own: when it is sent, how long it is, and ids of its chunks of tokens,
equal exactly where prompts have equal beginnings. What a load generator can't know is laid down:
requests are sent at fixed times (an open loop) that assume the scale's prefill rate, and answers
are random text. ``extra`` is what AIPerf merges into the body of the request; others ignore it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_agent_hint.cli.bench.serve.scale import Scale
from vllm_agent_hint.cli.bench.serve.script import Actor, Piece, Script
from vllm_agent_hint.cli.demo.client import Traffic
from vllm_agent_hint.hints import HINT_KEY

CHUNK_TOKENS: Final = 16
SECONDS_PER_TOKEN: Final = 0.01
"""Of an answer, assumed."""
ONE_SHOTS: Final = "one-shots"


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a trace.

    Args:
        at: Seconds after the start of the play.
        file: Name of the actor's file, without suffix.
    """

    at: float
    file: str
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    hint: dict[str, Any] | None

    def as_json(self, *, with_extra: bool) -> str:
        line: dict[str, Any] = {
            "timestamp": round(self.at * 1e3),
            "input_length": self.input_length,
            "output_length": self.output_length,
            "hash_ids": list(self.hash_ids),
        }
        if with_extra and self.hint is not None:
            line["extra"] = {HINT_KEY: self.hint}
        return json.dumps(line)


def export(script: Script, scale: Scale, folder: Path) -> list[Path]:
    """``all.jsonl`` with the hints of each request, and a file per agent and one for the one-shots
    for generators that say the same with every request of a run.

    Returns:
        What was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = sorted(lines_of(script, scale), key=lambda line: line.at)
    files = {"all": lines}
    for line in lines:
        files.setdefault(line.file, []).append(line)
    written = []
    for name, content in files.items():
        path = folder / f"{name}.jsonl"
        rows = (line.as_json(with_extra=name == "all") for line in content)
        path.write_text("\n".join(rows) + "\n")
        written.append(path)
    return written


def lines_of(script: Script, scale: Scale) -> Iterator[Line]:
    """The requests of all actors, actor by actor."""
    chunks = _Chunks()
    for actor in script.actors:
        yield from _lines_of(actor, script, scale, chunks)


def _lines_of(actor: Actor, script: Script, scale: Scale, chunks: "_Chunks") -> Iterator[Line]:
    at = actor.starts_at
    prompt: list[Piece] = []
    is_agent = actor.traffic is Traffic.AGENTS
    for number, turn in enumerate(actor.turns):
        at += turn.gap_seconds
        prompt = [*(prompt if turn.keeps_context else ()), *turn.pieces]
        length = sum(piece.tokens for piece in prompt)
        hint = None
        if is_agent:
            hint = {
                "session_id": f"{script.load}/{actor.name}",
                "cache_control": {"type": "ephemeral", "ttl": turn.ttl_seconds},
            }
        file = actor.name if is_agent else ONE_SHOTS
        yield Line(at, file, length, turn.reply_tokens, chunks.ids_of(prompt), hint)
        at += length / scale.prefill_rate + turn.reply_tokens * SECONDS_PER_TOKEN
        prompt.append(Piece(f"{actor.name}/answer/{number}", turn.reply_tokens))


class _Chunks:
    """Numbers for chunks of tokens, the same for the same content after the same beginning."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[tuple[Piece, int, int], ...]], int] = {}

    def ids_of(self, prompt: Sequence[Piece]) -> tuple[int, ...]:
        before, ids = -1, []
        for chunk in _cut(prompt):
            before = self._known.setdefault((before, chunk), len(self._known))
            ids.append(before)
        return tuple(ids)


def _cut(prompt: Sequence[Piece]) -> Iterator[tuple[tuple[Piece, int, int], ...]]:
    """Chunks of the prompt, the last one maybe short: which pieces, from where to where."""
    chunk: list[tuple[Piece, int, int]] = []
    room = CHUNK_TOKENS
    for piece in prompt:
        start = 0
        while start < piece.tokens:
            end = min(piece.tokens, start + room)
            chunk.append((piece, start, end))
            room -= end - start
            start = end
            if not room:
                yield tuple(chunk)
                chunk, room = [], CHUNK_TOKENS
    if chunk:
        yield tuple(chunk)
