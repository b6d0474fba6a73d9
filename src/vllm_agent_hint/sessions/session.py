"""A session and the requests of it that are alive."""

from array import array
from collections.abc import Hashable, Iterator

from vllm_agent_hint.sessions.conversations import ConversationKey
from vllm_agent_hint.sessions.intent import Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.lineage import Lease, Lineage
from vllm_agent_hint.sessions.policy import RestingTurn
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
        tenant: Whose it is.
        is_heir: Made by an evict to keep what others use of a session's context.
    """

    __slots__ = (
        "children",
        "had_company",
        "history",
        "idle",
        "is_freed",
        "is_heir",
        "is_told",
        "key",
        "last_operation",
        "lineages",
        "live",
        "parent",
        "protections",
        "rested_at",
        "superseded",
        "tenant",
        "turn",
    )

    def __init__(
        self, key: Hashable, num_groups: int, *, tenant: str = "", is_heir: bool = False
    ) -> None:
        self.key = key
        self.tenant = tenant
        self.is_heir = is_heir
        self.is_freed = False
        self.lineages = [Lineage(self, num_groups)]
        """The prompts that the session runs, least recently continued first; never none."""
        self.live: set[LiveRequest] = set()
        """Requests that have been added and have not ended."""
        self.had_company = False
        """Whether two requests of the session have ever been alive at once."""
        self.protections: tuple[Protection, ...] = ()
        """What the last turn with a cache_control asked for."""
        self.idle = IdleLimit(self)
        self.history: array[int] = array("Q")
        """Digests of a context that has expired, tail first; without effect on any block."""
        self.superseded: list[SupersededTail] = []
        """What later turns have replaced, to notice if one is asked for again."""
        self.turn = RestingTurn(tenant)
        """The last one that came to an end."""
        self.last_operation = ""
        """What names that turn to the front end; empty where nothing does."""
        self.is_told = False
        """Whether the client itself has said how it ended."""
        self.rested_at: float | None = None
        """Monotonic seconds since when no request is alive; None while one is, or before."""
        self.parent: Session | None = None
        self.children: set[Session] = set()

    @property
    def is_anonymous(self) -> bool:
        return not isinstance(self.key, SessionKey | ConversationKey)

    @property
    def is_conversation(self) -> bool:
        """Whether its requests carry no hint, and were recognised."""
        return isinstance(self.key, ConversationKey)

    @property
    def lineage(self) -> Lineage:
        """The prompt that was continued last."""
        return self.lineages[-1]

    @property
    def num_records(self) -> int:
        return sum(map(len, self.lineages))

    @property
    def leases(self) -> Iterator[Lease]:
        return (lease for lineage in self.lineages for lease in lineage.leases)

    @property
    def is_busy(self) -> bool:
        """Whether a request is alive or a lease runs: what a waiting leader waits for."""
        return bool(self.live) or any(lineage.leases for lineage in self.lineages)


class SupersededTail:
    """Blocks that a turn has released because it replaced them.

    Args:
        group: KV cache group.
        first: Logical index of the first.
        digests: Of their hashes, first to last.
    """

    __slots__ = ("digests", "first", "group")

    def __init__(self, group: int, first: int, digests: "array[int]") -> None:
        self.group = group
        self.first = first
        self.digests = digests


class LiveRequest:
    """What is known of a hinted request between its arrival and its end."""

    __slots__ = (
        "company",
        "continues",
        "conversation_turns",
        "gap",
        "held",
        "intent",
        "is_placed",
        "link_problem",
        "nearest",
        "prompt_tokens",
        "session",
        "shared_tokens",
    )

    def __init__(self, session: Session, intent: SessionIntent) -> None:
        self.session = session
        self.intent = intent
        self.gap: float | None = None
        """Seconds for which its session had rested when it came; None if it had not."""
        self.conversation_turns = 0
        """Of a conversation, this one included; 0 of a session's request."""
        self.held: Lineage | None = None
        """What it had computed when it was preempted."""
        self.link_problem = ""
        """Why it could not become a child of the parent that it named."""
        self.is_placed = False
        """Whether it has come to run, so that the next four are known."""
        self.nearest: Lineage | None = None
        """The lineage with which its prompt shares most, if it shares anything."""
        self.continues: Lineage | None = None
        """The same, if it shares enough to go on with it."""
        self.shared_tokens = 0
        """What it shares with it."""
        self.prompt_tokens = 0
        """Its prompt's complete blocks."""
        self.company: set[Lineage | None] = set()
        """Lineages that requests which were alive beside it go on with."""
