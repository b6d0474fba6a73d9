"""One prompt's history inside a session: its recorded blocks, and how they are ordered."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain as concatenate
from typing import TYPE_CHECKING

from vllm_agent_hint.sessions.ttl import WheelEntry

if TYPE_CHECKING:
    from vllm_agent_hint.sessions.session import Session

LOST = -1
"""Block id of a record whose block has been reused for other content."""

DIGEST_BYTES = 8
"""What is remembered of a hash that has outlived its block."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How one KV cache group cuts a prompt into blocks.

    Args:
        block_size: Tokens per block.
        is_checkpoint: The group keeps state or window blocks at some boundaries only, so that
            one of its blocks makes the attention blocks *before* it usable.
        stands_alone: One such block is a whole checkpoint, as a state is. Otherwise it takes a run
            of them, as of a window.
    """

    block_size: int
    is_checkpoint: bool = False
    stands_alone: bool = False


@dataclass(slots=True)
class RecordedPrefix:
    """The cacheable blocks of one request in one KV cache group, in token order.

    Args:
        block_ids: Physical ids.
        hashes: The blocks' own hash objects.
        logical: Logical block index of each; None when they are 0, 1, 2, ...
        num_hits: Logical blocks at the start that the request did not compute but found cached.
    """

    block_ids: list[int]
    hashes: list[bytes]
    logical: list[int] | None = None
    num_hits: int = 0

    def logical_index(self, position: int) -> int:
        return position if self.logical is None else self.logical[position]


class Lease(WheelEntry):
    """A protected range of a lineage, from its first token on.

    Args:
        lineage: What it protects.
        ttl: Seconds that it was asked for.
        end_token: First token not protected; None for the whole context.
        deadline: Monotonic seconds; counts once the lease is armed. A leader that waits for its
            workers keeps its lease beyond it.
    """

    __slots__ = ("deadline", "end_token", "lineage", "ttl")

    def __init__(
        self, lineage: "Lineage", ttl: float, end_token: int | None, deadline: float
    ) -> None:
        super().__init__()
        self.deadline = deadline
        self.lineage = lineage
        self.ttl = ttl
        self.end_token = end_token


class Chain:
    """The recorded blocks of a lineage in one KV cache group.

    No object per record: the lists share the hash and id objects that the blocks hold
    themselves, and ``computed`` is a byte each.
    """

    __slots__ = ("block_ids", "computed", "group", "hashes", "lineage", "logical", "num_shared")

    def __init__(self, lineage: "Lineage", group: int) -> None:
        self.lineage = lineage
        self.group = group
        self.block_ids: list[int] = []
        self.hashes: list[bytes] = []
        self.logical: list[int] | None = None
        self.computed = bytearray()
        self.num_shared = 0

    def __len__(self) -> int:
        return len(self.block_ids)

    def logical_index(self, position: int) -> int:
        return position if self.logical is None else self.logical[position]

    def position_of(self, logical: int) -> int:
        """Where the record of a logical block lies. O(1) for attention groups."""
        return logical if self.logical is None else bisect_left(self.logical, logical)

    def put(self, position: int, block_id: int, block_hash: bytes, *, computed: bool) -> None:
        """Overwrite the record at a position, or add one at the end."""
        if position < len(self.block_ids):
            self.block_ids[position] = block_id
            self.hashes[position] = block_hash
            self.computed[position] = computed
        else:
            self.block_ids.append(block_id)
            self.hashes.append(block_hash)
            self.computed.append(computed)

    def insert(self, logical: int, block_id: int, block_hash: bytes, *, computed: bool) -> None:
        """Add a record to a chain with holes."""
        assert self.logical is not None
        position = bisect_left(self.logical, logical)
        self.logical.insert(position, logical)
        self.block_ids.insert(position, block_id)
        self.hashes.insert(position, block_hash)
        self.computed.insert(position, computed)

    def keep_only(self, positions: Sequence[int]) -> None:
        """Drop all records but those at some positions; the chain may have holes from now on."""
        self.logical = [self.logical_index(i) for i in positions]
        self.block_ids = [self.block_ids[i] for i in positions]
        self.hashes = [self.hashes[i] for i in positions]
        self.computed = bytearray(self.computed[i] for i in positions)

    def mark_lost(self, position: int) -> None:
        """The block was reused: keep a short digest of what it held."""
        self.block_ids[position] = LOST
        self.hashes[position] = self.hashes[position][:DIGEST_BYTES]

    def truncate(self, length: int) -> None:
        del self.block_ids[length:], self.hashes[length:], self.computed[length:]
        if self.logical is not None:
            del self.logical[length:]


class Lineage:
    """The chains of one prompt, one per KV cache group, and the leases on them.

    ``leases`` rise in ``end_token`` and never rise in deadline: protection never increases
    along a chain.
    """

    __slots__ = (
        "base_tokens",
        "bequest",
        "chains",
        "expired_deadline",
        "interrupted_at",
        "latest_written",
        "leases",
        "releasing",
        "session",
        "trim_to",
        "turns_passed",
    )

    def __init__(self, session: "Session", num_groups: int) -> None:
        self.session = session
        self.chains = [Chain(self, group) for group in range(num_groups)]
        self.leases: list[Lease] = []
        self.latest_written = 0.0
        """The latest deadline of this lineage that its blocks may carry, ended leases included."""
        self.trim_to: int | None = None
        """First token whose records are being let go, a slice at a time; None if none are."""
        self.interrupted_at: int | None = None
        """Where an expiry was that a request has stopped; None if none was."""
        self.releasing: object | None = None
        """The ``Release`` that does it."""
        self.expired_deadline = 0.0
        """When the last lease to expire ran out."""
        self.turns_passed = 0
        """Turns that its session has gone on with other prompts since it was continued."""
        self.bequest: Sequence[tuple[int | None, float]] = ()
        """What an edit is taking from it, as ``(end_token, deadline)``: its blocks carry that
        until each is handed to an heir or released."""
        self.base_tokens = 0
        """What a prompt has to share to go on with this one; see ``continuation``."""

    def __len__(self) -> int:
        return sum(map(len, self.chains))

    def end_leases(self) -> None:
        """Forget every lease, armed or not."""
        for lease in self.leases:
            lease.disarm()
        self.leases = []

    @property
    def deadline(self) -> float:
        """Deadline of the first block: the latest of all."""
        return self.leases[0].deadline if self.leases else 0.0


def eviction_order(
    layouts: Sequence[GroupLayout], logical: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """The order in which a context should be reused: tail first, across KV cache groups.

    Attention blocks go from the last token to the first. A checkpoint, which is a state or a run
    of window blocks, goes after the attention blocks that only it makes usable, which are those
    behind the previous checkpoint: stock frees group by group, and a restored attention prefix
    without its checkpoint serves nothing.

    Args:
        layouts: One per group.
        logical: Per group, rising logical block indices.

    Returns:
        ``(group, position in logical[group])``, first to be reused first.
    """
    if len(logical) == 1:
        return [(0, position) for position in reversed(range(len(logical[0])))]
    keyed: list[tuple[float, int, int, int]] = []
    for group, (layout, indices) in enumerate(zip(layouts, logical, strict=True)):
        size = layout.block_size
        if not layout.is_checkpoint:
            keyed += [(-(i + 1) * size, 0, group, p) for p, i in enumerate(indices)]
            continue
        usable_without = 0
        key = 0.0
        for position, index in enumerate(indices):
            begins = position == 0 or index != indices[position - 1] + 1
            if begins or layout.stands_alone:
                key = -(usable_without + 0.5)
            usable_without = (index + 1) * size
            keyed.append((key, -usable_without, group, position))
    keyed.sort()
    return [(group, position) for _, _, group, position in keyed]


def digests(hashes: Sequence[bytes]) -> "array[int]":
    """Eight bytes of each hash, packed: what history keeps of a context."""
    packed = array("Q")
    packed.frombytes(b"".join([h[:DIGEST_BYTES] for h in hashes]))
    return packed


@dataclass(slots=True)
class ChainDiff:
    """What a request's blocks change in a chain: positions of ``old`` and of ``new``.

    ``common`` positions at the start have the same content in both; none is asked for in chains
    with holes.
    """

    kept: Sequence[int]
    dropped: Sequence[int]
    added: Sequence[int]
    diverged: bool
    common: int = 0


def compare(old: Chain, new: RecordedPrefix) -> ChainDiff:
    """Which records a request's blocks keep, end and add.

    O(blocks), and at C speed in the case of every ordinary turn, where the new chain extends
    the old one.
    """
    n = len(old)
    if old.logical is None and new.logical is None:
        if (
            n <= len(new.block_ids)
            and old.block_ids == new.block_ids[:n]
            and old.hashes == new.hashes[:n]
        ):
            return ChainDiff(range(n), (), range(n, len(new.block_ids)), diverged=False, common=n)
        return _compare_dense(old, new)
    return _compare_sparse(old, new)


def _compare_dense(old: Chain, new: RecordedPrefix) -> ChainDiff:
    kept: list[int] = []
    dropped: list[int] = []
    added: list[int] = []
    common = min(len(old), len(new.block_ids))
    for i in range(common):
        same_content = new.hashes[i].startswith(old.hashes[i])
        if not same_content:
            return ChainDiff(
                kept,
                list(concatenate(dropped, range(i, len(old)))),
                list(concatenate(added, range(i, len(new.block_ids)))),
                diverged=True,
                common=i,
            )
        if old.block_ids[i] == new.block_ids[i] and old.hashes[i] == new.hashes[i]:
            kept.append(i)
        else:
            dropped.append(i)
            added.append(i)
    added += range(common, len(new.block_ids))
    # A shorter request says nothing about what lies behind its end.
    return ChainDiff(kept, dropped, added, diverged=False, common=common)


def _compare_sparse(old: Chain, new: RecordedPrefix) -> ChainDiff:
    recorded = {
        (block_id, h): i
        for i, (block_id, h) in enumerate(zip(old.block_ids, old.hashes, strict=True))
    }
    kept = [
        recorded.pop(key) for key in zip(new.block_ids, new.hashes, strict=True) if key in recorded
    ]
    gone = set(kept)
    still = {(old.block_ids[i], old.hashes[i]) for i in kept}
    added = [
        i for i, key in enumerate(zip(new.block_ids, new.hashes, strict=True)) if key not in still
    ]
    return ChainDiff(kept, [i for i in range(len(old)) if i not in gone], added, diverged=False)
