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
    """Rows of ``heads`` heads from ``head`` on, ``head_stride`` apart.

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
    head_stride: int = 1

    def __post_init__(self) -> None:
        for name in ("heads", "segments", "rows", "step", "head_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a comb has at least one; leave out empty combs")
        for name in ("head", "head_step", "start", "stride"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: a comb never steps back; split it where it would wrap")

    @property
    def size(self) -> int:
        """The number of (row, head) pairs."""
        return self.heads * self.segments * self.rows

    @property
    def head_range(self) -> range:
        """The heads of the comb."""
        return range(self.head, self.head + self.heads * self.head_stride, self.head_stride)

    def lane(self, i: int) -> tuple[int, ...]:
        """All rows of the ``i``-th head of the comb, in order of segment, then row."""
        base = self.start + i * self.head_step
        return tuple(base + s * self.stride + j * self.step for s in range(self.segments) for j in range(self.rows))


def group_heads(*frames: Sequence[Lane], segments: int = 1, stride: int = 0) -> list[tuple[Comb, ...]]:
    """Group heads into as few combs as possible, with the same heads in every frame.

    A frame has one lane per head: a tile has one frame for queries and one for keys. Heads are grouped if they are
    evenly spaced and, in every frame, row counts are equal and starts increase by a non-negative constant. Heads
    without rows in some frame are skipped. All frames repeat over the same ``segments``, ``stride`` rows apart.

    >>> lanes = [Lane(start, 4, 2) for start in (0, 1, 0, 1, 0, 1)]
    >>> [list(comb.head_range) for comb, in group_heads(lanes)]
    [[0, 2, 4], [1, 3, 5]]
    """
    heads = [head for head in range(len(frames[0])) if all(frame[head].rows for frame in frames)]
    fewest: list[list[int]] | None = None
    for head_stride in range(1, max(2, len(frames[0]))):
        groups = list(_alike(heads, frames, head_stride))
        if fewest is None or len(groups) < len(fewest):
            fewest = groups
        if len(fewest) <= head_stride:
            break  # a larger stride makes more groups
    return [tuple(_comb(frame, group, segments, stride) for frame in frames) for group in fewest or []]


def _alike(heads: Sequence[int], frames: Sequence[Sequence[Lane]], head_stride: int) -> Iterator[list[int]]:
    """Split heads into runs ``head_stride`` apart whose lanes have equal counts and evenly rising starts."""
    left = set(heads)
    for first in heads:
        if first not in left:
            continue
        run, rises = [first], None
        while (head := run[-1] + head_stride) in left:
            steps = [frame[head].start - frame[run[-1]].start for frame in frames]
            alike = all(frame[head].rows == frame[first].rows for frame in frames)
            if not alike or min(steps) < 0 or rises not in (None, steps):
                break
            run.append(head)
            rises = steps
        left -= set(run)
        yield run


def _comb(frame: Sequence[Lane], heads: list[int], segments: int, stride: int) -> Comb:
    first = frame[heads[0]]
    second = heads[1] if len(heads) > 1 else heads[0]
    return Comb(
        head=heads[0],
        heads=len(heads),
        head_step=frame[second].start - first.start,
        start=first.start,
        segments=segments,
        stride=stride,
        rows=first.rows,
        step=first.step,
        head_stride=max(1, second - heads[0]),
    )


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
