"""Request bodies around a hint that is right, nearly right or nothing of the kind; seeded.

Bodies are JSON text, since NaN, huge numbers, lone surrogates and keys that stand twice have no
other spelling. What vLLM makes of the rest of a body is not in question, so that stays sound;
strange is what a hint touches: the hint and its places, session, salt, streaming, headers.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tests.serve.apis import CHAT, COMPLETIONS, STREAMING, body

SESSIONS: Final = tuple(f"s{number}" for number in range(12))
SALTS: Final = ("pepper", "salt")


@dataclass(frozen=True)
class Literal:
    """A value by its JSON text."""

    text: str


@dataclass(frozen=True)
class Twice:
    """An object whose keys may repeat."""

    pairs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class StrangeBody:
    """One request.

    Args:
        path: Its API.
        content: The body.
        headers: Beside ``content-type``.
        streams: Whether the client asks for a stream.
        only_the_hint: Whether nothing but the hint and its session can be wrong.
    """

    path: str
    content: bytes
    headers: list[tuple[bytes, bytes]]
    streams: bool
    only_the_hint: bool


def strange_bodies(path: str, count: int, seed: int) -> Iterator[StrangeBody]:
    """``count`` bodies for one API, the same ones for the same seed."""
    chance = random.Random(f"{path} {seed}")
    for _ in range(count):
        yield _strange_body(path, chance)


def spell(value: Any) -> str:
    """JSON text of plain data, ``Literal`` and ``Twice``."""
    match value:
        case Literal(text):
            return text
        case Twice(pairs):
            return "{" + ",".join(f"{json.dumps(k)}:{spell(v)}" for k, v in pairs) + "}"
        case dict():
            return spell(Twice(tuple(value.items())))
        case list():
            return "[" + ",".join(map(spell, value)) + "]"
    return json.dumps(value)


def _strange_body(path: str, chance: random.Random) -> StrangeBody:
    request = body(path, chance.choice(["a", "hello", "word " * 150]), tokens=1)
    streams = path in STREAMING and chance.random() < 0.5
    if path in STREAMING:
        request["stream"] = streams
    hint = _hint(chance)
    # Mostly one fault at a time: two hide each other.
    for _ in range(chance.choice([0, 0, 1, 1, 1, 1, 1, 2, 3])):
        hint = _mutated(hint, chance)
    sound = _put(hint, request, chance)
    headers: list[tuple[bytes, bytes]] = []
    if chance.random() < 0.3:
        sound = _surround(path, request, chance) and sound
        headers = _headers(chance)
    text = spell(request)
    if chance.random() < 0.01:
        text = text[: chance.randrange(len(text))]
    return StrangeBody(path, text.encode(), headers, streams, sound)


def _hint(chance: random.Random) -> dict[str, Any]:
    """A hint that is right."""
    hint: dict[str, Any] = {}
    if chance.random() < 0.85:
        hint["session_id"] = chance.choice(SESSIONS)
    if "session_id" in hint and chance.random() < 0.3:
        hint["parent_session_id"] = chance.choice(
            [name for name in SESSIONS if name != hint["session_id"]]
        )
    manages = "session_id" in hint and chance.random() < 0.3
    if "session_id" in hint and (manages or chance.random() < 0.4):
        hint["context_management"] = {"edits": _edits(chance)}
        if manages:
            hint["context_management"]["manage_request"] = True
    if not manages and chance.random() < 0.7:
        hint["cache_control"] = {"ttl": chance.choice([0, 0.25, 1, 1.5, 2])}
        if chance.random() < 0.5:
            hint["cache_control"]["type"] = "ephemeral"
    return hint


def _edits(chance: random.Random) -> list[dict[str, Any]]:
    edits: list[dict[str, Any]] = []
    for _ in range(chance.randrange(4)):
        edit: dict[str, Any] = {"type": chance.choice(["evict", "offload", "prefetch"])}
        if edit["type"] == "evict" and chance.random() < 0.2:
            edit["include_children"] = chance.random() < 0.7
        edits.append(edit)
    return edits


# -- what stands where something else should -------------------------------------------------------

_STRANGE_VALUES: Final[tuple[Any, ...]] = (
    None,
    True,
    0,
    -1,
    1.5,
    3600.0001,
    2**31,
    2**63,
    2**64,
    10**300,
    10**4000,
    Literal("1" + "0" * 5000),
    Literal("1e400"),
    Literal("-1e400"),
    Literal("NaN"),
    Literal("Infinity"),
    Literal("-Infinity"),
    Literal("-0.0"),
    Literal("5e-324"),
    "",
    "evict",
    "300",
    "\ud800",
    "\udfff\ud800",
    "a\x00b",
    "\x1b[31m",
    "\u2028",
    "\U0001f600" * 256,
    "a" * 257,
    "a" * 100_000,
    "__proto__",
    [],
    [[]],
    {},
    {"type": "evict"},
    {"": {}},
    [None] * 17,
    [{"type": "evict"}] * 17,
    [{"type": "evict"}] * 5000,
    Literal("[" * 400 + "]" * 400),
    Literal('{"a":' * 400 + "1" + "}" * 400),
    Literal("[" * 5000 + "]" * 5000),
)
_STRANGE_KEYS: Final = (
    "session",
    "Session_id",
    "session_id ",
    "ttl_seconds",
    "",
    "\ud800",
    "\x1b[31m",
    "__class__",
    "model_config",
    "k" * 10_000,
)
_NEARLY_RIGHT: Final[tuple[dict[str, Any], ...]] = (
    {"block_offset": 3},
    {"block_start": 0, "block_end": 2},
    {"block_start": 2, "block_end": 1},
    {"block_start": 0},
    {"block_end": 2**31},
    {"block_start": -1, "block_end": Literal("1e3")},
    {"include_children": True},
    {"manage_request": True},
    {"manage_request": "true"},
    {"ttl": 60, "TTL": 60},
    {"type": "persistent"},
    {"edits": {"type": "evict"}},
    {"parent_session_id": SESSIONS[0]},
)


def _mutated(value: Any, chance: random.Random) -> Any:
    """The same with one fault, anywhere in it."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.15:
        return chance.choice(_STRANGE_VALUES)
    if isinstance(value, list):
        place = chance.randrange(len(value))
        return [*value[:place], _mutated(value[place], chance), *value[place + 1 :]]
    key = chance.choice(list(value))
    if chance.random() < 0.5:
        return {**value, key: _mutated(value[key], chance)}
    others = {k: v for k, v in value.items() if k != key}
    faults: tuple[Callable[[], Any], ...] = (
        lambda: others,
        lambda: {**value, chance.choice(_STRANGE_KEYS): chance.choice(_STRANGE_VALUES)},
        lambda: {**others, chance.choice(_STRANGE_KEYS): value[key]},
        lambda: {**value, **chance.choice(_NEARLY_RIGHT)},
        lambda: Twice((*value.items(), (key, chance.choice(_STRANGE_VALUES)))),
        lambda: Twice(((key, chance.choice(_STRANGE_VALUES)), *value.items())),
        lambda: [value],
        lambda: {**value, key: [value[key]]},
        lambda: {**value, key: json.dumps(spell(value[key]))},
    )
    return chance.choice(faults)()


