"""Tiles: the unit of computation, a comb of query rows against a comb of key rows.

A tile is either full, or square and causal, and each of its query rows sees at least one key. So no tile needs a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ringspan.geometry import Comb
from ringspan.planning.parcels import Parcel


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows against key rows of the same KV heads; if ``causal``, row i sees keys 0 .. i.

    The keys are the rank's own rows or, if ``parcel`` is given, rows of that parcel. A ``fresh`` tile is the first in
    the plan for all of its query rows: its result is stored, not merged.
    """

    queries: Comb
    keys: Comb
    causal: bool
    parcel: Parcel | None = None
    fresh: bool = False

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs in the tile, over its KV heads."""
        if self.causal:
            per_segment = self.queries.rows * (self.queries.rows + 1) // 2
        else:
            per_segment = self.queries.rows * self.keys.rows
        return self.queries.heads * self.queries.segments * per_segment


def fuse_equal_segments(tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Join single segments of equal shape at constant distances into one tile, such as those of equal documents."""
    alike: dict[Tile, list[int]] = {}
    for tile in tiles:
        if tile.queries.segments > 1 or tile.queries != tile.keys or tile.parcel is not None:
            yield tile
        else:
            shape = replace(tile.queries, start=0)
            alike.setdefault(replace(tile, queries=shape, keys=shape), []).append(tile.queries.start)
    for tile, starts in alike.items():
        for start, segments, stride in _runs(starts):
            comb = replace(tile.queries, start=start, segments=segments, stride=stride)
            yield replace(tile, queries=comb, keys=comb)


def _runs(starts: list[int]) -> Iterator[tuple[int, int, int]]:
    """Split rising numbers into runs (first, count, distance).

    >>> list(_runs([0, 5, 10, 12]))
    [(0, 3, 5), (12, 1, 0)]
    """
    first = 0
    while first < len(starts):
        last = first + 1
        while last < len(starts) and starts[last] - starts[last - 1] == starts[first + 1] - starts[first]:
            last += 1
        yield starts[first], last - first, starts[first + 1] - starts[first] if last > first + 1 else 0
        first = last
