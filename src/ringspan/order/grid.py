"""Orders of the cells of a grid (`Hilbert`, `RowMajor`, `Snake`, `Morton`) and of folded segments (`FoldedOrder`)."""

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
    """The cells of a grid along a curve. The input has one row per cell, in row-major order."""

    shape: tuple[int, ...]
    curve: ClassVar[CurveName]

    def __post_init__(self) -> None:
        if isinstance(self.shape, (str, int)) or not isinstance(self.shape, Sequence):
            raise TypeError(f"shape={self.shape!r}: must be a sequence of ints, one per side of the grid")
        shape = tuple(as_int(f"shape[{i}]", side) for i, side in enumerate(self.shape))
        if not shape:
            raise ValueError("shape=(): a grid has at least one side; for a sequence of n rows use (n,)")
        for i, side in enumerate(shape):
            if side < 1:
                raise ValueError(f"shape[{i}]={side}: a side of a grid has at least 1 cell")
        object.__setattr__(self, "shape", shape)

    @classmethod
    def folded(cls, segment_length: int) -> FoldedOrder:
        """For sequences without a grid: folds each segment of rows into a near-square and visits it along the curve.

        Accepts any sequence length; the last segment may be short.

        >>> import ringspan as rs
        >>> rs.Hilbert.folded(4).apply(torch.arange(10), dim=0).tolist()
        [0, 1, 3, 2, 4, 5, 7, 6, 8, 9]
        """
        return FoldedOrder(cls.curve, segment_length)

    @classmethod
    def from_points(cls, coordinates: Tensor) -> PointOrder:
        """For scattered points, (points, dimensions), such as tiles of a slide or a point cloud. See `PointOrder`.

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
                f"{length} rows, but {self} has {self.period} cells: pass one row per cell, in row-major order"
            )

    @property
    def coordinates(self) -> Tensor:
        """The grid coordinates of the cells, in this order, (cells, dimensions): for `rs.nn.GridRotary`."""
        return all_cells(self.shape, "cpu")[self.permutation]

    @property
    def longest_step(self) -> int:
        """The largest Manhattan distance between consecutive cells: 1 if each cell is adjacent to the next."""
        steps = self.coordinates.diff(dim=0).abs().sum(-1)
        return int(steps.max()) if len(steps) else 0


@dataclass(frozen=True)
class Hilbert(GridOrder):
    """A Hilbert curve through a grid of any shape: rows that are close on the curve are close on the grid.

    Consecutive cells are adjacent if all sides are even or 1, in any number of dimensions. For other shapes,
    `longest_step` is the largest distance between them.

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
    """Row by row: the order of the input."""

    curve: ClassVar[CurveName] = "row_major"


@dataclass(frozen=True)
class Snake(GridOrder):
    """Row by row, every other row backwards. Consecutive cells are adjacent, but a segment is still a strip."""

    curve: ClassVar[CurveName] = "snake"


@dataclass(frozen=True)
class Morton(GridOrder):
    """Z-order, by interleaved bits. Segments are as compact as Hilbert's at aligned powers of two, else often split."""

    curve: ClassVar[CurveName] = "morton"


GRID_ORDERS: dict[str, type[GridOrder]] = {order.curve: order for order in (Hilbert, RowMajor, Snake, Morton)}


@dataclass(frozen=True)
class FoldedOrder(Order):
    """Segments of ``segment_length`` rows, each folded row by row into a near-square and visited along the curve.

    Accepts any number of rows: in a short last segment, the missing rows are skipped. Created by `Hilbert.folded`,
    `Morton.folded` and so on.
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
        """Accepts any length."""


def near_square(cells: int) -> tuple[int, int]:
    """A rectangle with at least this many cells: exactly as many, if one exists that is at most twice as wide as high.

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
