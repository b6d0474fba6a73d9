"""Who was served from a block beside those that record it."""

from collections.abc import Iterable, Sequence

from vllm_agent_hint.sessions.index import BlockIndex, Holders
from vllm_agent_hint.sessions.session import Session


class Usage:
    """Remembers the blocks that others than their holders have use for.

    A mark is on a content: it names the hash object that the block had.

    Args:
        index: Who records which block.
    """

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self.from_outside: dict[int, bytes] = {}
        """Block id -> the hash object that a request from outside the block's session hit."""
        self._unclaimed: dict[int, bytes] = {}
        """The same, where that request or the one that computed the block holds no claim on it."""

    def note_hits(
        self, session: Session | None, group: int, block_ids: list[int], hashes: Iterable[bytes]
    ) -> None:
        """A request was served from these blocks; remember which of them belong to others.

        O(blocks), at list speed where a session finds its own unshared context.

        Args:
            session: The request's own, or None if it is not hinted.
            group: KV cache group.
            block_ids: What it was served from, in token order.
            hashes: The blocks' own hash objects; not asked for where nothing is to be noted.
        """
        if session is None:
            hit = dict(zip(block_ids, hashes, strict=True))
            self.from_outside.update(hit)
            self._unclaimed.update(hit)
            return
        not_own = self._index.not_held_alone(session.lineage.chains[group], block_ids)
        if not not_own:
            return
        hashes = list(hashes)
        belongs_to_others: dict[Holders, bool] = {}
        for k in not_own:
            holders = self._index.holders(block_ids[k])
            if holders is None:
                self._unclaimed[block_ids[k]] = hashes[k]
                belongs_to_others[None] = True
            elif holders not in belongs_to_others:
                belongs_to_others[holders] = any(
                    c.lineage.session is not session for c in self._index.chains_of(holders)
                )
            if belongs_to_others[holders]:
                self.from_outside[block_ids[k]] = hashes[k]
                if session.is_conversation:
                    # It has asked for no hint, so no edit of others may cost it this.
                    self._unclaimed[block_ids[k]] = hashes[k]

    def is_unclaimed(self, block_id: int, block_hash: bytes) -> bool:
        """Whether somebody uses a block, or has computed it, who holds no claim on it."""
        return self._unclaimed.get(block_id) is block_hash

    def blocks_reused(self, block_ids: Sequence[int]) -> None:
        """The pool has given these blocks to other content."""
        for marks in (self.from_outside, self._unclaimed):
            if marks:
                for block_id in block_ids:
                    marks.pop(block_id, None)

    def block_moved(self, old_id: int, new_id: int) -> None:
        """The pool has moved a block's content to another block."""
        for marks in (self.from_outside, self._unclaimed):
            if old_id in marks:
                marks[new_id] = marks.pop(old_id)

    def clear(self) -> None:
        """Nobody holds anything any more, so nobody can be from outside."""
        self.from_outside.clear()
        self._unclaimed.clear()
