"""What an edit has done, known once its last slice is released."""

from collections.abc import Callable, Iterable, Sequence

from vllm_agent_hint.hints import EditResult, EditStatus, EditType
from vllm_agent_hint.sessions.intent import Edit
from vllm_agent_hint.sessions.lineage import LOST, GroupLayout
from vllm_agent_hint.sessions.releases import Records


class EditRun:
    """The edits of one operation, each with a result of its own.

    Args:
        types: Of the edits.
        account: Told of the results, to count them.
        on_done: Gets the results, in the order of the edits, when the last is there.
    """

    def __init__(
        self,
        types: Sequence[EditType],
        account: Callable[[Iterable[EditResult]], None],
        on_done: Callable[[list[EditResult]], None],
    ) -> None:
        self._types = types
        self._results: list[EditResult | None] = [None] * len(types)
        self._account = account
        self._on_done = on_done
        if not types:
            on_done([])

    @property
    def so_far(self) -> list[EditResult]:
        """The results, ``pending`` where there is none yet."""
        return [
            EditResult(type=edit, status=EditStatus.PENDING) if result is None else result
            for edit, result in zip(self._types, self._results, strict=True)
        ]

    def settle(self, which: int, result: EditResult) -> None:
        """One edit is done."""
        self._results[which] = result
        self._account([result])
        results = [r for r in self._results if r is not None]
        if len(results) == len(self._results):
            self._on_done(results)


class Eviction:
    """One evict: the contexts that it gives up, of one session or of a tree of them.

    Says nothing of who else uses the blocks: they may be another tenant's, too.

    Args:
        layouts: One per KV cache group.
        edit: The edit, which may have a range.
        done: Gets the result when every context is gone and ``close`` was called once more.
    """

    def __init__(
        self, layouts: Sequence[GroupLayout], edit: Edit, done: Callable[[EditResult], None]
    ) -> None:
        self._layouts = layouts
        self._edit = edit
        self._done = done
        self._blocks: list[set[int]] = [set() for _ in layouts]
        self._beyond: list[set[int]] = [set() for _ in layouts]
        self._open = 1
        self.had_expired = False
        """Whether a context had expired, so that there was something to forget."""
        self.num_freed = 0
        """Sessions that have ended."""

    def open(self) -> None:
        """One context more is to go; ``close`` is due for it."""
        self._open += 1

    def count(self, records: Records) -> None:
        """Note what a context holds, a slice at a time."""
        start, end = self._edit.start_token, self._edit.end_token
        for chain, position in records:
            begins = chain.logical_index(position) * self._layouts[chain.group].block_size
            if end is not None and begins >= end:
                self._beyond[chain.group].add(chain.block_ids[position])
            elif begins >= start:
                self._blocks[chain.group].add(chain.block_ids[position])

    def close(self) -> None:
        """One context is gone, or the last has been named."""
        self._open -= 1
        if not self._open:
            self._done(self._result())

    def _result(self) -> EditResult:
        inside = [len(blocks - {LOST}) for blocks in self._blocks]
        beyond = sum(len(blocks - {LOST}) for blocks in self._beyond)
        reasons = []
        if self.num_freed:
            reasons.append(f"{self.num_freed} sessions were freed")
        status = EditStatus.APPLIED
        if not any(inside) and not beyond and not self.num_freed:
            if self.had_expired:
                reasons.append("its context had expired")
            else:
                status = EditStatus.MISSING
                what = "the range" if self._edit.has_range else "its context"
                reasons.append(f"nothing of {what} is in the cache")
        elif self._falls_short(inside):
            status = EditStatus.PARTIAL
            reasons.append("the rest of the range was not in the cache")
        return EditResult(
            type=EditType.EVICT,
            status=status,
            blocks=sum(inside),
            tokens=max(n * lay.block_size for n, lay in zip(inside, self._layouts, strict=True)),
            beyond_range=beyond,
            reason="; ".join(reasons),
        )

    def _falls_short(self, inside: Sequence[int]) -> bool:
        """Whether a range asked for more than there was."""
        start, end = self._edit.start_token, self._edit.end_token
        return end is not None and any(
            count * layout.block_size < end - start
            for count, layout in zip(inside, self._layouts, strict=True)
            if not layout.is_checkpoint
        )
