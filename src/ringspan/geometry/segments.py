"""How a stretch of a sequence falls into segments: whole ones in runs, cut or short ones alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringspan.geometry.comb import Lane
from ringspan.geometry.pattern import Branch


@dataclass(frozen=True, slots=True)
class Piece:
    """``segments`` stretches of ``rows`` rows, one directly after the other, each in a segment of its own.

    ``start`` is the first row (a position in the document), ``phase`` the place of that row inside
    its segment. Only whole segments come in runs, so ``phase`` is 0 wherever ``segments`` > 1.
    """

    start: int
    rows: int
    segments: int
    phase: int

    def lanes(self, rate: int, offsets: Sequence[int], origin: int = 0) -> list[Lane]:
        """For each head's offset, the selected rows of the first stretch, counted from ``origin``."""
        lanes = []
        for offset in offsets:
            skipped = (offset - self.phase) % rate
            lanes.append(Lane(self.start + skipped - origin, max(0, -(-(self.rows - skipped) // rate)), rate))
        return lanes


def pieces(start: int, stop: int, branch: Branch) -> Iterator[Piece]:
    """The rows ``start .. stop - 1`` of a document as at most three pieces: head, whole segments, tail.

    >>> [(p.start, p.rows, p.segments, p.phase) for p in pieces(0, 10, Branch(4, 1, shift=1))]
    [(0, 3, 1, 1), (3, 4, 1, 0), (7, 3, 1, 0)]
    """
    width = branch.segment_length
    phase = (start + branch.shift) % width
    if phase and start < stop:
        rows = min(stop - start, width - phase)
        yield Piece(start, rows, 1, phase)
        start += rows
    whole = (stop - start) // width
    if whole:
        yield Piece(start, width, whole, 0)
        start += whole * width
    if start < stop:
        yield Piece(start, stop - start, 1, 0)
