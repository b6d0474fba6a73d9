"""What each hinted arm knows of a session, and what it tells SAM of it.

Three classes of knowledge, and no arm uses another's:

- *identity*: which session a request belongs to, and when it arrives.
- *turn*: how a turn ended (its stop reason, its tool), as a harness knows when it has. A server
  sees the same by itself, where its front end can tell a tool call from a message.
- *lifecycle*: that a session is over, D seconds after its last turn.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from vllm_agent_hint.cli.bench.replay.workload import Arrival, Traffic
from vllm_agent_hint.sessions.facts import TurnFacts
from vllm_agent_hint.sessions.intent import Protection, SessionIntent, SessionKey
from vllm_agent_hint.settings import GiveWay

TENANT: Final = ""
DEFAULT_END_DELAY: Final = 60.0

TTL_AFTER: Final = {"tool_use": 3600.0, "end_turn": 600.0}
"""Seconds of the lease of a turn's prompt, by its stop reason, where leases are asked for."""
TTL_OTHERWISE: Final = 600.0


class Knowledge(StrEnum):
    """A class of knowledge."""

    IDENTITY = "identity"
    TURN = "turn"
    LIFECYCLE = "lifecycle"


class Taught(StrEnum):
    """What the order under pressure has learnt from beforehand."""

    NOTHING = ""
    BY_OTHERS = "taught"
    """All sessions of the traces that the workload leaves out: what can be learnt at most."""
    BY_ITSELF = "hindsight"
    """The workload that it is going to see: what its classes can bring at most."""


class Arm(Protocol):
    """What a client tells of its sessions."""

    @property
    def knows(self) -> tuple[Knowledge, ...]:
        """What its figures may be compared with."""

    @property
    def end_delay(self) -> float | None:
        """Seconds from a session's last turn until its end is told; None if it never is."""

    @property
    def give_way(self) -> GiveWay:
        """The order under pressure."""

    @property
    def taught(self) -> Taught:
        """What the order has learnt from beforehand."""

    def intent(self, arrival: Arrival) -> SessionIntent | None:
        """The hint of a request; None for none."""

    def facts(self, arrival: Arrival) -> TurnFacts | None:
        """What is known of its end, once it has ended; None for nothing."""


@dataclass(frozen=True, slots=True)
class IdentityArm:
    """Says who it is, and nothing else.

    Args:
        sees_turns: Whether the server sees by itself how a turn ended, as with AUTO.
        give_way: See ``Arm``.
        taught: See ``Arm``.
    """

    sees_turns: bool = True
    give_way: GiveWay = GiveWay.REUSE
    taught: Taught = Taught.NOTHING

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

    def facts(self, arrival: Arrival) -> TurnFacts | None:
        return _facts_of(arrival) if self.sees_turns else None


@dataclass(frozen=True, slots=True)
class TurnArm:
    """Says how each turn ended, and when the session is over.

    Args:
        end_delay: See ``Arm``.
        is_leased: Whether it asks for a lease after each turn, by how it ended. Without one the
            session stands among all that have none, in the order of what is known of its turn.
        give_way: See ``Arm``.
        taught: See ``Arm``.
    """

    end_delay: float | None = DEFAULT_END_DELAY
    is_leased: bool = False
    give_way: GiveWay = GiveWay.REUSE
    taught: Taught = Taught.NOTHING

    @property
    def knows(self) -> tuple[Knowledge, ...]:
        known = (Knowledge.IDENTITY, Knowledge.TURN)
        return known if self.end_delay is None else (*known, Knowledge.LIFECYCLE)

    def intent(self, arrival: Arrival) -> SessionIntent | None:
        if arrival.session.traffic is not Traffic.AGENTS:
            return None
        protections: tuple[Protection, ...] = ()
        if self.is_leased:
            # A lease is laid when its request ends, with what is known by then.
            ttl = TTL_AFTER.get(arrival.request.stop or "", TTL_OTHERWISE)
            protections = (Protection(ttl),)
        return SessionIntent(key_of(arrival), arrival.session.parent, protections)

    def facts(self, arrival: Arrival) -> TurnFacts | None:
        return _facts_of(arrival)


def _facts_of(arrival: Arrival) -> TurnFacts | None:
    request = arrival.request
    if request.stop is None:
        return None
    tools = () if request.tool is None else (request.tool,)
    return TurnFacts.of(_ENDED.get(request.stop, "unknown"), tools)


_ENDED: Final = {"tool_use": "tool_call", "end_turn": "final_message", "": "cut"}


def key_of(arrival: Arrival) -> SessionKey:
    """The session's full name."""
    return SessionKey(TENANT, None, arrival.session.name)


_NAMES: Final = re.compile(
    r"(?P<arm>hints|auto|identity)"
    r"(:(?P<order>reuse|deadline|lru|taught|hindsight|leased))?"
    r"(@(?P<delay>\d+|never))?"
)


def arm_named(policy: str) -> Arm | None:
    """The arm of a policy's name; None if it has none.

    ``hints``: identity, turn and end. ``auto``: identity, and what the server sees of a turn's end.
    ``identity``: the same behind a front end that can't tell. ``hints:lru`` and ``hints:deadline``
    give way in another order. ``hints:taught`` begins with what the sessions that are left out have
    taught it, ``hints:hindsight`` knows the gaps of its classes beforehand: bounds.
    ``hints:leased`` asks for a lease after each turn, and so does ``hints:deadline``, which goes by
    them. ``hints@600`` is told the end of a session 600 seconds after its last turn,
    ``hints@never`` not at all.
    """
    found = _NAMES.fullmatch(policy)
    if found is None:
        return None
    is_hinted = found["arm"] == "hints"
    if not is_hinted and (found["delay"] or found["order"] == "leased"):
        return None
    taught = Taught(found["order"]) if found["order"] in [*Taught] else Taught.NOTHING
    named = {"deadline": GiveWay.DEADLINE, "lru": GiveWay.LRU}
    order = named.get(found["order"], GiveWay.REUSE)
    if not is_hinted:
        return IdentityArm(found["arm"] == "auto", order, taught)
    delay = found["delay"]
    end_delay: float | None = DEFAULT_END_DELAY
    if delay is not None:
        end_delay = None if delay == "never" else float(delay)
    is_leased = found["order"] in ("leased", "deadline")
    return TurnArm(end_delay, is_leased, order, taught)