# -- around the hint -------------------------------------------------------------------------------


def _put(hint: Any, request: dict[str, Any], chance: random.Random) -> bool:
    """The hint into one of the places where a hint is read, or two.

    Returns:
        Whether it may stand there.
    """
    place = chance.random()
    if place < 0.7:
        request["agent_hint"] = hint
    elif place < 0.75:
        request["agent_hint"] = spell(hint)
    elif place < 0.92:
        request["vllm_xargs"] = {"agent_hint": spell(hint)}
    elif place < 0.96:
        request["vllm_xargs"] = {"agent_hint": spell(_hint(chance))}
        request["agent_hint"] = hint
    else:
        request["vllm_xargs"] = {"agent_hint": hint}
        return False
    return True


def _surround(path: str, request: dict[str, Any], chance: random.Random) -> bool:
    """Salt, session, stamp and more beside the hint.

    Returns:
        Whether they are as they should be.
    """
    sound = True
    xargs = request.setdefault("vllm_xargs", {})
    if chance.random() < 0.5:
        request["cache_salt"] = chance.choice(SALTS)
    elif chance.random() < 0.2:
        request["cache_salt"] = chance.choice(["", "s" * 1025, 5, [], "\ud800", Literal("NaN")])
        sound = False
    if chance.random() < 0.4:
        request["session_id"] = chance.choice(SESSIONS)
    elif chance.random() < 0.1:
        request["session_id"] = chance.choice(["\x00", "a" * 257, 5, {}, Literal("NaN")])
        sound = False
    if chance.random() < 0.2:
        xargs["session_id"] = chance.choice([*SESSIONS, ""])
    elif chance.random() < 0.1:
        xargs["session_id"] = chance.choice([5, "a" * 300, [1], Literal("1e400"), None, {}])
        sound = False
    if chance.random() < 0.2:
        stamp = {"hint": {}, "tenant": "a", "operation_id": "x", "engine_requests": 1, "mac": "0"}
        xargs["agent_hint_stamp"] = json.dumps(stamp)
        request["agent_hint_stamp"] = stamp
    if path in (CHAT, COMPLETIONS):
        if chance.random() < 0.3:
            request.update(n=2, temperature=1)
        if request["stream"] and chance.random() < 0.5:
            request["stream_options"] = {"include_usage": True}
        if chance.random() < 0.1:
            # It takes no edits, and on one of the two APIs no stream.
            request["use_beam_search"] = True
            sound = False
    if path == COMPLETIONS and chance.random() < 0.3:
        request["prompt"] = chance.choice([["a", "b"], [5, 6], [[5], [6, 7]]])
    return sound


def _headers(chance: random.Random) -> list[tuple[bytes, bytes]]:
    headers = []
    if chance.random() < 0.3:
        names = [name.encode() for name in SESSIONS]
        strange = [b"", b"a" * 300, b"\xff\xfe", b"a\tb", b"a\x85b", b"[]"]
        headers.append((b"X-Session-ID", chance.choice([*names, *strange])))
    if chance.random() < 0.1:
        headers.append((b"X-Request-Id", chance.choice([b"", b"\xe4", b'"}\\', b"r" * 4000])))
    return headers
