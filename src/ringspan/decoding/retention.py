"""Which rows of the past a later token can still see, branch by branch. Pure integers: no tensor, no device.

Under causality a token sees the selected rows of its own segment up to itself. So a branch (w, r) needs the rows of the
segment that is being written, at most ceil(w / r) for each KV head, and when the next segment begins it needs none of
them. The order of the rows does not matter: a softmax is a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ringspan.geometry import Branch, Lane, Pattern, SegmentRun
from ringspan.layout import Layout

ENDLESS = 2**62  # rows of a text that never ends: the one segment of `Full`


@dataclass(frozen=True)
class Share:
    """Which rows of a cache a rank takes: of every ``size`` new rows of a head, one. Alone, it takes all."""

    rank: int = 0
    size: int = 1

    def takes(self, slot: int) -> bool:
        """Whether the ``slot``-th selected row of a segment is this rank's."""
        return slot % self.size == self.rank

    def of(self, lane: Lane, slot: int) -> Lane:
        """The rows of a lane that are this rank's, if its first row is the ``slot``-th of its segment.

        >>> Share(rank=1, size=2).of(Lane(start=0, rows=5, step=4), slot=0)
        Lane(start=4, rows=2, step=8)
        """
        skipped = (self.rank - slot) % self.size
        rows = max(0, -(-(lane.rows - skipped) // self.size))
        return Lane(lane.start + skipped * lane.step, rows, lane.step * self.size)


@dataclass(frozen=True)
class KeptRows:
    """One branch of a pattern, for KV heads with these offsets.

    >>> kept = KeptRows(Branch(8, 2), offsets=(0, 1, 0, 1))
    >>> kept.bound, kept.phase(13), kept.heads_at(5)
    (4, 5, slice(1, 4, 2))
    """

    branch: Branch
    offsets: tuple[int, ...]

    @property
    def bound(self) -> int | None:
        """The most rows that a KV head ever needs; None if there is no such number."""
        w, r = self.branch.segment_length, self.branch.rate
        return None if w == ENDLESS else -(-w // r)

    def phase(self, position: int) -> int:
        """The place of a position inside its segment; where it is 0, a segment begins and the last one is forgotten."""
        return (position + self.branch.shift) % self.branch.segment_length

    def slot(self, phase: int) -> int:
        """Which of the selected rows of its segment and head this is."""
        return phase // self.branch.rate

    def heads_at(self, phase: int) -> slice | None:
        """The KV heads that select the row at this place: they alone keep it, and they alone ask there."""
        return self._heads_by_offset.get(phase % self.branch.rate)

    @cached_property
    def _heads_by_offset(self) -> dict[int, slice]:
        heads: dict[int, list[int]] = {}
        for head, offset in enumerate(self.offsets):
            heads.setdefault(offset, []).append(head)
        # Heads of one offset are neighbours (blocked) or a rate apart (interleaved): one slice either way.
        return {
            offset: slice(held[0], held[-1] + 1, held[1] - held[0] if len(held) > 1 else 1)
            for offset, held in heads.items()
        }

    def asking(self, position: int, rows: int) -> list[Lane] | None:
        """Of a block of ``rows`` rows from ``position`` on, the rows that see what is kept: those of the begun segment.

        Counted from the block's first row; None where the block begins a segment of its own.
        """
        phase = self.phase(position)
        if phase == 0:
            return None
        begun = SegmentRun(position, min(rows, self.branch.segment_length - phase), 1, phase)
        return begun.lanes(self.branch.rate, self.offsets, origin=position)

    def to_keep(self, position: int, rows: int, share: Share) -> tuple[bool, list[Lane]]:
        """Of a block of rows, those that later tokens see: whether its last segment was begun before, and its lanes."""
        last = self._last_piece(position, position + rows)
        lanes = zip(last.lanes(self.branch.rate, self.offsets, origin=position), self.offsets, strict=True)
        # A lane begins at the first place from the phase on that a head with its offset selects.
        first_places = ((lane, last.phase + (offset - last.phase) % self.branch.rate) for lane, offset in lanes)
        return last.phase > 0, [share.of(lane, self.slot(place)) for lane, place in first_places]

    def to_keep_by_rank(self, first: int, rows: int, layout: Layout) -> Iterator[tuple[int, list[Lane]]]:
        """The same for a document that fills rows ``first .. first + rows - 1`` of a sequence over a ring.

        Yields, in the order of the sequence, each rank that holds some of the rows, and where it holds them.
        """
        last = self._last_piece(0, rows)
        for part in layout.rank_spans(first + last.start, first + rows):
            span = next(s for s in layout.spans(part.rank) if s.start <= part.start < s.stop)
            start = part.start - first
            piece = SegmentRun(start, part.stop - part.start, 1, self.phase(start))
            local = span.local + part.start - span.start
            yield part.rank, piece.lanes(self.branch.rate, self.offsets, origin=start - local)

    def _last_piece(self, start: int, stop: int) -> SegmentRun:
        """The rows of ``start .. stop - 1`` that lie in the segment of the last of them."""
        first = max(start, stop - 1 - self.phase(stop - 1))
        return SegmentRun(first, stop - first, 1, self.phase(first))


def kept_rows(pattern: Pattern, kv_heads: int) -> tuple[KeptRows, ...]:
    """What each branch of a pattern keeps of a text of any length."""
    return tuple(KeptRows(b, pattern.offsets(b.rate, kv_heads)) for b in pattern.branches(ENDLESS))
