"""An engine in plain Python around the session core: requests, their blocks, and time."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from tests.unit.naive_sam import NaiveRequest, NaiveSam
from tests.unit.plain_port import PlainPort, content_hash
from vllm_agent_hint.hints import EditResult, EditType
from vllm_agent_hint.sessions.intent import Edit, Protection, SessionIntent, SessionKey
from vllm_agent_hint.sessions.lineage import LOST, GroupLayout, RecordedPrefix
from vllm_agent_hint.sessions.manager import SessionAwareManager
from vllm_agent_hint.sessions.policy import RetentionPolicy
from vllm_agent_hint.sessions.session import LiveRequest
from vllm_agent_hint.settings import Settings

PAGE = 16
"""Tokens in the smallest block; a context is a sequence of pages."""

DENSE = (GroupLayout(PAGE),)
HYBRID = (GroupLayout(PAGE), GroupLayout(PAGE, True), GroupLayout(2 * PAGE, True))

Pages = Sequence[object]

EVICT = Edit(EditType.EVICT)


@dataclass(eq=False)
class Request:
    """A request as the engine sees it. ``tables`` is empty while it waits.

    ``tables`` has, for each KV cache group, logical index -> block id.
    """

    live: LiveRequest
    naive: NaiveRequest | None
    tables: list[dict[int, int]] = field(default_factory=list)
    num_hits: list[int] = field(default_factory=list)


class PlainEngine:
    """Does what the scheduler does between vLLM and the session core, beside a naive core.

    Args:
        layouts: KV cache groups.
        num_blocks: Size of the pool, the null block included.
        settings: The session core's.
        is_naive_beside: Whether a naive core is told the same. It knows of no bounds.
        has_steps_after_each_call: Whether what a request or an edit lets go of has been released
            when the call returns, as after some steps of the scheduler.
        policy: The session core's; None for what the settings say.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout] = DENSE,
        num_blocks: int = 64,
        settings: Settings | None = None,
        *,
        is_naive_beside: bool = False,
        is_strict: bool = True,
        has_steps_after_each_call: bool = True,
        policy: RetentionPolicy | None = None,
    ) -> None:
        self.has_steps_after_each_call = has_steps_after_each_call
        self.now = 1000.25
        self.layouts = layouts
        self.settings = settings or Settings()
        self.port = PlainPort(num_blocks, is_strict=is_strict)
        self.sam = SessionAwareManager(self.port, layouts, self.settings, self.now, policy)
        self.naive: NaiveSam | None = None
        if is_naive_beside:
            self.naive = NaiveSam(
                self.port,
                layouts,
                min(self.settings.associated_seconds, self.settings.idle_seconds),
                self.settings.idle_seconds,
                self.settings.renew,
                self.settings.leader_wait_seconds,
            )
            self.port.on_gone = self.naive.content_gone
        self.port.on_reuse = self.sam.ledger.blocks_reused
        self.port.on_shortage = lambda n: self.sam.release_due(self.now, n)
        self.port.on_choice = lambda zone, n: self.sam.give_way(self.now, n, leased=zone == 2)

    # -- requests --------------------------------------------------------------------------------

    def arrive(self, intent: SessionIntent) -> Request | None:
        if self.naive:
            self.naive.now = self.now
        live = self.sam.request_added(intent, self.now)
        if live is None:
            return None
        request = Request(live, self.naive.request_added(intent) if self.naive else None)
        self._some_steps()
        return request

    def run(
        self,
        request: Request,
        pages: Pages,
        *,
        forgone_hits: int = 0,
        checkpoints: Sequence[Iterable[int]] | None = None,
    ) -> None:
        """Serve a request from what is cached, and compute the rest.

        Args:
            request: Gets its blocks.
            pages: Its whole context.
            forgone_hits: Pages at the end of the cached prefix that it computes all the same,
                as the scheduler does with the last block of a prompt.
            checkpoints: Per group, the logical indices at which state or window blocks are
                kept; all of them if not given.
        """
        self.sam.request_scheduled(request.live, self._prompt_of(pages))
        if self.naive:
            self.naive.request_scheduled(request.naive, pages)
        is_cached = [
            self.port.cached_block(content_hash(0, pages[: k + 1])) is not None
            for k in range(len(pages))
        ]
        hit_pages = max(0, (*is_cached, False).index(False) - forgone_hits)
        request.num_hits = [hit_pages * PAGE // layout.block_size for layout in self.layouts]
        request.tables = [{} for _ in self.layouts]
        for group, layout in enumerate(self.layouts):
            logical: Iterable[int] = range(len(pages) * PAGE // layout.block_size)
            if layout.is_checkpoint and checkpoints is not None:
                logical = sorted(set(logical) & set(checkpoints[group]))
            self._fill(request, group, pages, logical)

    def _prompt_of(self, pages: Pages) -> list[list[bytes]]:
        """The hashes of a prompt's complete blocks, per group."""
        return [
            [
                content_hash(group, pages[: (i + 1) * layout.block_size // PAGE])
                for i in range(len(pages) * PAGE // layout.block_size)
            ]
            for group, layout in enumerate(self.layouts)
        ]

    def _fill(self, request: Request, group: int, pages: Pages, logical: Iterable[int]) -> None:
        table = request.tables[group]
        hit: list[int] = []
        for i in logical:
            end = (i + 1) * self.layouts[group].block_size // PAGE
            block_hash = content_hash(group, pages[:end])
            cached = self.port.cached_block(block_hash)
            if i < request.num_hits[group] and cached is not None:
                block_id = cached[0]
                hit.append(block_id)
                self.port.use(block_id)
            elif self.port.free:
                block_id = self.port.allocate(block_hash)
            else:
                break
            table[i] = block_id
        self._note_hits(request, group, hit)

    def serve_outsider(self, block_ids: Sequence[int]) -> None:
        """An unhinted request is served from these blocks."""
        self._note_hits(None, 0, block_ids)

    def _note_hits(self, request: Request | None, group: int, block_ids: Sequence[int]) -> None:
        hashes = [self.port.blocks[i].hash for i in block_ids]
        session = request.live.session if request else None
        self.sam.ledger.usage.note_hits(session, group, list(block_ids), hashes)
        if self.naive:
            self.naive.note_hits(request.naive.session if request else None, block_ids)

    def preempt(self, request: Request) -> None:
        tables, prefixes = self._recorded(request)
        self.sam.request_preempted(request.live, prefixes, self.now)
        if self.naive:
            self.naive.request_preempted(request.naive, tables, request.num_hits, self.now)
        self._some_steps()
        self._give_back(request)

    def end(self, request: Request, *, succeeds: bool = True) -> None:
        if math.isinf(self.sam.next_tick_at):
            # The tick of an empty wheel is old. A lease that ended while its request ran would
            # come up at once, rather than after the running tick. Both are right.
            self.sam.tick(self.now)
        tables, prefixes = self._recorded(request)
        self.sam.request_finished(request.live, prefixes, self.now, succeeded=succeeds)
        if self.naive:
            self.naive.request_finished(
                request.naive, tables, request.num_hits, self.now, succeeded=succeeds
            )
        self._some_steps()
        self._give_back(request)

    def turn(
        self,
        key: SessionKey | None,
        pages: Pages,
        *protections: Protection,
        ttl: float | None = None,
        succeeds: bool = True,
    ) -> Request:
        """A whole request. ``ttl`` protects all of it; neither asks for what was asked before."""
        asked = (Protection(ttl),) if ttl is not None else protections
        request = self.arrive(SessionIntent(key, protections=asked))
        assert request is not None
        self.run(request, pages)
        self.end(request, succeeds=succeeds)
        return request

    def _recorded(self, request: Request) -> tuple[list[dict[int, int]], list[RecordedPrefix]]:
        """What the engine would report: hashed blocks; an attention table ends at a hole."""
        tables: list[dict[int, int]] = []
        prefixes: list[RecordedPrefix] = []
        for group, layout in enumerate(self.layouts):
            table = request.tables[group] if request.tables else {}
            hashed = {i: b for i, b in table.items() if self.port.blocks[b].hash is not None}
            if not layout.is_checkpoint:
                hashed = {i: b for k, (i, b) in enumerate(hashed.items()) if i == k}
            tables.append(hashed)
            prefixes.append(
                RecordedPrefix(
                    list(hashed.values()),
                    [self.port.blocks[b].hash for b in hashed.values()],
                    list(hashed) if layout.is_checkpoint else None,
                    request.num_hits[group] if request.num_hits else 0,
                )
            )
        return tables, prefixes

    def _give_back(self, request: Request) -> None:
        for table in request.tables:
            for block_id in reversed(table.values()):
                self.port.give_back(block_id)
        request.tables = []

    def _some_steps(self) -> None:
        if self.naive:
            self.naive.end_vain_waits(self.now)
        if self.has_steps_after_each_call:
            while len(self.sam.releases):
                self.sam.tick(self.now)

    # -- blocks and time -------------------------------------------------------------------------

    def move(self, source: int, target: int) -> None:
        self.port.lose(target)
        self.port.move(source, target)
        self.sam.ledger.block_moved(source, target)
        if self.naive:
            self.naive.block_moved(source, target)

    def reset(self) -> None:
        self.port.reset()
        self.sam.reset(self.now)
        if self.naive:
            self.naive.reset(self.now)

    def wait(self, seconds: float) -> None:
        """Time passes; then the scheduler runs until nothing is left to expire."""
        self.now += seconds
        self.tick_to_the_end()
        if self.naive:
            self.naive.expire(
                self.now, lambda deadline: math.floor(deadline) < math.floor(self.now)
            )

    def tick_to_the_end(self) -> None:
        for _ in range(1000):
            if not self.step():
                return
        raise AssertionError("there is always something left to expire")

    def step(self) -> bool:
        """What the scheduler does once per step. Returns whether there was something to do."""
        if self.now < self.sam.next_tick_at:
            return False
        before, open_edits = self.sam.num_records, self.sam.num_open_edits
        self.sam.tick(self.now)
        released = before - self.sam.num_records
        # Where a lease runs out in the midst of an edit of the same context, that is finished.
        was_finished = self.sam.num_open_edits < open_edits
        assert released <= self.settings.release_slice or was_finished, "more than a slice"
        return True

    # -- edits -----------------------------------------------------------------------------------

    def evict(self, key: SessionKey) -> EditResult:
        (result,) = self.apply_edits(key, [EVICT])
        if self.naive and key in self.naive.sessions:
            self.naive.evict(key, self.now)
        self._some_steps()
        return result

    def apply_edits(self, key: SessionKey, edits: Sequence[Edit]) -> list[EditResult]:
        """Run edits to their end."""
        results: list[EditResult] = []
        self.sam.start_edits(key, edits, self.now, results.extend)
        self.sam.finish_releases()
        return results

    def free_session(self, key: SessionKey) -> bool:
        if self.naive and key in self.naive.sessions:
            self.naive.free_session(key)
        found = self.sam.free_session(key)
        self._some_steps()
        return found

    def free_all_sessions(self) -> None:
        self.sam.free_all_sessions()
        if self.naive:
            self.naive.free_all_sessions()

    # -- looking ---------------------------------------------------------------------------------

    def blocks_of(self, key: Hashable, group: int = 0) -> list[int]:
        """The blocks that a session has recorded, first to last; -1 where one was lost."""
        return list(self.sam.sessions[key].lineage.chains[group].block_ids)

    def deadlines_of(self, key: Hashable, group: int = 0) -> list[float]:
        """Seconds for which each block of a session is still kept; 0.0 where no lease is."""
        return [
            deadline and deadline - self.now
            for deadline in (
                self.port.blocks[i].deadline for i in self.blocks_of(key, group) if i != LOST
            )
        ]

    def counts_of(self, block_ids: Iterable[int]) -> list[int]:
        return [self.port.blocks[i].count for i in block_ids]
