"""Rotary positions: each pair of numbers in a head is turned by an angle that grows with the token's position."""

from __future__ import annotations

import torch
from torch import Tensor


def angles(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (.., rows, 1, head_dim / 2), of the rows at positions (.., rows). Computed in 64 bits."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    turns = positions.double()[..., None, None] * base**-steps
    return turns.cos().to(dtype), turns.sin().to(dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn ``x`` (batch, rows, heads, head_dim): half of each head holds one coordinate, the other half the other.

    >>> x = torch.ones(1, 1, 1, 2)
    >>> rotate(x, *angles(torch.tensor([0]), 2, 10.0, x.dtype)).tolist()
    [[[[1.0, 1.0]]]]
    """
    left, right = x.float().chunk(2, dim=-1) if x.dtype.itemsize < 4 else x.chunk(2, dim=-1)
    turned = torch.cat((left * cosines - right * sines, right * cosines + left * sines), dim=-1)
    return turned.to(x.dtype)
