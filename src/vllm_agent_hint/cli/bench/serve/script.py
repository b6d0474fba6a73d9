"""What is played to every arm of a repetition: plain data, so that it can be compared."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from vllm_agent_hint.cli.demo.client import Traffic


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of random text: the same name and length, the same tokens.

    Args:
        name: Seed and all.
        tokens: Its length.
    """

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Args:
        pieces: What follows what is kept; else the whole prompt.
        keeps_context: Whether the prompt starts with the one before and the model's answer to it.
        gap_seconds: From the answer before (the start of the actor) until this is sent.
        reply_tokens: Asked for, and always given.
        ttl_seconds: How long an agent asks to keep the context from the end of this turn.
    """

    pieces: tuple[Piece, ...]
    keeps_context: bool
    gap_seconds: float
    reply_tokens: int
    ttl_seconds: float

    @property
    def new_tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks, waits for the answer and asks again: a session, or a single one-shot request.

    Args:
        name: Unique in the script.
        starts_at: Seconds after the start of the play.
    """

    name: str
    traffic: Traffic
    starts_at: float
    turns: tuple[Turn, ...]

    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt, answers included where they are kept."""
        lengths: list[int] = []
        context = 0
        for turn in self.turns:
            context = (context if turn.keeps_context else 0) + turn.new_tokens
            lengths.append(context)
            context += turn.reply_tokens
        return lengths


@dataclass(frozen=True, slots=True)
class Script:
    """
    Args:
        load: Name of the load.
        cache_tokens: KV cache that this was written for.
        slots: Requests of agents in flight at once; 0 for no limit.
        told: Sizes in words, for the reader of the report.
    """

    load: str
    actors: tuple[Actor, ...]
    cache_tokens: int
    slots: int
    told: str

    def of(self, traffic: Traffic) -> list[Actor]:
        return [actor for actor in self.actors if actor.traffic is traffic]

    @property
    def pressure(self) -> float:
        """What the agents' contexts take at their longest, by the cache: 1.0 fills it."""
        longest = (max(actor.prompt_lengths()) for actor in self.of(Traffic.AGENTS))
        return sum(longest) / self.cache_tokens

    @property
    def num_requests(self) -> int:
        return sum(len(actor.turns) for actor in self.actors)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(
            length + turn.reply_tokens
            for actor in self.actors
            for length, turn in zip(actor.prompt_lengths(), actor.turns, strict=True)
        )

    @property
    def total_tokens(self) -> int:
        """Prompts and answers: more than any cache would need to hold everything."""
        return sum(
            length + turn.reply_tokens
            for actor in self.actors
            for length, turn in zip(actor.prompt_lengths(), actor.turns, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Extent:
    """What a server needs to be able to hold for all repetitions of a load.

    Args:
        cache_tokens: That puts the load under pressure.
        longest_request: Prompt and answer, in tokens.
        total_tokens: Of the largest repetition.
    """

    cache_tokens: int
    longest_request: int
    total_tokens: int

    @classmethod
    def of(cls, scripts: Iterable[Script]) -> Self:
        sizes = [(s.cache_tokens, s.longest_request, s.total_tokens) for s in scripts]
        return cls(*(max(column) for column in zip(*sizes, strict=True)))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids of which random text is made, both ends included."""

    first: int
    last: int

    def text_of(self, piece: Piece) -> list[int]:
        dice = random.Random(piece.name)
        return dice.choices(range(self.first, self.last + 1), k=piece.tokens)


class Text:
    """Tokens of pieces; each is made once, since prompts repeat most of theirs."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: dict[Piece, list[int]] = {}

    def of_all(self, pieces: Iterable[Piece]) -> Iterator[int]:
        for piece in pieces:
            text = self._known.get(piece)
            if text is None:
                text = self._known[piece] = self._vocabulary.text_of(piece)
            yield from text
