"""Sharding tensors by rows: a rank's rows, the concatenation of all ranks' rows, and the differentiable all-gather."""

from __future__ import annotations

from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringspan.layout import Layout


@overload
def take_rows(x: Tensor, layout: Layout, rank: int, dim: int) -> Tensor: ...
@overload
def take_rows(x: None, layout: Layout, rank: int, dim: int) -> None: ...
@overload
def take_rows(x: Tensor | None, layout: Layout, rank: int, dim: int) -> Tensor | None: ...
def take_rows(x: Tensor | None, layout: Layout, rank: int, dim: int) -> Tensor | None:
    """The rank's rows of a whole tensor, in the order in which the rank stores them."""
    if x is None or layout.ring_size == 1:
        return x
    spans = [x.narrow(dim, span.start, span.stop - span.start) for span in layout.spans(rank)]
    if not spans:
        return x.narrow(dim, 0, 0)
    return torch.cat(spans, dim) if len(spans) > 1 else spans[0]


def join_rows(parts: list[Tensor], layout: Layout, dim: int) -> Tensor:
    """The whole tensor, from every rank's rows."""
    if layout.ring_size == 1:
        return parts[0]
    stretches = [
        (span.start, part.narrow(dim, span.local, span.stop - span.start))
        for rank, part in enumerate(parts)
        for span in layout.spans(rank)
    ]
    stretches.sort(key=lambda stretch: stretch[0])
    return torch.cat([x for _, x in stretches], dim) if stretches else parts[0]


class GatherRows(torch.autograd.Function):
    """Forward: all-gather. Backward: the sum over ranks of the gradients with respect to this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, rank: int, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.layout, ctx.rank, ctx.dim, ctx.group = layout, rank, dim, group
        # Shards differ by a row or two. Collectives need equal sizes, so each is padded to the longest.
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
