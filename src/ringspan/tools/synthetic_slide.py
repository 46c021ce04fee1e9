"""Synthetic slides: the tiles of pieces of tissue with rough outlines and holes. No real slide is needed."""

from __future__ import annotations

import torch
from torch import Tensor

_TISSUE_SHARE = 0.4  # of the cells of the slide
_HOLE_SHARE = 0.1  # of the tissue
_ROUGHNESS = 0.35


def tissue(tiles: int, pieces: int, seed: int) -> Tensor:
    """Cells (x, y) of the grid that hold tissue, (tiles, 2), int64, sorted by x, then by y.

    Pieces are side by side, and may touch. Their outlines and holes are random: the seed determines them.

    >>> tissue(5, 1, seed=0).shape
    torch.Size([5, 2])
    """
    generator = torch.Generator().manual_seed(seed)
    height = max(2, round((tiles / _TISSUE_SHARE / 1.5) ** 0.5))
    width = -(-round(tiles / _TISSUE_SHARE) // height) + 1
    x, y = torch.meshgrid((torch.arange(width) + 0.5) / width, (torch.arange(height) + 0.5) / height, indexing="ij")
    inside = torch.full_like(x, -torch.inf)
    for i in range(pieces):
        dx, dy, rx, ry = torch.rand(4, generator=generator).tolist()
        center_x, center_y = (i + 0.4 + 0.2 * dx) / pieces, 0.4 + 0.2 * dy
        reach_x, reach_y = (0.4 + 0.15 * rx) / pieces, 0.3 + 0.15 * ry
        inside = inside.maximum(1 - ((x - center_x) / reach_x) ** 2 - ((y - center_y) / reach_y) ** 2)
    inside += _ROUGHNESS * _smooth_noise(x, y, 3, generator)
    holes = _smooth_noise(x, y, 5, generator)
    likely = inside >= inside.flatten().kthvalue(inside.numel() - tiles + 1).values
    inside[holes > holes[likely].quantile(1 - _HOLE_SHARE)] -= 100.0  # used only if there is no other cell
    chosen = inside.flatten().topk(tiles).indices.sort().values
    return torch.stack((chosen // height, chosen % height), dim=1)


def _smooth_noise(x: Tensor, y: Tensor, waves: float, generator: torch.Generator) -> Tensor:
    """A random field of unit variance: waves of random direction, with about ``waves`` periods per side."""
    directions = waves * torch.randn(32, 2, generator=generator)
    phases = torch.rand(32, generator=generator)
    angles = 2 * torch.pi * (x[..., None] * directions[:, 0] + y[..., None] * directions[:, 1] + phases)
    return angles.cos().sum(-1) / 4
