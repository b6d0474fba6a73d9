"""What has happened to sessions since somebody last asked."""

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class SessionCounters:
    """Events since the last time that they were taken."""

    expired: int = 0
    clipped: Counter[str] = field(default_factory=Counter)
    edits: Counter[tuple[str, str]] = field(default_factory=Counter)
    superseded_blocks: int = 0
    superseded_tokens: int = 0
    superseded_regret_tokens: int = 0
    links_rejected: int = 0

    def take(self) -> "SessionCounters":
        """What has been counted; counting begins anew."""
        taken, fresh = SessionCounters(), SessionCounters()
        for each in fields(self):
            setattr(taken, each.name, getattr(self, each.name))
            setattr(self, each.name, getattr(fresh, each.name))
        return taken
