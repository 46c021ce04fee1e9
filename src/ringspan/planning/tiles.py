"""The plan: a list of tiles that together compute the definition, each (query, key, branch) once.

A tile is a comb of query rows against a comb of key rows. It is either full, or square and causal,
and each of its query rows sees at least one key: no masks anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ringspan.geometry import Comb, Documents, Pattern, group_heads, pieces


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows against key rows of the same KV heads; under ``causal`` row i sees keys 0 .. i."""

    queries: Comb
    keys: Comb
    causal: bool

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs the tile computes, over its KV heads."""
        if self.causal:
            per_segment = self.queries.rows * (self.queries.rows + 1) // 2
        else:
            per_segment = self.queries.rows * self.keys.rows
        return self.queries.heads * self.queries.segments * per_segment


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one device does for ``rows`` rows and ``kv_heads`` KV heads."""

    rows: int
    kv_heads: int
    tiles: tuple[Tile, ...]

    @property
    def pairs(self) -> int:
        """The work: how many (query, key) pairs are computed, over all KV heads."""
        return sum(tile.pairs for tile in self.tiles)


@lru_cache(maxsize=256)
def plan_rows(pattern: Pattern, documents: Documents, kv_heads: int, causal: bool) -> Plan:
    """The plan for rows that all lie on one device.

    >>> from ringspan.geometry import Dilated
    >>> len(plan_rows(Dilated((2048, 8192), (1, 4)), Documents((2**30,)), kv_heads=4, causal=True).tiles)
    2
    """
    tiles: list[Tile] = []
    for i in range(len(pattern.branches(documents.rows))):
        tiles += _fused(_branch_tiles(pattern, i, documents, kv_heads, causal))
    return Plan(documents.rows, kv_heads, tuple(tiles))


def _branch_tiles(pattern: Pattern, i: int, documents: Documents, kv_heads: int, causal: bool) -> Iterator[Tile]:
    for start, stop in documents.spans():
        branch = pattern.branches(stop - start)[i]
        offsets = pattern.offsets(branch.rate, kv_heads)
        for piece in pieces(0, stop - start, branch):
            lanes = piece.lanes(branch.rate, offsets, origin=-start)
            stride = branch.segment_length if piece.segments > 1 else 0
            for (comb,) in group_heads(lanes, segments=piece.segments, stride=stride):
                yield Tile(comb, comb, causal)


def _fused(tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Join lone segments that differ only by a constant distance: equal documents become one tile."""
    alike: dict[Tile, list[int]] = {}
    for tile in tiles:
        if tile.queries.segments > 1 or tile.queries != tile.keys:
            yield tile
        else:
            shape = replace(tile.queries, start=0)
            alike.setdefault(Tile(shape, shape, tile.causal), []).append(tile.queries.start)
    for tile, starts in alike.items():
        for start, segments, stride in _runs(starts):
            comb = replace(tile.queries, start=start, segments=segments, stride=stride)
            yield Tile(comb, comb, tile.causal)


def _runs(starts: list[int]) -> Iterator[tuple[int, int, int]]:
    """Rising numbers as runs (first, how many, distance).

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
