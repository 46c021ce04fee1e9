"""Rotary position embeddings: each pair of features in a head is rotated by an angle proportional to the position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ringspan.geometry import as_int
from ringspan.order import RowMajor
from ringspan.order.curves import all_cells


def angles(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (.., rows, 1, head_dim / 2) of the rows at positions (.., rows), computed in fp64."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    radians = positions.double()[..., None, None] * base**-steps
    return radians.cos().to(dtype), radians.sin().to(dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate ``x`` (batch, rows, heads, head_dim). Feature i is paired with feature i + head_dim / 2.

    >>> x = torch.ones(1, 1, 1, 2)
    >>> rotate(x, *angles(torch.tensor([0]), 2, 10.0, x.dtype)).tolist()
    [[[[1.0, 1.0]]]]
    """
    left, right = x.float().chunk(2, dim=-1) if x.dtype.itemsize < 4 else x.chunk(2, dim=-1)
    rotated = torch.cat((left * cosines - right * sines, right * cosines + left * sines), dim=-1)
    return rotated.to(x.dtype)


class GridRotary(nn.Module):
    """Rotary embedding on a grid: scores depend on differences of coordinates.

    The pairs of features in a head are divided evenly among the axes; the first axes get the remainder.

    Args:
        shape: lengths of the axes of the grid.
        head_dim: features per head. Even, and at least two per axis.
        base: the fastest pair of an axis rotates by one radian per cell, the slowest about ``base`` times slower. 100
            suits neighbourhoods of tens of cells.

    >>> import ringspan as rs
    >>> rotary, order = rs.nn.GridRotary((4, 6), head_dim=8), rs.Hilbert((4, 6))
    >>> x = torch.randn(2, 24, 3, 8)
    >>> bool(torch.equal(order.apply(rotary(x)), rotary(order.apply(x), order.coordinates)))
    True
    """

    def __init__(self, shape: Sequence[int], head_dim: int, base: float = 100.0) -> None:
        super().__init__()
        self.grid, self.head_dim, self.base = RowMajor(shape), as_int("head_dim", head_dim), base  # type: ignore[arg-type]
        axes = len(self.grid.shape)
        if not 0 < base < math.inf:
            raise ValueError(f"base={base}: must be positive and finite; 100 suits neighbourhoods of tens of cells")
        if head_dim % 2 or head_dim < 2 * axes:
            raise ValueError(
                f"head_dim={head_dim}: must be even and at least {2 * axes}, one pair for each of {axes} axes"
            )
        self.pairs = [len(range(axis, head_dim // 2, axes)) for axis in range(axes)]

    def forward(self, x: Tensor, coordinates: Tensor | None = None) -> Tensor:
        """Rotate ``x`` (batch, rows, heads, head_dim).

        ``coordinates`` (rows, axes) are the grid coordinates of the rows, such as `Hilbert.coordinates`. For the rows
        of one rank, index them with ``ring.positions(seq_len)``. By default, ``x`` holds all cells in row-major order.
        """
        if x.dim() != 4 or not x.is_floating_point():
            raise ValueError(
                f"x is {x.dtype} of shape {tuple(x.shape)}: must be floating point, (batch, rows, heads, head_dim)"
            )
        if coordinates is None:
            self.grid.check_length(x.shape[1])
            coordinates = all_cells(self.grid.shape, x.device)
        if coordinates.shape != (x.shape[1], len(self.pairs)) or x.shape[-1] != self.head_dim:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, coordinates {tuple(coordinates.shape)}: x must be (batch, rows, heads, "
                f"{self.head_dim}), and coordinates (rows, {len(self.pairs)})"
            )
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        angles_by_axis = [
            angles(axis, 2 * pairs, self.base, wide)
            for axis, pairs in zip(coordinates.to(x.device).unbind(1), self.pairs, strict=True)
        ]
        cosines, sines = (torch.cat(parts, dim=-1) for parts in zip(*angles_by_axis, strict=True))
        return rotate(x, cosines, sines)

    def extra_repr(self) -> str:
        return f"shape={self.grid.shape}, head_dim={self.head_dim}, base={self.base}"
