"""Combs as strided views of tensors, and tiles cut into kernel calls of bounded size.

Uses tensors and integers, but no kernels, softmax or rings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from ringspan.geometry import Comb, Mask

Operands = dict[str, Tensor]
IndexRange = tuple[int, int]  # (first, count)

# A call should have at least this many independent tiles, if there are as many: the CPU's backward kernel runs each of
# them on one thread.
_PARALLEL_TILES = 8
_SMALLEST_EDGE = 64


def comb_view(x: Tensor, comb: Comb, group: int = 1) -> Tensor:
    """The rows of a comb as a view (batch, segments, KV heads, group, rows[, dim]) of ``x`` (batch, seq, heads[, dim]).

    ``group`` is the number of heads of ``x`` per KV head. The last dimension must be dense.
    """
    batch, row, head = x.stride()[:3]
    dims = x.shape[3:]
    return x.as_strided(
        (x.shape[0], comb.segments, comb.heads, group, comb.rows, *dims),
        (
            batch,
            comb.stride * row,
            comb.head_stride * group * head + comb.head_step * row,
            head,
            comb.step * row,
            *(1 for _ in dims),
        ),
        x.storage_offset() + comb.start * row + comb.head * group * head,
    )


def fold(operands: Operands, zero_strides: bool) -> Iterator[Operands]:
    """Reduce views (batch, segments, KV heads, group, rows, ..) to (x, y, rows, ..), looping over one dimension.

    Batch and segments become one dimension if the strides of all operands allow it; otherwise batch is looped over. Of
    the remaining three, the shortest is looped over. If a kernel accepts no zero strides, the loop is over the group,
    in which keys and values are expanded.
    """
    views = list(operands.values())
    if 1 in views[0].shape[:2] or all(x.stride(0) == x.shape[1] * x.stride(1) for x in views):
        batches = [[x.flatten(0, 1) for x in views]]
    else:
        batches = [[x.select(0, b) for x in views] for b in range(views[0].shape[0])]
    for parts in batches:
        sizes = parts[0].shape[:3]
        loop = min((2, 1, 0), key=lambda d: sizes[d]) if zero_strides else 2
        for i in range(sizes[loop]):
            yield {name: x.select(loop, i) for name, x in zip(operands, parts, strict=True)}


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a tile: query rows against key rows. Only blocks on the diagonal of a triangle have its mask."""

    queries: IndexRange
    keys: IndexRange
    mask: Mask
    first: bool  # of all blocks of its query rows

    def of(self, operands: Operands, query_side: Operands) -> Operands:
        """The block's rows of operands (x, y, rows, ..): query rows or key rows, depending on the operand."""
        return {
            name: _narrowed(x, 2, self.queries if name in query_side else self.keys) for name, x in operands.items()
        }


def blocks(query_rows: int, key_rows: int, mask: Mask, edge: int) -> Iterator[Block]:
    """Cut a tile into blocks of at most ``edge`` rows and keys, without those that its mask hides."""
    for queries in _ranges(query_rows, edge):
        first = True
        for keys in _ranges(key_rows, edge):
            on_diagonal = keys == queries
            below, above = keys[0] < queries[0], keys[0] > queries[0]
            if mask == "full" or on_diagonal or (below if mask == "causal" else above):
                yield Block(queries, keys, mask if on_diagonal else "full", first)
                first = False


@dataclass(frozen=True, slots=True)
class CallSize:
    """The size of one kernel call: at most ``edge`` rows and keys, of at most ``tiles`` independent tiles."""

    edge: int
    tiles: int

    @staticmethod
    def that_fits(workspace: int, longest: int, independent: int, row_bytes: int, pair_bytes: int) -> CallSize:
        """The largest call whose results fit the workspace.

        Args:
            longest: the number of query or key rows of the tile, whichever is larger.
            independent: the number of tiles of this shape that could run in one call.
            row_bytes: bytes that a call allocates per row of a tile.
            pair_bytes: bytes that it allocates per (query, key) pair; 0 for fused kernels.
        """
        edge = longest
        while edge > _SMALLEST_EDGE:
            if min(independent, _PARALLEL_TILES) * edge * (row_bytes + edge * pair_bytes) <= workspace:
                break
            edge = -(-edge // 2)
        return CallSize(edge, max(1, workspace // (edge * (row_bytes + edge * pair_bytes))))

    def cut(self, operands: Operands) -> Iterator[Operands]:
        """Cut operands (x, y, rows, ..) along x, and along y if necessary."""
        x_size, y_size = next(iter(operands.values())).shape[:2]
        for xs in _ranges(x_size, max(1, self.tiles // y_size)):
            for ys in _ranges(y_size, self.tiles):
                yield {name: _narrowed(_narrowed(x, 0, xs), 1, ys) for name, x in operands.items()}


def _narrowed(x: Tensor, dim: int, index_range: IndexRange) -> Tensor:
    """A range of a dimension. Returns ``x`` itself for the whole range: small tiles are common, and views take time."""
    return x if index_range == (0, x.shape[dim]) else x.narrow(dim, *index_range)


def _ranges(total: int, at_most: int) -> list[IndexRange]:
    """Split 0 .. total into as few ranges of nearly equal length as the limit allows.

    >>> _ranges(10, 4)
    [(0, 3), (3, 3), (6, 4)]
    """
    parts = -(-total // at_most)
    borders = [total * i // parts for i in range(parts + 1)]
    return [(a, b - a) for a, b in pairwise(borders)]
