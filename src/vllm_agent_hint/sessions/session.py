"""A session and the requests of it that are alive."""

from array import array
from collections.abc import Hashable

from vllm_agent_hint.sessions.intent import Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.lineage import Lineage
from vllm_agent_hint.sessions.ttl import WheelEntry


class IdleLimit(WheelEntry):
    """When a session that has no lease is given up."""

    __slots__ = ("session",)

    def __init__(self, session: "Session") -> None:
        super().__init__()
        self.session = session


class Session:
    """One agent session, or an anonymous holder of one protected prefix.

    Args:
        key: A ``SessionKey``, or a serial number for an anonymous session.
        num_groups: KV cache groups of the model.
        is_heir: Made by an evict to keep what others use of a session's context.
    """

    __slots__ = (
        "children",
        "history",
        "idle",
        "is_freed",
        "is_heir",
        "key",
        "lineages",
        "live",
        "parent",
        "protections",
    )

    def __init__(self, key: Hashable, num_groups: int, *, is_heir: bool = False) -> None:
        self.key = key
        self.is_heir = is_heir
        self.is_freed = False
        self.parent: Session | None = None
        self.children: set[Session] = set()
        self.lineages = [Lineage(self, num_groups)]
        self.live: set[LiveRequest] = set()
        """Requests that have been added and have not ended."""
        self.protections: tuple[Protection, ...] = ()
        """What the last turn with a cache_control asked for."""
        self.idle = IdleLimit(self)
        self.history: array[int] = array("Q")
        """Digests of a context that has expired, tail first; without effect on any block."""

    @property
    def is_anonymous(self) -> bool:
        return not isinstance(self.key, SessionKey)

    @property
    def lineage(self) -> Lineage:
        """The one prompt that a session is taken to run."""
        return self.lineages[0]


class LiveRequest:
    """What is known of a hinted request between its arrival and its end."""

    __slots__ = ("held", "intent", "session")

    def __init__(self, session: Session, intent: SessionIntent) -> None:
        self.session = session
        self.intent = intent
        self.held: Lineage | None = None
        """What it had computed when it was preempted."""
