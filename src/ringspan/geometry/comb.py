"""Combs: every set of rows that a kernel reads has this one shape.

Inside a segment, the selected rows of a head are an arithmetic progression. Over a run of equal segments, and over
heads whose offsets increase by a constant, they form a regular comb: one strided view of a tensor, read in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringspan.geometry.pattern import SegmentBranch


@dataclass(frozen=True, slots=True)
class Lane:
    """The selected rows of one head in one segment: ``rows`` rows from ``start`` on, ``step`` apart."""

    start: int
    rows: int
    step: int


@dataclass(frozen=True, slots=True)
class Comb:
    """Rows of the heads ``head .. head + heads - 1``.

    Row ``j`` of segment ``s`` for the ``i``-th of these heads is
    ``start + i * head_step + s * stride + j * step``.

    >>> Comb(head=0, heads=2, head_step=1, start=0, segments=2, stride=8, rows=3, step=3).lane(1)
    (1, 4, 7, 9, 12, 15)
    """

    head: int
    heads: int
    head_step: int
    start: int
    segments: int
    stride: int
    rows: int
    step: int

    def __post_init__(self) -> None:
        for name in ("heads", "segments", "rows", "step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a comb has at least one; leave out empty combs")
        for name in ("head", "head_step", "start", "stride"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: a comb never steps back; split it where it would wrap")

    @property
    def size(self) -> int:
        """The number of (row, head) pairs."""
        return self.heads * self.segments * self.rows

    def lane(self, i: int) -> tuple[int, ...]:
        """All rows of the ``i``-th head of the comb, in order of segment, then row."""
        base = self.start + i * self.head_step
        return tuple(base + s * self.stride + j * self.step for s in range(self.segments) for j in range(self.rows))


def group_heads(*frames: Sequence[Lane], segments: int = 1, stride: int = 0) -> Iterator[tuple[Comb, ...]]:
    """Group adjacent heads into combs, with the same heads in every frame.

    A frame has one lane per head: a tile has one frame for queries and one for keys. Heads are grouped as long as, in
    every frame, row counts are equal and starts increase by a non-negative constant. Heads without rows in some
    frame are skipped. All frames repeat over the same ``segments``, ``stride`` rows apart.

    >>> lanes = [Lane(start, 4, 2) for start in (0, 1, 0, 1)]
    >>> [(comb.head, comb.heads) for comb, in group_heads(lanes)]
    [(0, 2), (2, 2)]
    """
    heads = len(frames[0])
    first = 0
    while first < heads:
        if any(frame[first].rows == 0 for frame in frames):
            first += 1
            continue
        steps = [0] * len(frames)
        last = first + 1
        while last < heads:
            rises = [frame[last].start - frame[last - 1].start for frame in frames]
            if last == first + 1:
                steps = rises
            alike = all(frame[last].rows == frame[first].rows for frame in frames)
            if not alike or rises != steps or min(rises) < 0:
                break
            last += 1
        if last == first + 1:
            steps = [0] * len(frames)
        yield tuple(
            Comb(
                head=first,
                heads=last - first,
                head_step=step,
                start=frame[first].start,
                segments=segments,
                stride=stride,
                rows=frame[first].rows,
                step=frame[first].step,
            )
            for frame, step in zip(frames, steps, strict=True)
        )
        first = last


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """Rows of ``segments`` consecutive segments, ``rows`` from each, without gaps.

    ``start`` is the first row, as a position in the document; ``phase`` is the position of that row in its segment.
    Only whole segments are grouped, so ``phase`` is 0 if ``segments`` > 1.
    """

    start: int
    rows: int
    segments: int
    phase: int

    def lanes(self, branch: SegmentBranch, origin: int = 0) -> list[Lane]:
        """For each KV head, the selected rows of the first segment, relative to ``origin``."""
        lanes = []
        for offset in branch.offsets:
            skipped = (offset - self.phase) % branch.rate
            rows = max(0, -(-(self.rows - skipped) // branch.rate))
            lanes.append(Lane(self.start + skipped - origin, rows, branch.rate))
        return lanes


def segment_runs(start: int, stop: int, branch: SegmentBranch) -> Iterator[SegmentRun]:
    """Split rows ``start .. stop - 1`` of a document into runs of segments.

    There are at most three: a partial segment, whole segments, and a partial segment.

    >>> [(p.start, p.rows, p.segments, p.phase) for p in segment_runs(0, 10, SegmentBranch(4, 1, shift=1))]
    [(0, 3, 1, 1), (3, 4, 1, 0), (7, 3, 1, 0)]
    """
    width = branch.segment_length
    phase = (start + branch.shift) % width
    if phase and start < stop:
        rows = min(stop - start, width - phase)
        yield SegmentRun(start, rows, 1, phase)
        start += rows
    whole = (stop - start) // width
    if whole:
        yield SegmentRun(start, width, whole, 0)
        start += whole * width
    if start < stop:
        yield SegmentRun(start, stop - start, 1, 0)
