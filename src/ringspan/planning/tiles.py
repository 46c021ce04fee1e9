"""Tiles, the unit of computation, and parcels, the unit of communication.

A tile is a comb of query rows against a comb of key rows: full, or square and triangular, and each of its query rows
sees at least one key. So no tile needs a mask tensor. A parcel holds K/V rows of one rank, already dilated, packed into
one message: the rows of KV head 0, then those of KV head 1, and so on. The rows of adjacent heads with equal counts are
therefore a comb of the parcel, as they are a comb of the tensor they come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ringspan.geometry import Comb, Lane, Mask, group_heads


@dataclass(frozen=True, slots=True, order=True)
class Parcel:
    """Identified by integers that all ranks derive alike.

    ``branch`` is the first of the branches that are planned together, ``start`` the first row of a part, and ``strand``
    tells apart the parcels of one part for different heads and receivers. ``rows`` counts (row, head) pairs: the parcel
    holds that many rows of K and as many of V.
    """

    branch: int
    start: int
    strand: tuple[int, ...]
    owner: int
    rows: int


@dataclass(frozen=True, slots=True)
class Packing:
    """How to fill a parcel: pairs of combs, (rows of the rank, rows of the parcel).

    The parcel's gradient is added to the rank's gradients through the same pairs.
    """

    parcel: Parcel
    combs: tuple[tuple[Comb, Comb], ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A parcel sent to, or received from, ``peer``."""

    parcel: Parcel
    peer: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows against key rows of the same KV heads; ``mask`` says which keys a row sees.

    The keys are the rank's own rows or, if ``parcel`` is given, rows of that parcel. A ``fresh`` tile is the first in
    the plan for all of its query rows: its result is stored, not merged. Each of its pairs is seen in ``multiplicity``
    branches, and no other tile has them.
    """

    queries: Comb
    keys: Comb
    mask: Mask
    parcel: Parcel | None = None
    fresh: bool = False
    multiplicity: int = 1

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs in the tile, over its KV heads."""
        if self.mask == "full":
            per_segment = self.queries.rows * self.keys.rows
        else:
            per_segment = self.queries.rows * (self.queries.rows + 1) // 2
        return self.queries.heads * self.queries.segments * per_segment


def parcel_lanes(lanes: Sequence[Lane], base: int = 0) -> list[Lane]:
    """The rows of each head in a parcel that holds these lanes from its row ``base`` on."""
    ends = list(accumulate((lane.rows for lane in lanes), initial=base))
    return [Lane(start, lane.rows, 1) for lane, start in zip(lanes, ends, strict=False)]


def make_packing(parcel: Parcel, *pieces: Sequence[Lane]) -> Packing:
    """How to fill the parcel from the rank's own rows: one piece after the other, each with its lanes."""
    combs: list[tuple[Comb, Comb]] = []
    base = 0
    for lanes in pieces:
        combs += [(own, packed) for own, packed in group_heads(lanes, parcel_lanes(lanes, base))]
        base += sum(lane.rows for lane in lanes)
    return Packing(parcel, tuple(combs))


def fuse_equal_segments(tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Join single segments of equal shape at constant distances into one tile, such as those of equal documents.

    Only own rows, and only where neither queries nor keys of two segments overlap: gradients are added in place.
    """
    alike: dict[tuple[Tile, int], list[int]] = {}
    for tile in tiles:
        if tile.queries.segments > 1 or tile.parcel is not None:
            yield tile
        else:
            start, distance = tile.queries.start, tile.keys.start - tile.queries.start
            shape = replace(tile, queries=replace(tile.queries, start=0), keys=replace(tile.keys, start=0))
            alike.setdefault((shape, distance), []).append(start)
    for (tile, distance), starts in alike.items():
        for start, segments, stride in _runs(starts, max(_extent(tile.queries), _extent(tile.keys))):
            queries = replace(tile.queries, start=start, segments=segments, stride=stride)
            keys = replace(tile.keys, start=start + distance, segments=segments, stride=stride)
            yield replace(tile, queries=queries, keys=keys)


def _extent(comb: Comb) -> int:
    """Rows from the first to the last of a comb with one segment."""
    return (comb.rows - 1) * comb.step + 1 + (comb.heads - 1) * comb.head_step


def _runs(starts: list[int], least: int) -> Iterator[tuple[int, int, int]]:
    """Split rising numbers into runs (first, count, distance) of equal distances, each at least ``least``.

    >>> list(_runs([0, 5, 10, 12], 3))
    [(0, 3, 5), (12, 1, 0)]
    """
    first = 0
    while first < len(starts):
        last = first + 1
        while last < len(starts) and starts[last] - starts[last - 1] == starts[first + 1] - starts[first] >= least:
            last += 1
        yield starts[first], last - first, starts[first + 1] - starts[first] if last > first + 1 else 0
        first = last
