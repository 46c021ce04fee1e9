"""The interface of a ring, real or simulated, to a call of attention: agreement on a layout, and sharding by rows.

Holds the registry of rings for operators, and the sharding that both rings use: a rank's rows, the concatenation of all
ranks' rows, and the differentiable all-gather.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, overload
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringspan.layout import Layout
from ringspan.planning import Routing
from ringspan.ring.transport import RingError, Transport

Metadata = Callable[[], dict[str, Any]]
Lengths = Iterable[int] | Tensor  # of packed documents


class Backend(Protocol):
    """The ranks of a call in this process: one of a real ring, or all of a simulated ring."""

    routing: Routing

    def agree(
        self,
        rows: int,
        metadata: Metadata,
        seq_len: int | None,
        like: Tensor,
        lengths: Lengths | None = None,
    ) -> Layout:
        """The layout of the whole sequence, of which this process holds ``rows`` rows, and of its packed documents.

        Without ``seq_len``, the ranks all-gather the metadata of the call, and all of them raise if they disagree.
        """

    def shard(
        self, layout: Layout, tensors: Sequence[tuple[Tensor | None, int | None]]
    ) -> list[tuple[int, Transport, list[Any]]]:
        """For each rank in this process: (rank, transport, its rows of the tensors).

        Each tensor comes with its row dimension; None if it has no rows and is the same on all ranks.
        """

    def unshard(self, layout: Layout, parts: list[Tensor], dim: int) -> Tensor:
        """The inverse of `shard`, for one tensor."""


# Operators take no objects, so `ringspan::attention` takes the name of a ring. An entry lives as long as its ring.
_rings: WeakValueDictionary[str, Backend] = WeakValueDictionary()
_numbers = itertools.count()


def register_ring(ring: Backend) -> str:
    """Register a ring; returns its name."""
    name = f"{type(ring).__name__} {next(_numbers)}"
    _rings[name] = ring
    return name


def as_lengths(lengths: Lengths | None) -> tuple[int, ...]:
    """Lengths of packed documents as ints; none for a single document."""
    if lengths is None:
        return ()
    return tuple(lengths.tolist() if isinstance(lengths, Tensor) else lengths)


def find_ring(name: str) -> Backend:
    """The ring with this name; raises if it was garbage-collected."""
    ring = _rings.get(name)
    if ring is None:
        raise RingError(f"ring {name!r} no longer exists: keep a reference to it as long as compiled code uses it")
    return ring


@overload
def take_rows(x: Tensor, layout: Layout, rank: int, dim: int) -> Tensor: ...
@overload
def take_rows(x: None, layout: Layout, rank: int, dim: int) -> None: ...
@overload
def take_rows(x: Tensor | None, layout: Layout, rank: int, dim: int | None) -> Tensor | None: ...
def take_rows(x: Tensor | None, layout: Layout, rank: int, dim: int | None) -> Tensor | None:
    """The rank's rows of a whole tensor, in the order in which the rank stores them."""
    if x is None or dim is None or layout.ring_size == 1:
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
        # Shards differ by a few rows. Collectives need equal sizes, so each is padded to the longest.
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
