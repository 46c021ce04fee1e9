"""One (row, head) computed anew in fp64 from the rows of the source that it needs, and how far a result may be off.

What is allowed follows from the dtypes and the data, not from what was found (docs/streaming.md derives it). It is
meant for values that are random, of mean 0, as those of `CountedRows` are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ringspan.geometry import Documents, Pattern
from ringspan.kernels import accumulation_dtype
from ringspan.proof.keys import keys_seen
from ringspan.streaming import Place, Source

_ROWS_AT_A_TIME = 2**16
# A sum of n rounded numbers is off by more than this many sqrt(n) roundings with a probability of 2n exp(-32), about
# 1e-11 for a thousand (Higham and Mary, 2019).
_DEVIATIONS = 8.0
_EXP_ULPS = 20.0  # what torch's fused CPU kernel promises of its exponential
_EXP_16_BIT = 2.0**-11  # for 16-bit inputs it takes a faster one, whose results are rounded to fp16 at best


class Results(Protocol):
    """What was computed, where it can be asked for one place at a time."""

    def read(self, name: str, rows: range, heads: range) -> Tensor:
        """``"out"`` or ``"lse"``, as a source gives them."""


@dataclass(frozen=True)
class Exact:
    """The right output (batch, dim) and lse (batch,) in fp64, over how many keys, and how far off each may be."""

    out: Tensor
    lse: Tensor
    keys: int
    allowed_out: Tensor
    allowed_lse: float


def recompute(
    source: Source, place: Place, pattern: Pattern, documents: Documents, *, causal: bool, scale: float
) -> Exact:
    """Attention at one place, from the definition."""
    shape = source.shape
    kv_head = place.head // (shape.heads // shape.kv_heads)
    q = source.read("q", range(place.row, place.row + 1), range(place.head, place.head + 1))[:, 0, 0].double()
    out = torch.zeros(shape.batch, shape.dim, dtype=torch.float64)
    lse = torch.full((shape.batch,), -torch.inf, dtype=torch.float64)
    spread = torch.zeros_like(out)  # the sum of (weight x value) ** 2
    keys, largest_score = 0, 0.0
    seen = keys_seen(pattern, documents, place.row, kv_head=kv_head, kv_heads=shape.kv_heads, causal=causal)
    for rows in (some for branch in seen for some in _cut(branch)):
        k, v = (source.read(name, rows, range(kv_head, kv_head + 1))[:, :, 0].double() for name in ("k", "v"))
        scores = scale * torch.einsum("bd,bkd->bk", q, k)
        total = torch.logaddexp(lse, scores.logsumexp(-1))
        weights = (scores - total[:, None]).exp()
        before = (lse - total).exp()[:, None]
        out = out * before + torch.einsum("bk,bkd->bd", weights, v)
        spread = spread * before**2 + torch.einsum("bk,bkd->bd", weights**2, v**2)
        lse, keys = total, keys + len(rows)
        magnitudes = abs(scale) * torch.einsum("bd,bkd->bk", q.abs(), k.abs())
        largest_score = max(largest_score, float(magnitudes.max()))
    allowed_out, allowed_lse = _allowed(shape.dtype, shape.dim, keys, largest_score, out.abs(), spread.sqrt())
    return Exact(out, lse, keys, allowed_out, allowed_lse)


def _allowed(
    dtype: torch.dtype, dim: int, keys: int, largest_score: float, size: Tensor, spread: Tensor
) -> tuple[Tensor, float]:
    """How far off an output and an lse may be that were rounded as often as the engine rounds."""
    wide = torch.finfo(accumulation_dtype(dtype)).eps / 2
    narrow = torch.finfo(dtype).eps / 2  # weights, the results of tiles and outputs are rounded to the input dtype
    score = (_DEVIATIONS * math.sqrt(dim) + 4) * wide * largest_score
    weight = score + (_EXP_ULPS * wide if narrow == wide else _EXP_16_BIT)
    summing = _DEVIATIONS * math.sqrt(max(keys, 1)) * wide
    of_each_key = _DEVIATIONS * (weight + 2 * narrow + 2 * summing)
    allowed_lse = weight + summing + 4 * wide * (largest_score + math.log(max(keys, 1)))
    return of_each_key * spread + (weight + summing + narrow) * size, allowed_lse


def _cut(rows: range) -> list[range]:
    return [rows[i : i + _ROWS_AT_A_TIME] for i in range(0, len(rows), _ROWS_AT_A_TIME)]
