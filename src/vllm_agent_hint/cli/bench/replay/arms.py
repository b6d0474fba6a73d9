"""What each hinted arm knows of a session, and what it tells SAM of it.

Three classes of knowledge, and no arm uses another's:

- *identity*: which session a request belongs to, and when it arrives.
- *turn*: how a turn ended (its stop reason), as a harness knows when it has.
- *lifecycle*: that a session is over, D seconds after its last turn.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from vllm_agent_hint.cli.bench.replay.workload import Arrival, Traffic
from vllm_agent_hint.sessions.intent import Protection, SessionIntent, SessionKey

TENANT: Final = ""
DEFAULT_END_DELAY: Final = 60.0

TTL_AFTER: Final = {"tool_use": 300.0, "end_turn": 60.0}
"""Seconds for which a turn's prompt is kept, by its stop reason."""
TTL_OTHERWISE: Final = 60.0


class Knowledge(StrEnum):
    """A class of knowledge."""

    IDENTITY = "identity"
    TURN = "turn"
    LIFECYCLE = "lifecycle"


class Arm(Protocol):
    """What a client tells of its sessions."""

    @property
    def knows(self) -> tuple[Knowledge, ...]:
        """What its figures may be compared with."""

    @property
    def end_delay(self) -> float | None:
        """Seconds from a session's last turn until its end is told; None if it never is."""

    def intent(self, arrival: Arrival) -> SessionIntent | None:
        """The hint of a request; None for none."""


@dataclass(frozen=True, slots=True)
class IdentityArm:
    """Says who it is, and nothing else."""

    @property
    def knows(self) -> tuple[Knowledge, ...]:
        return (Knowledge.IDENTITY,)

    @property
    def end_delay(self) -> float | None:
        return None

    def intent(self, arrival: Arrival) -> SessionIntent | None:
        if arrival.session.traffic is not Traffic.AGENTS:
            return None
        return SessionIntent(key_of(arrival), arrival.session.parent)


@dataclass(frozen=True, slots=True)
class TurnArm:
    """Says how long to keep each turn, by how it ended, and when the session is over.

    Args:
        end_delay: See ``Arm``.
    """

    end_delay: float | None = DEFAULT_END_DELAY

    @property
    def knows(self) -> tuple[Knowledge, ...]:
        known = (Knowledge.IDENTITY, Knowledge.TURN)
        return known if self.end_delay is None else (*known, Knowledge.LIFECYCLE)

    def intent(self, arrival: Arrival) -> SessionIntent | None:
        if arrival.session.traffic is not Traffic.AGENTS:
            return None
        # A lease is laid when its request ends, with what is known by then.
        ttl = TTL_AFTER.get(arrival.request.stop or "", TTL_OTHERWISE)
        return SessionIntent(key_of(arrival), arrival.session.parent, (Protection(ttl),))


def key_of(arrival: Arrival) -> SessionKey:
    """The session's full name."""
    return SessionKey(TENANT, None, arrival.session.name)


_NAMES: Final = re.compile(r"(?P<arm>hints|auto)(@(?P<delay>\d+|never))?")


def arm_named(policy: str) -> Arm | None:
    """The arm of a policy's name; None if it has none.

    ``hints`` and ``auto``; ``hints@600`` is told the end of a session 600 seconds after its last
    turn, ``hints@never`` not at all.
    """
    found = _NAMES.fullmatch(policy)
    if found is None or (found["arm"] == "auto" and found["delay"]):
        return None
    if found["arm"] == "auto":
        return IdentityArm()
    delay = found["delay"]
    if delay is None:
        return TurnArm()
    return TurnArm(None if delay == "never" else float(delay))
