"""The engine: runs a plan forward, and runs it backward. The only part that sees all others.

Both walks are the same: for each tile, take its views, cut them into calls that fit the workspace, and
let the kernel compute each. Forward merges partial results by the online softmax; backward adds up
shares of the gradients, which need nothing but the final out and lse (docs/derivation.md).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ringspan.kernels import Kernel, accumulation_dtype
from ringspan.kernels.kernel import Needs
from ringspan.planning import Plan, Tile
from ringspan.softmax import merge_
from ringspan.views import CallSize, Operands, blocks, comb_view, fold

# What the kernel calls of a tile may hold at a time: small enough to stay in cache, and the only memory
# beside inputs, outputs and their accumulators.
WORKSPACE_BYTES = 16 * 2**20


def run_forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Output (batch, seq, heads, dim) in the dtype of q, and lse (batch, heads, seq) in the accumulation dtype."""
    q, k, v = (_with_dense_rows(x) for x in (q, k, v))
    wide = accumulation_dtype(q.dtype)
    batch, rows, heads, dim = q.shape
    out = q.new_zeros(q.shape, dtype=wide)
    lse = q.new_full((batch, heads, rows), -torch.inf, dtype=wide)
    if q.numel() == 0:
        return out.to(q.dtype), lse
    query_side = {"q": q, "out": out, "lse": lse.transpose(1, 2)}
    row_bytes = dim * (q.element_size() + (0 if q.dtype == wide else wide.itemsize))
    for tile in plan.tiles:
        for x, causal in _calls(tile, query_side, {"k": k, "v": v}, kernel, row_bytes):
            part, part_lse = kernel.forward(x["q"], x["k"], x["v"], causal, scale)
            merge_(x["out"], x["lse"], part, part_lse)
    return out.to(q.dtype), lse


def run_backward(
    plan: Plan,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    kernel: Kernel,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k and v in the input dtype; None for those that nobody needs."""
    q, k, v, out = (_with_dense_rows(x) for x in (q, k, v, out))
    dq, dk, dv = (
        x.new_zeros(x.shape, dtype=accumulation_dtype(x.dtype)) if need else None
        for x, need in zip((q, k, v), needs, strict=True)
    )
    query_side = _present(
        q=q,
        out=out,
        lse=lse.transpose(1, 2),
        grad_out=None if grad_out is None else _with_dense_rows(grad_out),
        grad_lse=None if grad_lse is None else grad_lse.transpose(1, 2),
        dq=dq,
    )
    key_side = _present(k=k, v=v, dk=dk, dv=dv)
    row_bytes = q.shape[-1] * q.element_size() * (3 if grad_lse is None else 6)
    for tile in plan.tiles if q.numel() else ():
        for x, causal in _calls(tile, query_side, key_side, kernel, row_bytes):
            if grad_out is not None:
                rows = (x["grad_out"], x["q"], x["k"], x["v"], x["out"], x["lse"])
                _add_shares(x, kernel.backward(*rows, causal, scale, needs))
            if grad_lse is not None:
                _add_shares(x, _lse_shares(x, causal, scale, kernel, needs))
    return tuple(None if grad is None else grad.to(q.dtype) for grad in (dq, dk, dv))  # type: ignore[return-value]


def _calls(
    tile: Tile, query_side: Operands, key_side: Operands, kernel: Kernel, row_bytes: int
) -> Iterator[tuple[Operands, bool]]:
    """The kernel calls of a tile: operands (x, y, rows[, dim]) by name, and whether the call is causal."""
    group = query_side["q"].shape[2] // key_side["k"].shape[2]
    views = {name: comb_view(x, tile.queries, group) for name, x in query_side.items()}
    for name, x in key_side.items():
        views[name] = comb_view(x, tile.keys).expand(-1, -1, -1, group, -1, *x.shape[3:])
    size = CallSize.that_fits(
        WORKSPACE_BYTES,
        longest=max(tile.queries.rows, tile.keys.rows),
        independent=views["q"].shape[:4].numel(),
        row_bytes=row_bytes,
        pair_bytes=kernel.score_copies * accumulation_dtype(views["q"].dtype).itemsize,
    )
    for folded in fold(views, kernel.contract.zero_strides):
        for cut in size.cut(folded):
            for block in blocks(tile.queries.rows, tile.keys.rows, tile.causal, size.edge):
                yield block.of(cut, query_side), block.causal


def _lse_shares(
    x: Operands, causal: bool, scale: float, kernel: Kernel, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """A block's share of the gradient that comes in through lse.

    The derivative of lse by a score is its softmax weight. The flash backward computes weight x (dP - delta)
    with delta = sum(grad_out x out): with v = 0, out = -e1 and grad_out = grad_lse e1 that is weight x grad_lse.
    """
    first = torch.eye(1, x["q"].shape[-1], dtype=x["q"].dtype, device=x["q"].device).squeeze(0)
    grad_out = x["grad_lse"].to(first.dtype).unsqueeze(-1) * first
    out = (-first).expand(x["q"].shape)
    no_values = torch.zeros_like(x["v"], memory_format=torch.contiguous_format)
    dq, dk, _ = kernel.backward(
        grad_out, x["q"], x["k"], no_values, out, x["lse"], causal, scale, (needs[0], needs[1], False)
    )
    return dq, dk, None


def _add_shares(x: Operands, shares: tuple[Tensor | None, Tensor | None, Tensor | None]) -> None:
    for name, share in zip(("dq", "dk", "dv"), shares, strict=True):
        if share is not None and name in x:
            _add(x[name], share)


def _add(total: Tensor, share: Tensor) -> None:
    for dim in (0, 1):  # keys that several query heads share: their gradient is the sum
        if total.shape[dim] > 1 and total.stride(dim) == 0:
            total, share = total.narrow(dim, 0, 1), share.sum(dim, keepdim=True, dtype=total.dtype)
    total.add_(share)


def _present(**operands: Tensor | None) -> Operands:
    return {name: x for name, x in operands.items() if x is not None}


def _with_dense_rows(x: Tensor) -> Tensor:
    """Kernels read rows whose elements lie side by side; anything else is copied once."""
    return x if x.stride(-1) == 1 else x.contiguous()
