"""All curves through the cells of a box: row-major, snake and Morton by sort keys, Hilbert from `hilbert.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ringspan.order.hilbert import hilbert_curve, hilbert_positions


def row_major_keys(cells: Tensor, shape: Sequence[int]) -> Tensor:
    """Row by row, each row forwards.

    >>> row_major_keys(torch.tensor([[0, 2], [1, 0]]), (2, 3)).tolist()
    [2, 3]
    """
    key = torch.zeros(len(cells), dtype=torch.int64, device=cells.device)
    for axis, side in enumerate(shape):
        key = key * side + cells[:, axis]
    return key


def snake_keys(cells: Tensor, shape: Sequence[int]) -> Tensor:
    """Row by row, every other row backwards: consecutive cells are adjacent, but a segment is still a strip.

    >>> snake_keys(torch.tensor([[0, 2], [1, 2], [1, 0]]), (2, 3)).tolist()
    [2, 3, 5]
    """
    key = torch.zeros(len(cells), dtype=torch.int64, device=cells.device)
    for axis, side in enumerate(shape):
        place = cells[:, axis]
        key = key * side + torch.where(key % 2 == 0, place, side - 1 - place)
    return key


def morton_keys(cells: Tensor, shape: Sequence[int]) -> Tensor:
    """Z-order: the bits of the coordinates interleaved, the most significant first; short sides have fewer bits.

    >>> morton_keys(torch.tensor([[0, 1], [1, 0], [0, 2]]), (2, 4)).tolist()
    [1, 2, 4]
    """
    lengths = [(side - 1).bit_length() for side in shape]
    key = torch.zeros(len(cells), dtype=torch.int64, device=cells.device)
    for bit in reversed(range(max(lengths))):
        for axis, length in enumerate(lengths):
            if bit < length:
                key = key << 1 | cells[:, axis] >> bit & 1
    return key


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
        return hilbert_curve(shape, device)  # the same result as sorting by keys, but much faster
    return sort_keys(curve, all_cells(shape, device), shape).argsort()


def sort_keys(curve: CurveName, cells: Tensor, shape: Sequence[int]) -> Tensor:
    """Sort keys of the given cells, (cells, dimensions). Sorting by them puts the cells in curve order."""
    return _KEYS[curve](cells, shape)


def all_cells(shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """The coordinates of a box's cells in row-major order, (cells, dimensions).

    >>> all_cells((2, 2)).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    sides = [torch.arange(side, device=device) for side in shape]
    return torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1).flatten(0, -2)
