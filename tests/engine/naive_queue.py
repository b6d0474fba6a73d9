"""What the zoned free queue means: three lists."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from vllm_agent_hint.settings import Placement

ZONES = ("A", "B", "C")
CHOOSE_AT_LEAST = 128
"""Blocks that are chosen in one go; in a pool of less than 64 times as many, a 64th of it."""


def zone_of(count: int, deadline: float) -> str:
    """Protected if there is a deadline, else held if a session counts on it, else ordinary."""
    if deadline != 0.0:
        return "C"
    return "B" if count > 0 else "A"


class NaiveQueue:
    """Block ids in three lists, each in the order in which they entered it.

    Args:
        block_ids: Free from the start, ordinary.
    """

    def __init__(self, block_ids: Iterable[int]) -> None:
        self.zones: dict[str, list[int]] = {"A": list(block_ids), "B": [], "C": []}
        self.choose_at_least = max(1, min(CHOOSE_AT_LEAST, len(self.zones["A"]) // 64))
        self.shortages: list[int] = []
        """How many blocks zone A fell short of, each time."""
        self.on_shortage: Callable[[int], None] = lambda _: None
        self.on_choice: Callable[[str, int], int] | None = None
        """Brings blocks of a zone to its front, and says how many."""
        self.brought = {"B": 0, "C": 0}
        """Of those how many are left at the front."""

    @property
    def order(self) -> list[int]:
        return self.zones["A"] + self.zones["B"] + self.zones["C"]

    def popleft(self) -> int:
        if not self.order:
            raise ValueError
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[int]:
        if n > len(self.order):
            raise AssertionError
        taken = self._take_ordinary(n)
        if len(taken) < n:
            self.shortages.append(n - len(taken))
            self.on_shortage(n - len(taken))
            taken += self._take_ordinary(n - len(taken))
        for zone in ("B", "C"):
            taken += self._take_chosen(zone, min(self.brought[zone], n - len(taken)))
            if len(taken) < n and self.zones[zone] and self.on_choice is not None:
                self.brought[zone] = self.on_choice(zone, max(n - len(taken), self.choose_at_least))
            taken += self._take_chosen(zone, n - len(taken))
        return taken

    def _take_chosen(self, zone: str, n: int) -> list[int]:
        taken, self.zones[zone] = self.zones[zone][:n], self.zones[zone][n:]
        self.brought[zone] = max(0, self.brought[zone] - len(taken))
        return taken

    def _take_ordinary(self, n: int) -> list[int]:
        taken, self.zones["A"] = self.zones["A"][:n], self.zones["A"][n:]
        return taken

    def remove(self, block_id: int) -> None:
        for zone in self.zones.values():
            if block_id in zone:
                zone.remove(block_id)

    def append_n(self, block_ids: Sequence[int], zone_of_block: Mapping[int, str]) -> None:
        for block_id in block_ids:
            self.zones[zone_of_block[block_id]].append(block_id)

    def prepend_n(self, block_ids: Sequence[int]) -> None:
        self.zones["A"] = [*block_ids, *self.zones["A"]]

    def enter(
        self, block_ids: Sequence[int], zone_of_block: Mapping[int, str], placement: Placement
    ) -> None:
        for block_id in block_ids:
            self.remove(block_id)
        for zone in ZONES:
            entering = [b for b in block_ids if zone_of_block[b] == zone]
            rest = self.zones[zone]
            at_front = placement is Placement.FRONT
            self.zones[zone] = entering + rest if at_front else rest + entering

    def fold(self) -> None:
        self.zones = {"A": self.order, "B": [], "C": []}
        self.brought = {"B": 0, "C": 0}
