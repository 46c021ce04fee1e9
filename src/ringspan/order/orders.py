"""Orders of the cells of a grid (`Hilbert`, `Morton`, ..), of folded segments and of points; their operator.

Operators take plain values, so `ringspan::reorder` takes an order as text, which `parse_order` reads.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ringspan.geometry import as_int
from ringspan.geometry.curves import CurveName, grid_shape
from ringspan.layout import Layout
from ringspan.order.base import Order, rows_and_places, select_rows
from ringspan.order.curves import all_cells, sort_keys, visit

_KEY_BITS = 60  # of all dimensions together: a position on the curve is an int64
_MOST_BITS_OF_A_SIDE = 20

# Operators take an order as text. Orders of points are too large for that, so they are registered under a digest.
_known: WeakValueDictionary[str, PointOrder] = WeakValueDictionary()


@dataclass(frozen=True)
class GridOrder(Order):
    """The cells of a grid along a curve. The input has one row per cell, in row-major order."""

    shape: tuple[int, ...]
    curve: ClassVar[CurveName]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", grid_shape(self.shape))

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


@dataclass(frozen=True)
class PointOrder(Order):
    """Points along a curve through their bounding box. Created by `Hilbert.from_points` and so on.

    Integer coordinates are cells. Other coordinates are scaled, all by the same factor, into a grid of up to 2 ** 20
    cells per side (2 ** 60 in total). Points in one cell are sorted by their coordinates, the first dimension first;
    equal points keep their order. So points on a line are always sorted.
    """

    curve: CurveName
    digest: str
    rows: Tensor = field(compare=False, repr=False)

    @staticmethod
    def of(curve: CurveName, coordinates: Tensor) -> PointOrder:
        """The order of these points, (points, dimensions)."""
        points = _exact(coordinates)
        keys = sort_keys(curve, *cells_of_points(points))
        rows = torch.arange(len(points), device=points.device)
        for column in (*reversed(points.unbind(1)), keys):  # stable sorts: the last key has priority
            rows = rows[column[rows].argsort(stable=True)]
        rows = rows.cpu()
        content = ctypes.string_at(rows.data_ptr(), rows.nbytes)  # avoids NumPy, which torch does not require
        return _find_or_keep(curve, hashlib.sha256(content).hexdigest()[:32], rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return _find_or_keep, (self.curve, self.digest, self.rows)  # registers it in the process that unpickles it

    def __deepcopy__(self, memo: dict[int, Any]) -> PointOrder:
        return self  # immutable

    @property
    def text(self) -> str:
        return f"{self.curve} points {self.digest}"

    @property
    def period(self) -> int:
        return len(self.rows)

    def visit(self, device: torch.device | str | None = None) -> Tensor:
        return self.rows.to(device or "cpu")

    def check_length(self, length: int) -> None:
        if length != self.period:
            raise ValueError(f"{length} rows, but the order has {self.period} points: pass one row per point")


def _find_or_keep(curve: CurveName, digest: str, rows: Tensor) -> PointOrder:
    """The registered order with this digest: one object, however often it is created."""
    order = PointOrder(curve, digest, rows)
    return _known.setdefault(order.text, order)


def find_points(text: str) -> PointOrder:
    """The order of points that has this text."""
    order = _known.get(text)
    if order is None:
        raise ValueError(f"order {text!r} no longer exists: keep a reference to it as long as compiled code uses it")
    return order


def cells_of_points(points: Tensor) -> tuple[Tensor, Sequence[int]]:
    """The cell of each point, (points, dimensions), and the shape of the grid; the points are int64 or float64."""
    dimensions = points.shape[1]
    if dimensions > _KEY_BITS:
        raise ValueError(f"coordinates have {dimensions} dimensions: at most {_KEY_BITS} are supported")
    if not points.is_floating_point() or torch.equal(points, points.round()):
        lowest, highest = ([int(value) for value in bound] for bound in (points.amin(0), points.amax(0)))  # any size
        sides = [high - low + 1 for low, high in zip(lowest, highest, strict=True)]
        fits_int64 = min(lowest) >= -(2**63) and max(highest) < 2**63
        if fits_int64 and sum((side - 1).bit_length() for side in sides) <= _KEY_BITS:
            return points.long() - torch.tensor(lowest, device=points.device), sides
    wide = points.double()
    if not (wide.amax(0) - wide.amin(0)).isfinite().all():
        wide = wide / 4  # the difference of two large doubles can overflow
    wide = _times_power_of_two(wide - wide.amin(0))
    extents = wide.amax(0)
    cells_a_unit = 2 ** min(_MOST_BITS_OF_A_SIDE, _KEY_BITS // dimensions) / (float(extents.max()) or 1.0)
    # Even sides, so that consecutive cells of the curve are adjacent.
    sides = [max(1, 2 * math.ceil(float(extent) * cells_a_unit / 2)) for extent in extents]
    cells = (wide * cells_a_unit).long()
    return torch.minimum(cells, torch.tensor(sides, device=cells.device) - 1), sides


def _exact(coordinates: Tensor) -> Tensor:
    """The same points as int64 or float64, without rounding."""
    if not isinstance(coordinates, Tensor) or coordinates.dim() != 2 or 0 in coordinates.shape:
        shape = tuple(coordinates.shape) if isinstance(coordinates, Tensor) else type(coordinates).__name__
        raise ValueError(f"coordinates are {shape}: must be a tensor (points, dimensions), at least one of each")
    if coordinates.is_complex():
        raise ValueError(f"coordinates are {coordinates.dtype}: must be real; pass torch.view_as_real(x)")
    if not coordinates.is_floating_point():
        unsigned = coordinates.dtype == torch.uint64
        return coordinates.view(torch.int64) ^ -(2**63) if unsigned else coordinates.long()  # preserves the order
    points = coordinates.double()
    bad = (~points.isfinite()).any(1).nonzero()
    if len(bad):
        raise ValueError(
            f"coordinates hold NaN or infinity: point {int(bad[0])} is {points[int(bad[0])].tolist()}; "
            "remove such points"
        )
    return points


def _times_power_of_two(wide: Tensor) -> Tensor:
    """Scale by a power of two so that the maximum is in [0.5, 1): subnormal numbers have no finite reciprocal."""
    _, exponent = math.frexp(float(wide.max()))
    half = -exponent // 2
    return wide * 2.0**half * 2.0 ** (-exponent - half)


def parse_order(text: str) -> Order:
    """The order with this text.

    >>> parse_order("hilbert grid 4x4")
    Hilbert(shape=(4, 4))
    """
    # Orders of points are not cached here: they exist only while the caller keeps a reference.
    return find_points(text) if text.split()[1] == "points" else _parse_plain(text)


@lru_cache(maxsize=256)
def _parse_plain(text: str) -> Order:
    curve, kind, numbers = text.split()
    if kind == "folded":
        return FoldedOrder(cast(CurveName, curve), int(numbers))
    return GRID_ORDERS[curve](tuple(int(side) for side in numbers.split("x")))


@torch.library.custom_op("ringspan::reorder", mutates_args=())
def reorder_op(x: Tensor, order: str, dim: int, back: bool) -> Tensor:
    """Permute the rows of ``x`` by an order, or undo it."""
    rows, places = rows_and_places(parse_order(order), x.shape[dim], x.device)
    return select_rows(x, dim, places if back else rows)


@reorder_op.register_fake
def _reorder_fake(x: Tensor, order: str, dim: int, back: bool) -> Tensor:
    return x.new_empty(x.shape)


def _keep_order(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.order_text, ctx.dim, ctx.back = inputs
    ctx.order = parse_order(ctx.order_text)  # keeps the order alive until backward


def _reorder_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return reorder_op(grad, ctx.order_text, ctx.dim, not ctx.back), None, None, None


reorder_op.register_autograd(_reorder_backward, setup_context=_keep_order)
