"""Orders of scattered points: each falls into a cell of a fine grid, and cells are sorted along a curve."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ringspan.order.curves import CurveName, sort_keys
from ringspan.order.protocol import Order

_KEY_BITS = 60  # of all dimensions together: a position on the curve is an int64
_MOST_BITS_OF_A_SIDE = 20

# Operators know an order by its text, and no text holds a million points: these are found by their digest.
_known: WeakValueDictionary[str, PointOrder] = WeakValueDictionary()


@dataclass(frozen=True)
class PointOrder(Order):
    """Points along a curve through the box that holds them all. Made by `Hilbert.from_points` and its like.

    Whole numbers are cells as they are; other coordinates are scaled, all by the same factor, into a grid of up to
    2 ** 20 cells a side (2 ** 60 in all). Points of one cell keep the order in which they came.
    """

    curve: CurveName
    digest: str
    rows: Tensor = field(compare=False, repr=False)

    @staticmethod
    def of(curve: CurveName, coordinates: Tensor) -> PointOrder:
        """The order of these points, (points, dimensions)."""
        cells, shape = cells_of_points(coordinates)
        rows = sort_keys(curve, cells, shape).argsort(stable=True).cpu()
        content = ctypes.string_at(rows.data_ptr(), rows.nbytes)  # without NumPy, which torch does not need either
        order = PointOrder(curve, hashlib.sha256(content).hexdigest()[:32], rows)
        return _known.setdefault(order.text, order)

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
            raise ValueError(f"{length} rows, but the order is one of {self.period} points: give one row for each")


def find_points(text: str) -> PointOrder:
    """The order of points that has this text."""
    order = _known.get(text)
    if order is None:
        raise ValueError(f"order {text!r} is gone: keep a reference to it as long as compiled code uses it")
    return order


def cells_of_points(coordinates: Tensor) -> tuple[Tensor, Sequence[int]]:
    """The cell of each point, (points, dimensions), and the shape of the grid that holds them."""
    if not isinstance(coordinates, Tensor) or coordinates.dim() != 2 or 0 in coordinates.shape:
        shape = tuple(coordinates.shape) if isinstance(coordinates, Tensor) else type(coordinates).__name__
        raise ValueError(f"coordinates are {shape}: must be a tensor (points, dimensions), at least one of each")
    dimensions = coordinates.shape[1]
    if dimensions > _KEY_BITS:
        raise ValueError(f"coordinates have {dimensions} dimensions: at most {_KEY_BITS} can be told apart")
    wide = coordinates.double()
    if not wide.isfinite().all():
        raise ValueError("coordinates hold NaN or infinity: every point needs a place; leave the others out")
    if torch.equal(wide, wide.round()):
        cells = coordinates.long() - coordinates.long().amin(0)
        sides = [int(most) + 1 for most in cells.amax(0)]
        if sum((side - 1).bit_length() for side in sides) <= _KEY_BITS:
            return cells, sides
    wide = wide - wide.amin(0)
    extents = wide.amax(0)
    cells_a_unit = 2 ** min(_MOST_BITS_OF_A_SIDE, _KEY_BITS // dimensions) / max(float(extents.max()), 1e-300)
    # Even sides: then the curve goes from neighbour to neighbour.
    sides = [max(1, 2 * math.ceil(float(extent) * cells_a_unit / 2)) for extent in extents]
    cells = (wide * cells_a_unit).long()
    return torch.minimum(cells, torch.tensor(sides, device=cells.device) - 1), sides
