"""The simpler orders of a box's cells, each as a number by which cells are sorted: company for the Hilbert curve."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def row_major_keys(cells: Tensor, shape: Sequence[int]) -> Tensor:
    """Row by row, each from its beginning.

    >>> row_major_keys(torch.tensor([[0, 2], [1, 0]]), (2, 3)).tolist()
    [2, 3]
    """
    key = torch.zeros(len(cells), dtype=torch.int64, device=cells.device)
    for axis, side in enumerate(shape):
        key = key * side + cells[:, axis]
    return key


def snake_keys(cells: Tensor, shape: Sequence[int]) -> Tensor:
    """Row by row, every other row backwards: consecutive cells are neighbours, but a segment is still a strip.

    >>> snake_keys(torch.tensor([[0, 2], [1, 2], [1, 0]]), (2, 3)).tolist()
    [2, 3, 5]
    """
    key = torch.zeros(len(cells), dtype=torch.int64, device=cells.device)
    for axis, side in enumerate(shape):
        place = cells[:, axis]
        key = key * side + torch.where(key % 2 == 0, place, side - 1 - place)
    return key


def morton_keys(cells: Tensor, shape: Sequence[int]) -> Tensor:
    """Z-order: the bits of the coordinates in turns, the coarsest first; a short side joins in where its bits begin.

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
