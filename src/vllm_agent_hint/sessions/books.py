"""What the rooms of the session core share: who there is, who holds what, and until when."""

from collections.abc import Hashable, Sequence
from itertools import count

from vllm_agent_hint.sessions.agenda import Agenda
from vllm_agent_hint.sessions.blockmeta import BlockMetaPort
from vllm_agent_hint.sessions.conversations import Conversations
from vllm_agent_hint.sessions.counters import SessionCounters
from vllm_agent_hint.sessions.heirs import Heirs
from vllm_agent_hint.sessions.history import History
from vllm_agent_hint.sessions.ledger import Ledger
from vllm_agent_hint.sessions.lineage import GroupLayout
from vllm_agent_hint.sessions.policy import RetentionPolicy
from vllm_agent_hint.sessions.releases import Releases
from vllm_agent_hint.sessions.remote import NoRemote, RemoteKV
from vllm_agent_hint.sessions.session import Session
from vllm_agent_hint.sessions.standing import Standing
from vllm_agent_hint.settings import Settings


class Books:
    """Kept by ``SessionAwareManager``; each room writes into its own pages.

    Args:
        port: Marks the blocks.
        layouts: One per KV cache group.
        settings: Bounds.
        policy: Who gives way, and where released blocks go.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        port: BlockMetaPort,
        layouts: Sequence[GroupLayout],
        settings: Settings,
        policy: RetentionPolicy,
        now: float,
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.layouts = tuple(layouts)
        self.serial = count()
        """Keys of sessions without a name."""
        self.associated_seconds = min(settings.associated_seconds, settings.idle_seconds)
        """For how long a session without a lease keeps its blocks."""
        self.sessions: dict[Hashable, Session] = {}
        """Least recently used first."""
        self.ledger = Ledger(port, layouts)
        self.counters = SessionCounters()
        self.agenda = Agenda(now)
        self.history = History(settings.max_history)
        self.heirs = Heirs(
            self.sessions, self.ledger, self.agenda, self.serial, self.associated_seconds
        )
        self.conversations = Conversations(
            min(layout.block_size for layout in layouts), settings.max_conversations
        )
        self.num_conversations = 0
        """Sessions among all that are conversations."""
        self.releases = Releases(self.ledger, self.heirs, self.history)
        self.standing = Standing(policy, self.ledger)
        self.remote: RemoteKV = NoRemote(
            "no KV connector that could do it is in use"
            if settings.pooling
            else "offload and prefetch are off (VLLM_AGENT_HINT_POOLING=0)"
        )
        """Keeps contexts elsewhere."""

    @property
    def num_hinted_sessions(self) -> int:
        """Named and anonymous ones: neither heirs nor conversations."""
        return len(self.sessions) - len(self.heirs) - self.num_conversations
