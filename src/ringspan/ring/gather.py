"""Gathering all rows on every rank, with the true adjoint as its backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringspan.layout import Layout
from ringspan.ring.rows import join_rows, take_rows


class GatherRows(torch.autograd.Function):
    """Forward: all-gather. Backward: sum over ranks of the gradients with respect to my rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, rank: int, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.layout, ctx.rank, ctx.dim, ctx.group = layout, rank, dim, group
        # Shards differ by a row or two: each is padded to the longest, since collectives want equal sizes.
        longest = max(layout.rows_of(r) for r in range(layout.ring_size))
        shape = list(x.shape)
        shape[dim] = longest
        mine = x.new_zeros(shape)
        mine.narrow(dim, 0, x.shape[dim]).copy_(x)
        every = [torch.empty_like(mine) for _ in range(layout.ring_size)]
        dist.all_gather(every, mine, group=group)
        return join_rows(every, layout, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return take_rows(total, ctx.layout, ctx.rank, ctx.dim), None, None, None, None
