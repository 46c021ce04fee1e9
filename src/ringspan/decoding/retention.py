"""Which past rows a later token can still see, for each branch. Integers only: no tensors, no devices.

A causal token sees the selected rows of its own segment up to itself. A branch (w, r) therefore keeps the rows of the
current segment only, at most ceil(w / r) per KV head, and drops them when the next segment begins. The order of the
rows does not matter, because a softmax is a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ringspan.geometry import Branch, Lane, Pattern, SegmentRun
from ringspan.layout import Layout

UNBOUNDED = 2**62  # length of the single segment of `Full`


@dataclass(frozen=True)
class RankShare:
    """The rows of a cache that one rank keeps: every ``size``-th new row of a head. By default, all rows."""

    rank: int = 0
    size: int = 1

    def takes(self, slot: int) -> bool:
        """Whether this rank keeps the ``slot``-th selected row of a segment."""
        return slot % self.size == self.rank

    def of(self, lane: Lane, slot: int) -> Lane:
        """The rows of a lane that this rank keeps. The first row of the lane is the ``slot``-th of its segment.

        >>> RankShare(rank=1, size=2).of(Lane(start=0, rows=5, step=4), slot=0)
        Lane(start=4, rows=2, step=8)
        """
        skipped = (self.rank - slot) % self.size
        rows = max(0, -(-(lane.rows - skipped) // self.size))
        return Lane(lane.start + skipped * lane.step, rows, lane.step * self.size)


@dataclass(frozen=True)
class BranchRetention:
    """What one branch of a pattern keeps, for KV heads with these offsets.

    >>> kept = BranchRetention(Branch(8, 2), offsets=(0, 1, 0, 1))
    >>> kept.bound, kept.phase(13), kept.heads_at(5)
    (4, 5, slice(1, 4, 2))
    """

    branch: Branch
    offsets: tuple[int, ...]

    @property
    def bound(self) -> int | None:
        """The most rows that a KV head ever needs. None if it grows with the text."""
        w, r = self.branch.segment_length, self.branch.rate
        return None if w == UNBOUNDED else -(-w // r)

    def phase(self, position: int) -> int:
        """The index of a position inside its segment. 0 starts a segment, and the rows of the last one are dropped."""
        return (position + self.branch.shift) % self.branch.segment_length

    def slot(self, phase: int) -> int:
        """The index of the row at this phase among the selected rows of its segment and head."""
        return phase // self.branch.rate

    def heads_at(self, phase: int) -> slice | None:
        """The KV heads that select the row at this phase: only they keep it, and only their queries see keys."""
        return self._heads_by_offset.get(phase % self.branch.rate)

    @cached_property
    def _heads_by_offset(self) -> dict[int, slice]:
        heads: dict[int, list[int]] = {}
        for head, offset in enumerate(self.offsets):
            heads.setdefault(offset, []).append(head)
        # Heads with one offset are adjacent (blocked) or a rate apart (interleaved): a single slice in both cases.
        return {
            offset: slice(held[0], held[-1] + 1, held[1] - held[0] if len(held) > 1 else 1)
            for offset, held in heads.items()
        }

    def rows_in_open_segment(self, position: int, rows: int) -> list[Lane] | None:
        """The rows of a block that see kept rows: those in the segment that was open before the block.

        The block has ``rows`` rows and starts at ``position``. Lanes count from its first row. None if the block starts
        a new segment.
        """
        phase = self.phase(position)
        if phase == 0:
            return None
        begun = SegmentRun(position, min(rows, self.branch.segment_length - phase), 1, phase)
        return begun.lanes(self.branch.rate, self.offsets, origin=position)

    def rows_to_keep(self, position: int, rows: int, share: RankShare) -> tuple[bool, list[Lane]]:
        """The rows of a block that later tokens see, as lanes, and whether their segment was open before the block."""
        last = self._last_piece(position, position + rows)
        lanes = zip(last.lanes(self.branch.rate, self.offsets, origin=position), self.offsets, strict=True)
        # A lane starts at the first position from the phase on that a head with its offset selects.
        first_places = ((lane, last.phase + (offset - last.phase) % self.branch.rate) for lane, offset in lanes)
        return last.phase > 0, [share.of(lane, self.slot(place)) for lane, place in first_places]

    def rows_to_keep_by_rank(self, first: int, rows: int, layout: Layout) -> Iterator[tuple[int, list[Lane]]]:
        """The same for a document in rows ``first .. first + rows - 1`` of a sequence that is split over a ring.

        Yields, in sequence order, each rank that holds some of the rows, and their lanes in its local rows.
        """
        last = self._last_piece(0, rows)
        for part in layout.rank_spans(first + last.start, first + rows):
            span = next(s for s in layout.spans(part.rank) if s.start <= part.start < s.stop)
            start = part.start - first
            piece = SegmentRun(start, part.stop - part.start, 1, self.phase(start))
            local = span.local + part.start - span.start
            yield part.rank, piece.lanes(self.branch.rate, self.offsets, origin=start - local)

    def _last_piece(self, start: int, stop: int) -> SegmentRun:
        """The rows of ``start .. stop - 1`` in the same segment as the last of them."""
        first = max(start, stop - 1 - self.phase(stop - 1))
        return SegmentRun(first, stop - first, 1, self.phase(first))


def branch_retentions(pattern: Pattern, kv_heads: int) -> tuple[BranchRetention, ...]:
    """What each branch of a pattern keeps, for a text of any length."""
    return tuple(BranchRetention(b, pattern.offsets(b.rate, kv_heads)) for b in pattern.branches(UNBOUNDED))
