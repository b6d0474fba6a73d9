"""A timer wheel for leases: one-second slots, one-hour horizon, O(1) for every operation."""

import math
from collections.abc import Callable
from typing import Final

TICK_SECONDS: Final = 1.0
HORIZON_SECONDS: Final = 3600.0
_NUM_SLOTS: Final = int(HORIZON_SECONDS / TICK_SECONDS) + 2


class WheelEntry:
    """Something that falls due. Lives in at most one slot of one wheel.

    ``due_at`` is in monotonic seconds and counts while the entry is armed.
    """

    __slots__ = ("_slot", "_wheel", "due_at")

    def __init__(self) -> None:
        self.due_at = 0.0
        self._wheel: TTLManager | None = None
        self._slot = 0

    @property
    def is_armed(self) -> bool:
        return self._wheel is not None

    def disarm(self) -> None:
        """Leave the wheel that the entry is in, if any. O(1)."""
        if self._wheel is not None:
            self._wheel._take_out(self)


class TTLManager:
    """Fixed timer wheel.

    Entries wait in the slot of the second in which they fall due. ``advance`` hands out whole
    finished slots, so an entry comes up to one second late; ``take_due`` also looks into the
    unfinished slot and is exact. A wheel instead of a heap: refreshing a lease, which every turn
    of every agent does, is O(1) and leaves nothing behind.

    Time is a parameter and never goes back.
    """

    def __init__(self, now: float) -> None:
        self._slots: list[dict[WheelEntry, None]] = [{} for _ in range(_NUM_SLOTS)]
        self._tick = math.floor(now / TICK_SECONDS)
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    @property
    def next_tick_at(self) -> float:
        """When ``advance`` is worth calling next; infinity while the wheel is empty. O(1)."""
        return (self._tick + 1) * TICK_SECONDS if self._num_entries else math.inf

    def register(self, entry: WheelEntry, due_at: float) -> None:
        """Arm an entry, or move it.

        A time beyond the wheel's horizon waits in the last slot, and again from there. That
        is every time for a wheel that was empty, and so not advanced, for an hour.
        """
        entry.disarm()
        tick = math.floor(due_at / TICK_SECONDS)
        slot = min(max(tick, self._tick), self._tick + _NUM_SLOTS - 1) % _NUM_SLOTS
        entry.due_at = due_at
        entry._wheel = self
        entry._slot = slot
        self._slots[slot][entry] = None
        self._num_entries += 1

    def remove(self, entry: WheelEntry) -> None:
        """Disarm an entry; no-op if it is not armed."""
        entry.disarm()

    def advance(self, now: float) -> list[WheelEntry]:
        """Disarm and return the entries of all finished slots, soonest first."""
        target = math.floor(now / TICK_SECONDS)
        finished: list[WheelEntry] = []
        if target > self._tick:
            if self._num_entries:
                for tick in range(self._tick, min(target, self._tick + _NUM_SLOTS)):
                    finished += self._slots[tick % _NUM_SLOTS]
            self._tick = target
        due: list[WheelEntry] = []
        for entry in self._disarm(finished):
            if entry.due_at < target * TICK_SECONDS:
                due.append(entry)
            else:
                self.register(entry, entry.due_at)
        return due

    def take_due(self, now: float) -> list[WheelEntry]:
        """Disarm and return every entry with ``due_at <= now``, soonest first."""
        due = self.advance(now)
        return due + self._disarm(
            [e for e in self._slots[self._tick % _NUM_SLOTS] if e.due_at <= now]
        )

    def soonest(self, counts: Callable[[WheelEntry], bool] = lambda _: True) -> WheelEntry | None:
        """The armed entry that falls due first, of those that count.

        O(slots + entries that don't count); called under pressure only.
        """
        if not self._num_entries:
            return None
        soonest: WheelEntry | None = None
        for tick in range(self._tick, self._tick + _NUM_SLOTS):
            # An entry lies in the slot of its time, or before it: see ``register``.
            if soonest is not None and soonest.due_at < tick * TICK_SECONDS:
                break
            for entry in self._slots[tick % _NUM_SLOTS]:
                if (soonest is None or entry.due_at < soonest.due_at) and counts(entry):
                    soonest = entry
        return soonest

    def clear(self) -> None:
        """Disarm everything."""
        for slot in self._slots:
            self._disarm(list(slot))

    def _disarm(self, entries: list[WheelEntry]) -> list[WheelEntry]:
        for entry in entries:
            self._take_out(entry)
        return sorted(entries, key=lambda entry: entry.due_at)

    def _take_out(self, entry: WheelEntry) -> None:
        del self._slots[entry._slot][entry]
        entry._wheel = None
        self._num_entries -= 1
