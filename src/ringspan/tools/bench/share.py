"""The share of the bare kernel: ringspan compared with the fused kernel alone on the tiles of its plan, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import ringspan as rs
from ringspan.geometry import Mask
from ringspan.kernels import ScoreOptions, cpu
from ringspan.kernels.kernel import Gradients
from ringspan.planning import Optimize, Tile
from ringspan.tools.bench.trials import Call, with_gradients, without_gradients

HEADS, HEAD_DIM = 8, 64  # of all comparisons of speed
PASSES = {"forward": "forward", "both": "forward + backward"}
# What ringspan requires of itself where the plan computes the same tiles as the bare kernel.
REQUIRED_SHARE_NOT_NESTED = 0.95
REQUIRED_WINDOW_SHARE = 0.9
_CPU = torch.device("cpu")


def pattern_up_to(longest: int = 32768) -> rs.Dilated:
    """LongNet's geometric series: segments 2048, 4096 .. with rates 1, 2 .."""
    lengths = [2048 * 2**i for i in range(16) if 2048 * 2**i <= longest]
    return rs.Dilated(tuple(lengths), tuple(2**i for i in range(len(lengths))))


def qkv(n: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device = _CPU) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, n, HEADS, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(3)]


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: ScoreOptions) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scores.scale)
    return out, lse


def _backward(*operands: Any) -> Gradients:
    *tensors, causal, scores, _ = operands
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = operator(*tensors, 0.0, causal, scale=scores.scale)
    return dq, dk, dv


# ringspan's CPU kernel calls the operator several times for a triangle.
_ONE_CALL = replace(cpu.FLASH, name="one call", compute_forward=_forward, compute_backward=_backward)


class BareKernel:
    """The fused kernel, one call for each contiguous tile of given shapes: the cost if everything else were free."""

    def __init__(
        self,
        shapes: Iterable[tuple[int, int, int, int, Mask]],
        head_dim: int = HEAD_DIM,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = _CPU,
    ) -> None:
        """Takes (segments, heads, query rows, key rows, mask) of each tile."""
        self.kernel = rs.kernels.choose(device, dtype).kernel
        if self.kernel is cpu.FLASH:
            self.kernel = _ONE_CALL
        self.scores = rs.kernels.ScoreOptions(head_dim**-0.5)
        self.tiles = []
        for segments, heads, rows, keys, mask in shapes:
            q, k, v = (torch.randn(segments, heads, n, head_dim).to(device, dtype) for n in (rows, keys, keys))
            self.tiles.append((q, k, v, mask))

    @staticmethod
    def of(pattern: rs.Pattern, n: int, causal: bool, **where: Any) -> BareKernel:
        """The tiles of the plain plan: every pair of the definition. A reversed triangle costs as much as a causal one.

        Windows are never planned together with other branches, so that all plans of a window are plain.
        """
        plan = rs.plan(pattern, n, causal=causal, heads=HEADS, head_dim=HEAD_DIM, optimize="none")
        return BareKernel.of_tiles(plan.rank(0).tiles, **where)

    @staticmethod
    def of_tiles(tiles: Iterable[Tile], head_dim: int = HEAD_DIM, **where: Any) -> BareKernel:
        masks: dict[Mask, Mask] = {"full": "full", "causal": "causal", "anticausal": "causal"}
        shapes = (
            (tile.queries.segments, tile.queries.heads, tile.queries.rows, tile.keys.rows, masks[tile.mask])
            for tile in tiles
        )
        return BareKernel(shapes, head_dim, **where)

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        return [self.kernel.forward(q, k, v, mask, self.scores) for q, k, v, mask in self.tiles]

    def both(self) -> None:
        for (q, k, v, mask), (out, lse) in zip(self.tiles, self.forward(), strict=True):
            self.kernel.backward(out, q, k, v, out, lse, mask, self.scores, (True, True, True))


def attention_calls(
    n: int,
    causal: bool,
    pattern: rs.Pattern,
    optimize: Optimize = "auto",
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _CPU,
) -> dict[str, Call]:
    """`rs.attention` as a user calls it, by pass."""
    tensors = [x.requires_grad_() for x in qkv(n, dtype=dtype, device=device)]
    options = dict(pattern=pattern, causal=causal, optimize=optimize)
    gradient = torch.randn(1, n, HEADS, HEAD_DIM).to(device, dtype)
    return {"forward": without_gradients(tensors, options), "both": with_gradients(tensors, gradient, options)}


def share_calls(pattern: rs.Pattern, n: int, causal: bool, **where: Any) -> dict[str, dict[str, Callable[[], object]]]:
    """By pass, the calls to time in turns: ringspan with its default plan and the plain one, and the bare kernel.

    ``where`` may give the dtype and the device.
    """
    ours = attention_calls(n, causal, pattern, **where)
    plain = attention_calls(n, causal, pattern, "none", **where)
    bare = BareKernel.of(pattern, n, causal, **where)
    return {mode: {"ours": ours[mode], "plain": plain[mode], "bare": getattr(bare, mode)} for mode in PASSES}
