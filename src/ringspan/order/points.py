"""Orders of scattered points: each point is assigned to a cell of a fine grid, and cells are sorted along a curve."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ringspan.order.base import Order
from ringspan.order.curves import CurveName, sort_keys

_KEY_BITS = 60  # of all dimensions together: a position on the curve is an int64
_MOST_BITS_OF_A_SIDE = 20

# Operators take an order as text. Orders of points are too large for that, so they are registered under a digest.
_known: WeakValueDictionary[str, PointOrder] = WeakValueDictionary()


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
