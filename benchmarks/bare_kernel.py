"""The flash kernel without ringspan: what the tiles of a plan cost if everything else were free."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

import ringspan as rs
from benchmarks.suite import HEAD_DIM, HEADS
from ringspan.geometry import Mask
from ringspan.planning import Tile

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SCORES = rs.kernels.ScoreOptions(HEAD_DIM**-0.5)


class BareKernel:
    """PyTorch's flash kernel, one call for each contiguous tile: the cost if everything else were free."""

    def __init__(self, shapes: Iterable[tuple[int, int, int, int, Mask]], head_dim: int = HEAD_DIM) -> None:
        """Takes (segments, heads, query rows, key rows, mask) of each tile."""
        self.tiles = []
        for segments, heads, rows, keys, mask in shapes:
            q, k, v = (torch.randn(segments, heads, length, head_dim) for length in (rows, keys, keys))
            self.tiles.append((q, k, v, mask))

    @staticmethod
    def of(pattern: rs.Pattern, n: int, causal: bool) -> BareKernel:
        """The tiles of the plain plan: every pair of the definition. A reversed triangle costs as much as a causal one.

        Windows are never planned together with other branches, so that all plans of a window are plain.
        """
        plan = rs.plan(pattern, n, causal=causal, heads=HEADS, head_dim=HEAD_DIM, optimize="none")
        return BareKernel.of_tiles(plan.rank(0).tiles)

    @staticmethod
    def of_tiles(tiles: Iterable[Tile], head_dim: int = HEAD_DIM) -> BareKernel:
        masks: dict[Mask, Mask] = {"full": "full", "causal": "causal", "anticausal": "causal"}
        shapes = (
            (tile.queries.segments, tile.queries.heads, tile.queries.rows, tile.keys.rows, masks[tile.mask])
            for tile in tiles
        )
        return BareKernel(shapes, head_dim)

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        return [_forward(q, k, v, 0.0, mask != "full", scale=SCORES.scale) for q, k, v, mask in self.tiles]

    def both(self) -> None:
        for (q, k, v, mask), (out, lse) in zip(self.tiles, self.forward(), strict=True):
            _backward(out, q, k, v, out, lse, 0.0, mask != "full", scale=SCORES.scale)
