"""What the operator may decide about released blocks."""

from dataclasses import dataclass

from vllm_agent_hint.settings import Placement


@dataclass(frozen=True, slots=True)
class ReleasePolicy:
    """At which end of its new zone a free block enters, by the cause of its release.

    Claims that grow or shrink for any other cause enter at the back.

    Args:
        expired: Its lease has run out. At the back it waits for its turn behind what is there
            already; at the front it is reused before ordinary blocks that were used later.
        evicted: Its session was evicted or freed, and nobody else has use for it.
        superseded: A later turn of its session does not repeat it, and nobody else has use for it.
    """

    expired: Placement = Placement.BACK
    evicted: Placement = Placement.FRONT
    superseded: Placement = Placement.FRONT
