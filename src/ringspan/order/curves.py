"""The curves by name: how each visits the cells of a box, and how it sorts some cells of a box too large to visit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ringspan.order.curve import hilbert_curve, hilbert_positions
from ringspan.order.keys import morton_keys, row_major_keys, snake_keys

CurveName = Literal["hilbert", "row_major", "snake", "morton"]

_KEYS: dict[CurveName, Callable[[Tensor, Sequence[int]], Tensor]] = {
    "hilbert": hilbert_positions,
    "row_major": row_major_keys,
    "snake": snake_keys,
    "morton": morton_keys,
}


def visit(curve: CurveName, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """The row-major indices of a box's cells in the order of the curve, int64.

    >>> visit("snake", (2, 3)).tolist()
    [0, 1, 2, 5, 4, 3]
    """
    if curve == "hilbert":
        return hilbert_curve(shape, device)  # the same as by its keys, and far sooner
    return sort_keys(curve, all_cells(shape, device), shape).argsort()


def sort_keys(curve: CurveName, cells: Tensor, shape: Sequence[int]) -> Tensor:
    """A number for each of some cells, (cells, dimensions): sorted by it they follow the curve."""
    return _KEYS[curve](cells, shape)


def all_cells(shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """The coordinates of a box's cells in row-major order, (cells, dimensions).

    >>> all_cells((2, 2)).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    sides = [torch.arange(side, device=device) for side in shape]
    return torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1).flatten(0, -2)
