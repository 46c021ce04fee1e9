"""Orders of sequences that have no grid: each segment is folded into a near-square, which a curve visits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ringspan.geometry import as_int
from ringspan.order.curves import CurveName, visit
from ringspan.order.protocol import Order


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
