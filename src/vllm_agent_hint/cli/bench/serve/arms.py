"""The arms: which server, and what the client says to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from vllm_agent_hint.settings import ENV_PREFIX, ENV_SWITCH


class TtlSaid(StrEnum):
    EVERY_TURN = "every_turn"
    FIRST_TURN = "first_turn"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Voice:
    """What an agent says about its session.

    Args:
        names_session: Without a name it says nothing at all.
        ttl: When it asks for its context to be kept.
        evicts: Whether it sends an evict once its last turn is answered.
    """

    names_session: bool = True
    ttl: TtlSaid = TtlSaid.EVERY_TURN
    evicts: bool = False


@dataclass(frozen=True, slots=True)
class Arm:
    """
    Args:
        meaning: For the reader of the report.
        environment: Flags of the server beside the common ones.
        holds_everything: Whether its cache is larger than all that is played.
    """

    name: str
    meaning: str
    voice: Voice = field(default_factory=Voice)
    environment: Mapping[str, str] = field(default_factory=dict)
    holds_everything: bool = False

    @property
    def keeps_sessions(self) -> bool:
        """Whether the server has our scheduler, and with it sessions and their metrics."""
        return all(self.environment.get(flag) != "0" for flag in (ENV_SWITCH, f"{ENV_PREFIX}SAM"))


STOCK: Final = "stock"
CEILING: Final = "ceiling"
UNHINTED: Final = "unhinted"

_OFF: Final = {ENV_SWITCH: "0"}
_SILENT: Final = Voice(names_session=False, ttl=TtlSaid.NEVER)

ARMS: Final = {
    arm.name: arm
    for arm in (
        Arm(STOCK, "stock vLLM, the plugin off; hints are sent and ignored", environment=_OFF),
        Arm("hints", "session and TTL with every turn"),
        Arm(
            "hints-evict",
            "the same, and an evict when the session has ended",
            voice=Voice(evicts=True),
        ),
        Arm(
            CEILING,
            "stock vLLM with a cache that holds everything",
            environment=_OFF,
            holds_everything=True,
        ),
        Arm(
            "identity",
            "no protection: the session's name and nothing else",
            voice=Voice(ttl=TtlSaid.NEVER),
        ),
        Arm(
            "no-renewal",
            "no TTL renewal: it is said in the first turn only, and later turns don't renew it",
            voice=Voice(ttl=TtlSaid.FIRST_TURN),
            environment={f"{ENV_PREFIX}RENEW": "0"},
        ),
        Arm(
            "renewal",
            "what no-renewal is measured against: the TTL in the first turn only, renewed",
            voice=Voice(ttl=TtlSaid.FIRST_TURN),
        ),
        Arm(
            "no-superseded",
            "a superseded tail waits for its turn behind everybody's",
            environment={f"{ENV_PREFIX}SUPERSEDED_ENTERS": "back"},
        ),
        Arm(
            "lru",
            "who has rested longest gives way first, whatever is known of its return",
            environment={f"{ENV_PREFIX}GIVE_WAY": "lru"},
        ),
        Arm(
            "auto",
            "the session's name and nothing else; the server sees how turns end",
            voice=Voice(ttl=TtlSaid.NEVER),
            environment={f"{ENV_PREFIX}AUTO": "1"},
        ),
        Arm(
            "shadow",
            "accounts are kept, no order is changed",
            environment={f"{ENV_PREFIX}SHADOW": "1"},
        ),
        Arm(
            "no-sam",
            "hints are read and then ignored, vLLM's own scheduler runs",
            environment={f"{ENV_PREFIX}SAM": "0"},
        ),
        Arm(UNHINTED, "the plugin on, and nobody says anything", voice=_SILENT),
    )
}
"""``hints`` is ``hints-evict`` without evict."""

SPOKEN_ARMS: Final = ("hints", "hints-evict")
"""Those that differ by what is said alone."""
DEFAULT_ARMS: Final = (STOCK, *SPOKEN_ARMS, CEILING)


class WishError(ValueError):
    """What was asked for on the command line does not exist or can't be played."""


def parse_arm(text: str) -> Arm:
    """A name, or ``NAME=ARM,ENV=VALUE,...``: an arm with other flags, under a name of its own.

    Raises:
        WishError: With the cure.
    """
    name, separator, rest = text.partition("=")
    if not separator:
        return _known(name)
    base, *settings = rest.split(",")
    flags = {}
    for setting in settings:
        flag, equals, value = setting.partition("=")
        if not equals:
            raise WishError(f"--arm {text}: after the arm come FLAG=VALUE, separated by commas")
        flags[flag] = value
    arm = _known(base)
    said = ", ".join(f"{flag}={value}" for flag, value in flags.items()) or "no other flags"
    return replace(
        arm,
        name=name,
        meaning=f"{arm.name} with {said}",
        environment={**arm.environment, **flags},
    )


def _known(name: str) -> Arm:
    try:
        return ARMS[name]
    except KeyError:
        raise WishError(f"--arm {name}: there are {', '.join(ARMS)}") from None
