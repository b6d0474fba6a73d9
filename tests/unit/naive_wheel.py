"""What a timer wheel means: a dictionary of deadlines."""

from collections.abc import Hashable


class NaiveWheel:
    """Every question is answered by looking at every entry."""

    def __init__(self) -> None:
        self.deadlines: dict[Hashable, float] = {}

    def register(self, entry: Hashable, deadline: float) -> None:
        self.deadlines[entry] = deadline

    def remove(self, entry: Hashable) -> None:
        self.deadlines.pop(entry, None)

    def due(self, now: float) -> set[Hashable]:
        """Everything whose deadline has come."""
        return {entry for entry, deadline in self.deadlines.items() if deadline <= now}

    @property
    def soonest(self) -> float | None:
        return min(self.deadlines.values(), default=None)
