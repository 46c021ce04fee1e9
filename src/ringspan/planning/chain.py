"""Chains: branches that nest are planned together, so that no pair is computed twice.

The levels of a chain are segment branches, finest first: segments of a level are unions of segments of the level
before, and the rows that a level selects are among those that the level before selects. A pair of rows is seen by
consecutive levels, from the first whose segments hold both rows to the last that selects both. So pairs fall into
*regions* by the first level and, inside a region, into products of *row classes* by the last. Each product is one tile,
whose multiplicity is the number of levels. A branch that nests with no other is a chain of one level.
docs/derivation.md derives it. All rows are positions in a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ringspan.geometry import Lane, Mask, SegmentBranch, segment_runs

Rows = tuple[int, int]  # first row, and the row after the last


@dataclass(frozen=True, slots=True)
class RowClass:
    """The rows that a level selects, moved by ``offset`` rows.

    Rows of level 0 that level 1 does not select are the classes (1, r), (1, 2r), .. with the rate r of level 0.
    """

    level: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Product:
    """Query rows of a class against key rows of a class; ``fresh`` if it has the first keys of its query rows."""

    queries: RowClass
    keys: RowClass
    mask: Mask
    multiplicity: int
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Region:
    """Query rows against key rows, repeated over ``segments`` segments, ``stride`` rows apart.

    ``levels`` see the pairs of the region, the first of them all pairs of rows that it selects. ``diagonal`` regions
    have equal queries and keys. ``within`` is the level whose segments hold both.
    """

    queries: Rows
    keys: Rows
    levels: tuple[int, ...]
    within: int
    diagonal: bool = False
    fresh: bool = False
    segments: int = 1
    stride: int = 0


class Sharing(NamedTuple):
    """How a level shares its pairs with finer levels: from region ``since`` on, by multiplicity.

    In the regions before, its pairs are computed once more, which is cheaper if they are few: alone or, if ``linked``,
    shared with the level before, which computes them apart too.
    """

    since: int
    linked: bool = False


@dataclass(frozen=True)
class Chain:
    """Branches that nest, for some KV heads.

    ``numbers`` are the positions of the branches in the pattern, ``sharing`` says how each level shares its pairs.
    """

    numbers: tuple[int, ...]
    levels: tuple[SegmentBranch, ...]
    heads: tuple[int, ...]
    sharing: tuple[Sharing, ...]

    @property
    def top(self) -> int:
        return len(self.levels) - 1

    def lanes(self, rows: RowClass, first: int, stop: int) -> list[Lane]:
        """For each KV head, the rows of a class in ``first .. stop - 1``; none for heads outside the chain."""
        rate = self.levels[rows.level].rate
        return [
            Lane(first + skipped, count, rate)
            for skipped, count in self._selected(rows, self._phase(rows.level, first), stop - first)
        ]

    def selected(self, rows: RowClass, first: int, stop: int) -> int:
        """The number of (row, KV head) pairs of a class in ``first .. stop - 1``."""
        return sum(count for _, count in self._selected(rows, self._phase(rows.level, first), stop - first))

    def _phase(self, level: int, row: int) -> int:
        """The place of a row in its segment."""
        branch = self.levels[level]
        return (row + branch.shift) % branch.segment_length

    def _selected(self, rows: RowClass, phase: int, length: int) -> list[Rows]:
        """For each KV head, how many rows to skip and to take, of ``length`` rows from a place in a segment on."""
        key = rows, phase % self.levels[rows.level].rate, length  # ranks with equal shares of rows ask the same
        if key not in self._found_rows:
            branch, members = self.levels[rows.level], set(self.heads)
            found = self._found_rows[key] = []
            for head, offset in enumerate(branch.offsets):
                skipped = (offset + rows.offset - phase) % branch.rate
                count = -(-(length - skipped) // branch.rate) if head in members else 0
                found.append((skipped, max(0, count)))
        return self._found_rows[key]

    @cached_property
    def _found_rows(self) -> dict[tuple[RowClass, int, int], list[Rows]]:
        return {}

    def block(self, level: int, row: int) -> Rows:
        """The segment of a level that holds a row; it may begin before the document and end after it."""
        branch = self.levels[level]
        start = row - (row + branch.shift) % branch.segment_length
        return start, start + branch.segment_length

    def _counted(self, region: int) -> tuple[int, ...]:
        """The levels that count by multiplicity in a region."""
        return tuple(level for level in range(region, len(self.levels)) if self.sharing[level].since <= region)

    @cached_property
    def _apart(self) -> list[tuple[tuple[int, ...], int]]:
        """Levels whose pairs are computed apart from the others, and the level in whose segments they are."""
        found: list[tuple[tuple[int, ...], int]] = []
        for level, (since, linked) in enumerate(self.sharing):
            if linked and found and found[-1][1] == since - 1 and found[-1][0][-1] == level - 1:
                found[-1] = ((*found[-1][0], level), since - 1)
            elif since:
                found.append(((level,), since - 1))
        return found

    def own_regions(self, first: int, stop: int, causal: bool) -> Iterator[Region]:
        """The regions of rows ``first .. stop - 1`` against themselves."""
        for levels, within in self._apart:
            yield from self._diagonal(levels, within, first, stop)
        yield from self._diagonal(self._counted(0), 0, first, stop, fresh=True)
        for level in range(1, len(self.levels)):
            if levels := self._counted(level):
                yield from self._beside_diagonal(levels, level, first, stop, causal)

    def _diagonal(
        self, levels: tuple[int, ...], within: int, first: int, stop: int, fresh: bool = False
    ) -> Iterator[Region]:
        """Rows of each segment of a level against themselves."""
        stride = self.levels[within].segment_length
        for run in segment_runs(first, stop, self.levels[within]):
            rows = (run.start, run.start + run.rows)
            repeat = (run.segments, stride) if run.segments > 1 else (1, 0)
            yield Region(rows, rows, levels, within, True, fresh, *repeat)

    def _beside_diagonal(
        self, levels: tuple[int, ...], within: int, first: int, stop: int, causal: bool
    ) -> Iterator[Region]:
        """Rows of each segment of a level against those that are in other segments of the level before."""
        stride = self.levels[within].segment_length
        for run in segment_runs(first, stop, self.levels[within]):
            repeat = (run.segments, stride) if run.segments > 1 else (1, 0)
            finer = self._cut(within - 1, run.start, run.start + run.rows)
            for earlier, later in _halves(finer):
                yield Region(later, earlier, levels, within, False, False, *repeat)
                if not causal:
                    yield Region(earlier, later, levels, within, False, False, *repeat)

    def _cut(self, level: int, first: int, stop: int) -> list[Rows]:
        """Rows ``first .. stop - 1``, cut into segments of a level."""
        parts = []
        while first < stop:
            end = min(stop, self.block(level, first)[1])
            parts.append((first, end))
            first = end
        return parts

    def boxes(self, queries: Rows, keys: Rows) -> list[tuple[Rows, Rows] | None]:
        """For each level, the queries and keys in a common segment; None if there is none. Ranges are disjoint."""
        nearest = (keys[1] - 1, queries[0]) if keys[0] < queries[0] else (queries[1] - 1, keys[0])
        boxes: list[tuple[Rows, Rows] | None] = []
        for level in range(len(self.levels)):
            start, stop = self.block(level, nearest[0])
            shared = nearest[1] < stop
            boxes.append((_clip(queries, start, stop), _clip(keys, start, stop)) if shared else None)
        return boxes

    def cross_regions(self, queries: Rows, keys: Rows) -> Iterator[Region]:
        """The regions of a range of query rows and a disjoint range of key rows, ignoring causality."""
        boxes = self.boxes(queries, keys)
        for levels, within in self._apart:
            if (found := boxes[within]) is not None:
                yield Region(*found, levels, within)
        inner: tuple[Rows, Rows] | None = None
        for within, box in enumerate(boxes):
            if box is None:
                continue
            levels = self._counted(within)
            if levels and inner is None:
                yield Region(*box, levels, within)
            elif levels and inner is not None:
                for rest in _without(box[1], inner[1]):
                    yield Region(box[0], rest, levels, within)
                for rest in _without(box[0], inner[0]):
                    yield Region(rest, inner[1], levels, within)
            inner = box

    def products(self, region: Region, causal: bool) -> Iterator[Product]:
        """The row classes of a region that see each other, with their multiplicities."""
        triangular = region.diagonal and causal
        for number, (level, coarser) in enumerate(pairwise(region.levels), start=1):
            step, rate = self.levels[level].rate, self.levels[coarser].rate
            others = [RowClass(coarser, offset) for offset in range(step, rate, step)]
            if not others:
                continue
            selected = RowClass(coarser)
            if triangular:
                every = [selected, *others]
                for queries in every:
                    for keys in every:
                        if queries is not selected or keys is not selected:
                            yield Product(queries, keys, "causal", number, region.fresh and queries is keys)
            else:
                # All queries against some keys, not the reverse: kernels are faster the more queries a tile has.
                for keys in others:
                    yield Product(RowClass(level), keys, "full", number)
                for queries in others:
                    yield Product(queries, selected, "full", number, region.fresh)
        last = RowClass(region.levels[-1])
        yield Product(last, last, "causal" if triangular else "full", len(region.levels), region.fresh)


def _halves(ranges: Sequence[Rows]) -> Iterator[tuple[Rows, Rows]]:
    """Pairs of adjacent ranges that together hold every pair of two different ones of the given adjacent ranges.

    >>> list(_halves([(0, 4), (4, 8), (8, 12)]))
    [((0, 4), (4, 12)), ((4, 8), (8, 12))]
    """
    if len(ranges) < 2:
        return
    middle = len(ranges) // 2
    yield (ranges[0][0], ranges[middle - 1][1]), (ranges[middle][0], ranges[-1][1])
    yield from _halves(ranges[:middle])
    yield from _halves(ranges[middle:])


def _clip(rows: Rows, start: int, stop: int) -> Rows:
    return max(rows[0], start), min(rows[1], stop)


def _without(rows: Rows, inner: Rows) -> Iterator[Rows]:
    """The rows before and after an inner range."""
    for first, stop in ((rows[0], inner[0]), (inner[1], rows[1])):
        if first < stop:
            yield first, stop


def triangle(queries: Sequence[Lane], keys: Sequence[Lane]) -> tuple[list[Lane], list[Lane]]:
    """The lanes of a causal tile, cut to equal counts so that query i sees keys 0 to i.

    All lanes have one step and begin within one step. Where the first key comes after the first query, that query sees
    nothing.

    >>> triangle([Lane(0, 4, 2)], [Lane(1, 4, 2)])
    ([Lane(start=2, rows=3, step=2)], [Lane(start=1, rows=3, step=2)])
    """
    query_lanes, key_lanes = [], []
    for query, key in zip(queries, keys, strict=True):
        late = key.start > query.start
        rows = max(0, min(query.rows - late, key.rows))
        query_lanes.append(Lane(query.start + late * query.step, rows, query.step))
        key_lanes.append(Lane(key.start, rows, key.step))
    return query_lanes, key_lanes
