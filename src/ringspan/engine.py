"""The engine computes the tiles of a rank's plan, forward and backward.

Both passes take the strided views of a tile, cut them into kernel calls that fit the workspace, and run the kernel.
Forward merges partial results with the online softmax. Backward adds up each tile's share of the gradients, which needs
only the final out and lse (docs/derivation.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ringspan.geometry import Mask
from ringspan.kernels import Kernel, ScoreOptions, accumulation_dtype
from ringspan.kernels.kernel import Gradients, Needs
from ringspan.planning import Parcel, RankPlan, Tile
from ringspan.ring.transport import Counters, Transport
from ringspan.schedule import ParcelGradients, RankRun, parcel_rows, run_schedule
from ringspan.softmax import merge_, put_
from ringspan.views import Block, CallSize, Operands, blocks, comb_view, fold

# Bytes that the results of a kernel call may take: small enough to stay in cache. This is the only memory besides
# inputs, outputs, their accumulators and parcels.
WORKSPACE_BYTES = 16 * 2**20
# Copies of a row in reverse order, of the operands and results of an anticausal tile.
_REVERSED_FORWARD, _REVERSED_BACKWARD = 4, 8


class ForwardRun(RankRun):
    """One rank's forward pass: ``out`` (batch, rows, heads, dim) and ``lse`` (batch, heads, rows), both in the
    accumulation dtype.
    """

    name = "forward"

    def __init__(
        self,
        plan: RankPlan,
        transport: Transport,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scores: ScoreOptions,
        kernel: Kernel,
    ) -> None:
        q, k, v = (with_dense_rows(x) for x in (q, k, v))
        wide = accumulation_dtype(q.dtype)
        batch, rows, heads, _ = q.shape
        self.out = q.new_empty(q.shape, dtype=wide)
        self.lse = q.new_empty((batch, heads, rows), dtype=wide)
        if not plan.fresh_everywhere:
            self.out.zero_()
            self.lse.fill_(-torch.inf)
        super().__init__(plan, transport, k, v, held=(q, k, v, self.out, self.lse))
        self._query_side = {"q": q, "out": self.out, "lse": self.lse.transpose(1, 2)}
        self._scores, self._kernel = scores, kernel

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        return self.out, self.lse

    def compute(self, number: int) -> None:
        for tile in self.timed(self.plan.hop(number).tiles, number):
            keys, values = self.rows_of(tile.parcel)
            forward_tile_(
                tile,
                self._query_side,
                {"k": keys, "v": values},
                scores=self._scores,
                kernel=self._kernel,
                counters=self.transport.counters,
            )


def forward_tile_(
    tile: Tile, query_side: Operands, key_side: Operands, *, scores: ScoreOptions, kernel: Kernel, counters: Counters
) -> None:
    """Compute one tile and merge it into ``out`` and ``lse`` of the query side, in place."""
    q, wide = query_side["q"], query_side["out"].dtype
    # Twice the result: call sizes vary, and the allocator's fragmentation is about one result.
    row_bytes = 2 * q.shape[-1] * (q.element_size() + (0 if q.dtype == wide else wide.itemsize))
    for x, block in _calls(tile, query_side, key_side, kernel, row_bytes, _REVERSED_FORWARD):
        part, part_lse = kernel.forward(x["q"], x["k"], x["v"], block.mask, scores)
        if tile.multiplicity > 1:  # as if its keys came so many times
            part_lse += math.log(tile.multiplicity)
        with counters.holding(part, part_lse):
            combine_ = put_ if tile.fresh and block.first else merge_
            combine_(x["out"], x["lse"], part, part_lse)
        del part, part_lse  # before the next call allocates its results


class BackwardRun(RankRun):
    """One rank's backward pass: ``results`` are the gradients of q, k and v in the accumulation dtype, or None.

    dK and dV of a received parcel are forwarded along its route, or returned to its owner, while the next hop is
    computed.
    """

    name = "backward"

    def __init__(
        self,
        plan: RankPlan,
        transport: Transport,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        scores: ScoreOptions,
        kernel: Kernel,
        needs: Needs,
    ) -> None:
        q, k, v, out = (with_dense_rows(x) for x in (q, k, v, out))
        wide = accumulation_dtype(q.dtype)
        dq, dk, dv = (
            x.new_zeros(x.shape, dtype=wide) if need else None for x, need in zip((q, k, v), needs, strict=True)
        )
        self.results: Gradients = dq, dk, dv
        super().__init__(plan, transport, k, v, held=(q, k, v, out, lse, grad_out, grad_lse, dq, dk, dv))
        self._query_side = _present(
            q=q,
            out=out,
            lse=lse.transpose(1, 2),
            grad_out=None if grad_out is None else with_dense_rows(grad_out, kernel.contract.zero_strides),
            grad_lse=None if grad_lse is None else grad_lse.transpose(1, 2),
            dq=dq,
        )
        self._own_grads = _present(dk=dk, dv=dv)
        self._row_bytes = q.shape[-1] * q.element_size() * (3 if grad_lse is None else 6)
        self._scores, self._kernel, self._needs = scores, kernel, needs
        self._parcel_grads = ParcelGradients(plan, transport, k, self._own_grads)
        self._shares: dict[Parcel, Tensor] = {}  # gradients of this hop's parcels

    def compute(self, number: int) -> None:
        self._shares = self._parcel_grads.zeros(self.plan.hop(number))
        for tile in self.timed(self.plan.hop(number).tiles, number):
            key_side = dict(zip(("k", "v"), self.rows_of(tile.parcel), strict=True))
            if tile.parcel is None:
                key_side |= self._own_grads
            elif self._own_grads:
                key_side |= zip(("dk", "dv"), parcel_rows(self._shares[tile.parcel], self.k.shape[2]), strict=True)
            sides = (self._query_side, key_side)
            for x, block in _calls(tile, *sides, self._kernel, self._row_bytes, _REVERSED_BACKWARD):
                if tile.multiplicity > 1:
                    x["lse"] = x["lse"] - math.log(tile.multiplicity)
                self._add_gradients(x, block.mask)

    def _add_gradients(self, x: Operands, mask: Mask) -> None:
        if "grad_out" in x:
            operands = (x["grad_out"], x["q"], x["k"], x["v"], x["out"], x["lse"])
            shares = self._kernel.backward(*operands, mask, self._scores, self._needs)
            with self.transport.counters.holding(*shares):
                _add_shares(x, shares)
            del shares  # before the next call allocates its results
        if "grad_lse" in x:
            _add_shares(x, _lse_shares(x, mask, self._scores, self._kernel, self._needs))

    def wait_for_gradients(self) -> None:
        self._parcel_grads.wait()

    def return_gradients(self, number: int) -> None:
        self._parcel_grads.send(number, self.plan.hop(number), self._shares)

    def release(self) -> None:
        self._parcel_grads.release()
        super().release()


def run_forward(
    plan: RankPlan, transport: Transport, q: Tensor, k: Tensor, v: Tensor, *, scores: ScoreOptions, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Run the forward pass of a single rank."""
    run = ForwardRun(plan, transport, q, k, v, scores=scores, kernel=kernel)
    run_schedule([run])
    return run.results


