"""What a call should return: rows of the output, dq, dk and dv in fp64, straight from the definition.

Every rank can make the inputs of every other, so nothing is exchanged. Of a short sequence all rows are computed. Of a
long one some are drawn, and the gradient of the output is zero in all others: then dq of a drawn row, and dk and dv of
every row, cost one pass over the keys for each drawn row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ringspan.layout import Layout
from ringspan.oracle import dense_attention
from ringspan.tools.verify.settings import Case

NAMES = ("q", "k", "v", "grad_out")
_MOST_PAIRS = 2 * 2**20  # (batch, head, row, key) that are computed anew
_LEAST_ROWS = 32
_LIMIT_64_BIT = 1e-12
_TIMES_DENSE = 10  # a shorter dtype may err this many times as much as dense attention in it, or as its rounding


class Oracle(Protocol):
    """`expect`, or one that remembers what it has computed."""

    def __call__(self, case: Case, causal: bool, place: Place, *, backward: bool) -> Expected: ...


@dataclass(frozen=True)
class Place:
    """A rank and how the sequence lies on its ring."""

    layout: Layout
    rank: int

    def positions(self, rank: int) -> Tensor:
        spans = [torch.arange(span.start, span.stop) for span in self.layout.spans(rank)]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Expected:
    """Right results of one rank for one case: the output in its drawn rows, and if asked for, the gradients of all."""

    case: Case
    causal: bool
    drawn: int  # rows of all ranks
    local: Tensor  # which rows of this rank were drawn
    results: tuple[Tensor, ...]  # out or out, dq, dk, dv
    allowed: tuple[float, ...]

    def errors(self, found: list[Tensor]) -> list[float]:
        """The largest error of each result; infinite where one is not a number."""
        taken = [found[0][:, self.local.to(found[0].device)], *found[1:]]
        return [_largest(have.detach().cpu().double() - want) for have, want in zip(taken, self.results, strict=True)]


def own_rows(case: Case, place: Place) -> list[Tensor]:
    """This rank's rows of q, k, v and the gradient of the output, made here and nowhere else."""
    made = []
    for name in NAMES:
        heads = case.kv_heads if name in ("k", "v") else case.heads
        rows = torch.empty(case.batch, place.layout.rows_of(place.rank), heads, case.dim, dtype=_dtype(case))
        for head in range(heads):
            rows[:, :, head] = _made(case, place.layout, name, head, place.rank)
        made.append(rows)
    positions = place.positions(place.rank)
    made[-1][:, ~torch.isin(positions, drawn_rows(case, place.layout))] = 0.0
    return made


def drawn_rows(case: Case, layout: Layout) -> Tensor:
    """The rows that are computed anew: all, or those at the borders of shards and others between, evenly by chance."""
    n = case.tokens
    most = max(_LEAST_ROWS, _MOST_PAIRS // (case.batch * case.heads * n))
    if most >= n:
        return torch.arange(n)
    starts = [span.start for rank in range(layout.ring_size) for span in layout.spans(rank)]
    borders = sorted({0, n - 1, *starts, *(start - 1 for start in starts if start)})[:most]
    edges = torch.linspace(0, n, most - len(borders) + 1)
    chance = torch.rand(len(edges) - 1, generator=torch.Generator().manual_seed(n))
    between = (edges[:-1] + chance * edges.diff()).long().clamp(max=n - 1)
    return torch.cat([torch.tensor(borders), between]).unique()


def expect(case: Case, causal: bool, place: Place, *, backward: bool) -> Expected:
    """The right results, and how far off each may be.

    That is 1e-12 in fp64. In a shorter dtype it is ten times what dense attention loses, but at least some rounding
    steps that a right algorithm makes: partial outputs, before they are merged, may be as large as the largest value,
    and a backward pass that computes weights again from the lse has the lse's rounding in all of them.
    """
    layout, drawn = place.layout, drawn_rows(case, place.layout)
    positions = place.positions(place.rank)
    mine = torch.isin(drawn, positions)
    local = torch.searchsorted(positions, drawn[mine])
    groups = case.heads // case.kv_heads
    exact, rounded = list[list[Tensor]](), list[list[Tensor]]()
    largest_value, largest_lse = 0.0, 1.0
    for c in range(case.kv_heads):
        k, v = (_whole(case, layout, name, [c]) for name in ("k", "v"))
        q, grad = (
            _whole(case, layout, name, range(c * groups, (c + 1) * groups))[:, drawn] for name in ("q", "grad_out")
        )
        largest_value = max(largest_value, _largest(v))
        for results, dtype in ((exact, torch.float64), (rounded, _dtype(case))):
            if results is rounded and dtype == torch.float64:
                continue
            leaves = [x.to(dtype).requires_grad_(backward) for x in (q, k, v)]
            pattern = case.pattern.for_heads(c, case.kv_heads)
            out, lse = dense_attention(*leaves, pattern=pattern, causal=causal, rows=drawn)
            found = [out.detach()[:, mine]]
            largest_lse = max(largest_lse, _largest(lse.detach().nan_to_num(neginf=0.0)))  # a row may see nothing
            if backward:
                dq, dk, dv = torch.autograd.grad(out, leaves, grad.to(dtype))
                own_dq = dq.new_zeros(case.batch, len(positions), groups, case.dim)
                own_dq[:, local] = dq[:, mine]
                found += [own_dq, dk[:, positions], dv[:, positions]]
            results.append(found)
    right = [torch.cat(heads, dim=2) for heads in zip(*exact, strict=True)]
    if not rounded:
        return Expected(case, causal, len(drawn), local, tuple(right), (_LIMIT_64_BIT,) * len(right))
    dense = [torch.cat(heads, dim=2) for heads in zip(*rounded, strict=True)]
    sizes = [largest_value, *(largest_lse * _largest(gradient) for gradient in right[1:])]
    eps = torch.finfo(_dtype(case)).eps
    allowed = [
        _TIMES_DENSE * max(_largest(low.double() - want), eps * size)
        for low, want, size in zip(dense, right, sizes, strict=True)
    ]
    return Expected(case, causal, len(drawn), local, tuple(right), tuple(allowed))


def _whole(case: Case, layout: Layout, name: str, heads: range | list[int]) -> Tensor:
    """All rows of some heads, in the order of the sequence, in fp64."""
    whole = torch.empty(case.batch, case.tokens, len(heads), case.dim, dtype=torch.float64)
    for rank in range(layout.ring_size):
        positions = Place(layout, rank).positions(rank)
        for i, head in enumerate(heads):
            whole[:, positions, i] = _made(case, layout, name, head, rank).double()
    return whole


def _made(case: Case, layout: Layout, name: str, head: int, rank: int) -> Tensor:
    """One head of one rank's rows: (batch, rows, dim). The same wherever it is made."""
    seed = (NAMES.index(name) * 1024 + head) * 65536 + rank
    generator = torch.Generator().manual_seed(seed)
    shape = (case.batch, layout.rows_of(rank), case.dim)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(_dtype(case))


def _dtype(case: Case) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, case.dtype)
    return dtype


def _largest(difference: Tensor) -> float:
    largest = difference.abs().max().item() if difference.numel() else 0.0
    return math.inf if math.isnan(largest) else largest
