"""What a call must return: rows of the output, dq, dk and dv in fp64, computed from the definition.

Every rank can generate the inputs of all ranks, so nothing is communicated. For a short sequence all rows are
computed. For a long one some rows are sampled, and the gradient of the output is zero in all others. Then dq of the
sampled rows, and dk and dv of every row, cost one pass over the keys for each sampled row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ringspan.layout import Layout
from ringspan.oracle import dense_attention
from ringspan.tools.verify.workload import VerifyCase

INPUTS = ("q", "k", "v", "grad_out")
_MAX_PAIRS = 2 * 2**20  # (batch, head, row, key) tuples to compute
_MIN_ROWS = 32
_ALLOWED_FP64 = 1e-12
_TIMES_DENSE = 10  # other dtypes: this many times the error of dense attention, or its rounding


class Oracle(Protocol):
    """`expect`, or a cached version of it."""

    def __call__(self, case: VerifyCase, causal: bool, layout: Layout, rank: int, *, backward: bool) -> Expected: ...


@dataclass(frozen=True)
class Expected:
    """The correct results of one rank for one case: the output in its sampled rows and, if requested, all gradients."""

    case: VerifyCase
    causal: bool
    sampled: int  # rows, over all ranks
    local: Tensor  # the sampled rows of this rank, as local indices
    results: tuple[Tensor, ...]  # out, or out, dq, dk, dv
    allowed: tuple[float, ...]

    def errors(self, found: list[Tensor]) -> list[float]:
        """The largest error of each result; infinite if it contains NaN."""
        taken = [found[0][:, self.local.to(found[0].device)], *found[1:]]
        return [_largest(have.detach().cpu().double() - want) for have, want in zip(taken, self.results, strict=True)]


def own_rows(case: VerifyCase, layout: Layout, rank: int) -> list[Tensor]:
    """The rank's rows of q, k, v and the gradient of the output; the rank generates no other rows."""
    rows = [
        torch.empty(case.batch, layout.rows_of(rank), _heads(case, name), case.head_dim, dtype=_dtype(case))
        for name in INPUTS
    ]
    for name, x in zip(INPUTS, rows, strict=True):
        for head in range(x.shape[2]):
            x[:, :, head] = _generate(case, layout, name, head, rank)
    rows[-1][:, ~torch.isin(positions(layout, rank), sampled_rows(case, layout))] = 0.0
    return rows


def positions(layout: Layout, rank: int) -> Tensor:
    """The positions in the sequence of the rank's rows, in local order."""
    spans = [torch.arange(span.start, span.stop) for span in layout.spans(rank)]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def sampled_rows(case: VerifyCase, layout: Layout) -> Tensor:
    """The rows to compare: all, or the first and last row of each shard and a stratified sample of the others."""
    n = case.tokens
    count = max(_MIN_ROWS, _MAX_PAIRS // (case.batch * case.heads * n))
    if count >= n:
        return torch.arange(n)
    starts = [span.start for rank in range(layout.ring_size) for span in layout.spans(rank)]
    borders = sorted({0, n - 1, *starts, *(start - 1 for start in starts if start)})[:count]
    edges = torch.linspace(0, n, count - len(borders) + 1)
    random = torch.rand(len(edges) - 1, generator=torch.Generator().manual_seed(n))
    between = (edges[:-1] + random * edges.diff()).long().clamp(max=n - 1)
    return torch.cat([torch.tensor(borders), between]).unique()


def expect(case: VerifyCase, causal: bool, layout: Layout, rank: int, *, backward: bool) -> Expected:
    """The correct results, and the allowed error of each.

    In fp64 that is 1e-12. In other dtypes it is ten times the error of dense attention in that dtype, but at least ten
    rounding steps of a correct algorithm: partial outputs can be as large as the largest value before they are merged,
    and a backward pass that recomputes the weights from the lse carries the rounding of the lse in all of them.
    """
    sampled, own = sampled_rows(case, layout), positions(layout, rank)
    mine = torch.isin(sampled, own)
    local = torch.searchsorted(own, sampled[mine])
    groups = case.heads // case.kv_heads
    exact, rounded = list[list[Tensor]](), list[list[Tensor]]()
    largest_value, largest_lse = 0.0, 1.0
    for c in range(case.kv_heads):
        k, v = (_whole(case, layout, name, [c]) for name in ("k", "v"))
        q, grad = (
            _whole(case, layout, name, range(c * groups, (c + 1) * groups))[:, sampled] for name in ("q", "grad_out")
        )
        largest_value = max(largest_value, _largest(v))
        for results, dtype in ((exact, torch.float64), (rounded, _dtype(case))):
            if results is rounded and dtype == torch.float64:
                continue
            leaves = [x.to(dtype).requires_grad_(backward) for x in (q, k, v)]
            pattern = case.pattern.for_heads(c, case.kv_heads)
            out, lse = dense_attention(*leaves, pattern=pattern, causal=causal, rows=sampled)
            found = [out.detach()[:, mine]]
            largest_lse = max(largest_lse, _largest(lse.detach().nan_to_num(neginf=0.0)))  # -inf: the row sees no key
            if backward:
                dq, dk, dv = torch.autograd.grad(out, leaves, grad.to(dtype))
                own_dq = dq.new_zeros(case.batch, len(own), groups, case.head_dim)
                own_dq[:, local] = dq[:, mine]
                found += [own_dq, dk[:, own], dv[:, own]]
            results.append(found)
    right = [torch.cat(heads, dim=2) for heads in zip(*exact, strict=True)]
    if not rounded:
        return Expected(case, causal, len(sampled), local, tuple(right), (_ALLOWED_FP64,) * len(right))
    dense = [torch.cat(heads, dim=2) for heads in zip(*rounded, strict=True)]
    sizes = [largest_value, *(largest_lse * _largest(gradient) for gradient in right[1:])]
    eps = torch.finfo(_dtype(case)).eps
    allowed = [
        _TIMES_DENSE * max(_largest(low.double() - want), eps * size)
        for low, want, size in zip(dense, right, sizes, strict=True)
    ]
    return Expected(case, causal, len(sampled), local, tuple(right), tuple(allowed))


def _whole(case: VerifyCase, layout: Layout, name: str, heads: range | list[int]) -> Tensor:
    """All rows of some heads, in sequence order, in fp64."""
    whole = torch.empty(case.batch, case.tokens, len(heads), case.head_dim, dtype=torch.float64)
    for rank in range(layout.ring_size):
        rows = positions(layout, rank)
        for i, head in enumerate(heads):
            whole[:, rows, i] = _generate(case, layout, name, head, rank).double()
    return whole


def _generate(case: VerifyCase, layout: Layout, name: str, head: int, rank: int) -> Tensor:
    """One head of one rank's rows, (batch, rows, head_dim). Every rank generates the same numbers."""
    seed = (INPUTS.index(name) * 1024 + head) * 65536 + rank
    generator = torch.Generator().manual_seed(seed)
    shape = (case.batch, layout.rows_of(rank), case.head_dim)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(_dtype(case))


def _heads(case: VerifyCase, name: str) -> int:
    return case.kv_heads if name in ("k", "v") else case.heads


def _dtype(case: VerifyCase) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, case.dtype)
    return dtype


def _largest(difference: Tensor) -> float:
    largest = difference.abs().max().item() if difference.numel() else 0.0
    return math.inf if math.isnan(largest) else largest
