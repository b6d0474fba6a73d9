"""What running prefetches cost the throughput of those who do not wait for them.

A server that is busy all the time, since one that idles between two requests would hide or
invent a cost: clients that ask one thing after the other, all together more than it can do.
"""

import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console

from vllm_agent_hint.cli.bench.pooling.arms import Arm, tokens

WINDOW_SECONDS: Final = 2.5
CLIENTS: Final = 3
PROMPT_TOKENS: Final = 700
REPLY_TOKENS: Final = (4, 22, 10, 28, 16)
"""In turn. Clients that all want the same fall into step, and then share every batch: whatever
comes between them, were it for nothing, would cost them that."""
PARKED: Final = 10
PARKED_TOKENS: Final = 4_000
"""Together four times the cache, so that each has been driven out when its turn comes again; one
finds room beside the clients."""
LOADS_SECONDS: Final = "vllm:agent_hint_transfer_seconds_sum"


@dataclass(slots=True)
class Throughput:
    """Pairs of windows.

    Args:
        ratios: Requests per second with prefetches over those without, pair by pair.
        megabytes: That prefetches have loaded.
        under_way: Prefetches that were under way in windows with prefetches, on average.
    """

    ratios: list[float] = field(default_factory=list)
    megabytes: float = 0.0
    under_way: float = 0.0


def measure_throughput(
    arm: Arm, pairs: int, load_bytes_per_second: float, console: Console
) -> Throughput:
    """Pairs, the first of them to warm up.

    Each has two windows of either kind, the one kind around the other: what the machine does
    slower and slower, or faster, is the same for both.
    """
    parked = [f"parked-{k}" for k in range(PARKED)]
    for k, session in enumerate(parked):
        arm.ask(tokens(PARKED_TOKENS, 9_000 + k), session)
        arm.edit(session, "offload", wait_seconds=30)
    pace = _seconds_of_a_load(arm, parked[0], load_bytes_per_second)
    turns = itertools.cycle(parked)
    seeds = itertools.count(20_000)
    found = Throughput()
    shares: list[float] = []
    for pair in range(pairs + 1):
        rates: dict[bool, list[float]] = {True: [], False: []}
        outer = pair % 2 == 0
        for prefetching in (outer, not outer, not outer, outer):
            began, before = time.perf_counter(), _loads(arm)
            driver = _Prefetching(arm, turns, pace) if prefetching else None
            rates[prefetching].append(_requests_per_second(arm, seeds))
            if driver is None:
                continue
            driver.stop()
            loads, seconds = _loads(arm), time.perf_counter() - began
            if pair:
                shares.append((loads[1] - before[1]) / seconds)
                found.megabytes += (loads[0] - before[0]) / 1e6
        if pair:
            beside, alone = statistics.mean(rates[True]), statistics.mean(rates[False])
            found.ratios.append(beside / alone)
            console.print(f"pair {pair}: {beside:.2f} / {alone:.2f} = {found.ratios[-1]:.3f}")
    found.under_way = statistics.mean(shares)
    for session in parked:
        arm.free(session)
    return found


def _loads(arm: Arm) -> tuple[float, float]:
    """Bytes that prefetches have loaded, and the seconds that they took."""
    return (
        arm.total("vllm:agent_hint_transfer_bytes_total", operation="prefetch"),
        arm.total(LOADS_SECONDS, operation="prefetch"),
    )


def _seconds_of_a_load(arm: Arm, session: str, load_bytes_per_second: float) -> float:
    arm.flood(7_000)
    before, _ = _loads(arm)
    arm.edit(session, "prefetch", wait_seconds=30)
    arm.edit(session, "offload", wait_seconds=30)
    return (_loads(arm)[0] - before) / load_bytes_per_second


class _Prefetching:
    """Has one session after the other brought and parked, as fast as the store can.

    It waits for none of them: what is measured is what loads cost, not what asking for them does.

    Args:
        arm: The server.
        turns: Whose turn it is next.
        pace: Seconds from one to the next.
    """

    def __init__(self, arm: Arm, turns: Iterator[str], pace: float) -> None:
        self._arm, self._turns, self._pace = arm, turns, pace
        self._is_over = threading.Event()
        self._last = ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Returns when all that it has asked for is over."""
        self._is_over.set()
        self._thread.join()
        while self._last and self._arm.status_of(self._last) == "pending":
            time.sleep(0.02)

    def _run(self) -> None:
        due = time.perf_counter()
        while not self._is_over.is_set():
            self._last = self._arm.edit(next(self._turns), "prefetch", "offload").operation_id
            due += self._pace
            self._is_over.wait(max(0.0, due - time.perf_counter()))


def _requests_per_second(arm: Arm, seeds: Iterator[int]) -> float:
    """Each client's own rate until its own last answer, so that no request counts by halves."""
    began = time.perf_counter()

    def ask(_: int) -> float:
        done = 0
        while time.perf_counter() - began < WINDOW_SECONDS:
            seed = next(seeds)
            reply = REPLY_TOKENS[seed % len(REPLY_TOKENS)]
            arm.answer(tokens(PROMPT_TOKENS, seed), reply)
            done += 1
        return done / (time.perf_counter() - began)

    with ThreadPoolExecutor(CLIENTS) as clients:
        return sum(clients.map(ask, range(CLIENTS)))