def run_backward(
    plan: RankPlan, transport: Transport, *tensors: Tensor | None, scores: ScoreOptions, kernel: Kernel, needs: Needs
) -> Gradients:
    """Run the backward pass of a single rank."""
    run = BackwardRun(plan, transport, *tensors, scores=scores, kernel=kernel, needs=needs)  # type: ignore[arg-type]
    run_schedule([run])
    return run.results


def _calls(
    tile: Tile, query_side: Operands, key_side: Operands, kernel: Kernel, row_bytes: int, reversed_copies: int
) -> Iterator[tuple[Operands, Block]]:
    """The kernel calls of a tile: operands (x, y, rows[, dim]) by name, and the block of the tile they cover."""
    group = query_side["q"].shape[2] // key_side["k"].shape[2]
    views = {name: comb_view(x, tile.queries, group) for name, x in query_side.items()}
    for name, x in key_side.items():
        views[name] = comb_view(x, tile.keys).expand(-1, -1, -1, group, -1, *x.shape[3:])
    copies = kernel.row_copies + (reversed_copies if tile.mask == "anticausal" else 0)
    row_bytes += copies * query_side["q"].shape[-1] * query_side["q"].element_size()
    size = CallSize.that_fits(
        WORKSPACE_BYTES,
        longest=max(tile.queries.rows, tile.keys.rows),
        independent=views["q"].shape[:4].numel(),
        row_bytes=row_bytes,
        pair_bytes=kernel.score_copies * accumulation_dtype(views["q"].dtype).itemsize,
    )
    for folded in fold(views, kernel.contract.zero_strides):
        for cut in size.cut(folded):
            for block in blocks(tile.queries.rows, tile.keys.rows, tile.mask, size.edge):
                yield block.of(cut, query_side), block


def _lse_shares(x: Operands, mask: Mask, scores: ScoreOptions, kernel: Kernel, needs: Needs) -> Gradients:
    """A block's share of the gradients of q and k that come from the gradient of lse.

    The derivative of lse with respect to a score is its softmax weight. The flash backward computes weight x (dP -
    delta) with delta = sum(grad_out x out): with v = 0, out = -e1 and grad_out = grad_lse e1 that is weight x grad_lse.
    """
    first = torch.eye(1, x["q"].shape[-1], dtype=x["q"].dtype, device=x["q"].device).squeeze(0)
    grad_out = x["grad_lse"].to(first.dtype).unsqueeze(-1) * first
    out = (-first).expand(x["q"].shape).clone(memory_format=torch.contiguous_format)
    no_values = torch.zeros_like(x["v"], memory_format=torch.contiguous_format)
    dq, dk, _ = kernel.backward(
        grad_out, x["q"], x["k"], no_values, out, x["lse"], mask, scores, (needs[0], needs[1], False)
    )
    return dq, dk, None


def _add_shares(x: Operands, shares: Gradients) -> None:
    for name, share in zip(("dq", "dk", "dv"), shares, strict=True):
        if share is not None and name in x:
            _add(x[name], share)


def _add(total: Tensor, share: Tensor) -> None:
    for dim in (0, 1):  # keys shared by several query heads: their gradient is the sum
        if total.shape[dim] > 1 and total.stride(dim) == 0:
            total, share = total.narrow(dim, 0, 1), share.sum(dim, keepdim=True, dtype=total.dtype)
    total.add_(share)


def _present(**operands: Tensor | None) -> Operands:
    return {name: x for name, x in operands.items() if x is not None}


def with_dense_rows(x: Tensor, zero_strides: bool = True) -> Tensor:
    """The tensor, or a copy if its last dimension is not dense, or if it is expanded and the kernel refuses that."""
    expanded = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    if x.stride(-1) == 1 and (zero_strides or not expanded):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() keeps the strides of dimensions of size 1
