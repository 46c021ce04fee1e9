"""Orders of the cells of a grid: `Hilbert`, and beside it `RowMajor`, `Snake` and `Morton`, under the same protocol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ringspan.geometry import as_int
from ringspan.layout import Layout
from ringspan.order.base import Order
from ringspan.order.curves import CurveName, all_cells, visit
from ringspan.order.points import PointOrder


@dataclass(frozen=True)
class GridOrder(Order):
    """The cells of a grid of this shape, which lie in row-major order, along a curve."""

    shape: tuple[int, ...]
    curve: ClassVar[CurveName]

    def __post_init__(self) -> None:
        if isinstance(self.shape, (str, int)) or not isinstance(self.shape, Sequence):
            raise TypeError(f"shape={self.shape!r}: must be a sequence of ints, one for each side of the grid")
        shape = tuple(as_int(f"shape[{i}]", side) for i, side in enumerate(self.shape))
        if not shape:
            raise ValueError("shape=(): a grid has at least one side; for a sequence of n rows say (n,)")
        for i, side in enumerate(shape):
            if side < 1:
                raise ValueError(f"shape[{i}]={side}: a side of a grid has at least 1 cell")
        object.__setattr__(self, "shape", shape)

    @classmethod
    def folded(cls, segment_length: int) -> FoldedOrder:
        """For sequences without a grid: each segment of so many rows is folded into a near-square, and visited along
        the curve. Any length will do; the last segment may be short.

        >>> import ringspan as rs
        >>> rs.Hilbert.folded(4).apply(torch.arange(10), dim=0).tolist()
        [0, 1, 3, 2, 4, 5, 7, 6, 8, 9]
        """
        return FoldedOrder(cls.curve, segment_length)

    @classmethod
    def from_points(cls, coordinates: Tensor) -> PointOrder:
        """For scattered points, (points, dimensions): tiles of a slide, a point cloud. See `PointOrder`.

        >>> import ringspan as rs
        >>> rs.Hilbert.from_points(torch.tensor([[0.9, 0.1], [0.1, 0.2], [0.8, 0.8]])).permutation.tolist()
        [1, 2, 0]
        """
        return PointOrder.of(cls.curve, coordinates)

    @property
    def text(self) -> str:
        return f"{self.curve} grid {'x'.join(map(str, self.shape))}"

    @property
    def period(self) -> int:
        return math.prod(self.shape)

    def visit(self, device: torch.device | str | None = None) -> Tensor:
        return visit(self.curve, self.shape, device)

    def check_length(self, length: int) -> None:
        if length != self.period:
            raise ValueError(
                f"{length} rows, but {self} has {self.period} cells: give one row for each cell, in row-major order"
            )

    @property
    def coordinates(self) -> Tensor:
        """The grid coordinates of the cells, in this order, (cells, dimensions): for `rs.nn.GridRotary`."""
        return all_cells(self.shape, "cpu")[self.permutation]

    @property
    def longest_step(self) -> int:
        """The longest way between consecutive cells, in cells along the axes: 1 if each is the next one's neighbour."""
        steps = self.coordinates.diff(dim=0).abs().sum(-1)
        return int(steps.max()) if len(steps) else 0


@dataclass(frozen=True)
class Hilbert(GridOrder):
    """A Hilbert curve through a grid of any shape: neighbours on the curve are neighbours on the grid.

    Consecutive cells are neighbours whenever all sides are even or 1, in any number of dimensions; elsewhere
    `longest_step` says how far apart they can be.

    >>> order = Hilbert((2, 3))
    >>> order.permutation.tolist()
    [0, 1, 2, 5, 4, 3]
    >>> x = torch.randn(1, 6, 8)
    >>> bool((order.undo(order.apply(x)) == x).all())
    True
    """

    curve: ClassVar[CurveName] = "hilbert"


@dataclass(frozen=True)
class RowMajor(GridOrder):
    """Row by row: the cells as they lie."""

    curve: ClassVar[CurveName] = "row_major"


@dataclass(frozen=True)
class Snake(GridOrder):
    """Row by row, every other row backwards. Consecutive cells are neighbours, and still a segment is a strip."""

    curve: ClassVar[CurveName] = "snake"


@dataclass(frozen=True)
class Morton(GridOrder):
    """Z-order, by interleaved bits. As compact as Hilbert's where segments are aligned powers of two, else torn."""

    curve: ClassVar[CurveName] = "morton"


GRID_ORDERS: dict[str, type[GridOrder]] = {order.curve: order for order in (Hilbert, RowMajor, Snake, Morton)}


@dataclass(frozen=True)
class FoldedOrder(Order):
    """Segments of ``segment_length`` rows, each laid row by row into a near-square and visited along the curve.

    Any number of rows can be ordered: of a last segment that is short, the rows that there are, in the same order. Made
    by `Hilbert.folded` and its like.
    """

    curve: CurveName
    segment_length: int

    def __post_init__(self) -> None:
        length = as_int("segment_length", self.segment_length)
        if length < 1:
            raise ValueError(f"segment_length={length}: a segment has at least 1 row")
        object.__setattr__(self, "segment_length", length)

    @property
    def text(self) -> str:
        return f"{self.curve} folded {self.segment_length}"

    @property
    def period(self) -> int:
        return self.segment_length

    def visit(self, device: torch.device | str | None = None) -> Tensor:
        rows = visit(self.curve, near_square(self.segment_length), device)
        return rows[rows < self.segment_length]

    def check_length(self, length: int) -> None:
        """Any length will do."""


def near_square(cells: int) -> tuple[int, int]:
    """A rectangle with room for so many cells: exactly so many if it can be at most twice as wide as high.

    >>> near_square(2048), near_square(1009)
    ((32, 64), (32, 32))
    """
    height = next(side for side in range(math.isqrt(cells), 0, -1) if cells % side == 0)
    if cells <= 2 * height * height:
        return height, cells // height
    width = math.isqrt(cells - 1) + 1
    return -(-cells // width), width


def ranks_of_cells(order: GridOrder, ring_size: int) -> Tensor:
    """The rank of each cell, in the shape of the grid.

    >>> from ringspan import Hilbert
    >>> ranks_of_cells(Hilbert((2, 4)), 2).tolist()
    [[0, 0, 1, 1], [0, 0, 1, 1]]
    """
    layout = Layout("contiguous", order.period, ring_size)
    ranks = order.permutation.new_zeros(order.period)
    for rank in range(ring_size):
        for span in layout.spans(rank):
            ranks[order.permutation[span.start : span.stop]] = rank
    return ranks.view(order.shape)
