"""PyTorch's CPU flash kernel, called on strided views of queries and on dense copies of keys and values.

The kernel reads the keys and values of a tile once for every few dozen queries. If their rows are far apart, each read
misses caches and address translation: on some processors that takes twice the time of a dense tile, and the copy a
twentieth of it.

The aten operator is private to PyTorch; tests/kernels checks that it still behaves as expected. It kills the process on
empty operands, and returns wrong results without an error if the last stride is not 1 or if K has fewer heads than Q.
The contract excludes all three. It also hides NaN in tiles with fewer keys than a vector register has lanes; `_poison_`
restores it.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ringspan.kernels.kernel import Contract, Gradients, Kernel, Needs, ScoreOptions, accumulation_dtype
from ringspan.softmax import merge_

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_MOST_LANES = 64  # of fp32 in the widest vector registers (2,048 bits)
# The kernel computes a triangle in blocks of 512 keys, those that it masks included. In strips of half as many keys, a
# triangle of 1,024 rows takes 0.9 of the time, and one of 512 rows 0.8.
_STRIP, _MOST_STRIPS = 256, 4
_FEWEST_QUERIES = 128  # with fewer, keys and values are read too few times for a copy to pay


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: ScoreOptions) -> tuple[Tensor, Tensor]:
    dense_k, dense_v = (_dense(x, q.shape[2]) for x in (k, v))
    out = lse = q.new_empty(0)
    for start, stop in _strips(k, causal):
        strip = (q[:, :, start:], dense_k[:, :, start:stop], dense_v[:, :, start:stop])
        part, part_lse = _forward(*strip, 0.0, causal, scale=scores.scale)
        if start == 0:
            out, lse = part, part_lse
        else:
            merge_(out[:, :, start:], lse[:, :, start:], part, part_lse)
    if k.shape[2] < _MOST_LANES and not lse.all():
        _poison_(out, lse, q, k, causal)
    return out, lse


def _strips(k: Tensor, causal: bool) -> list[tuple[int, int]]:
    """The ranges of keys by which a tile is computed: all of them, or strips of a triangle.

    Queries after the last key of a strip see all of it. With more strips, merging takes longer than what they save; in
    16 bits, it would round.

    >>> _strips(torch.ones(1, 1, 600, 8), causal=True)
    [(0, 200), (200, 400), (400, 600)]
    """
    rows = k.shape[2]
    cut = causal and rows <= _MOST_STRIPS * _STRIP and k.dtype == accumulation_dtype(k.dtype)
    parts = -(-rows // _STRIP) if cut else 1
    return list(pairwise(rows * i // parts for i in range(parts + 1)))


def _dense(x: Tensor, queries: int) -> Tensor:
    """Keys or values with the rows of each tile next to each other; heads that share them share the copy."""
    if queries < _FEWEST_QUERIES or x.stride(2) == x.shape[3]:
        return x
    once = x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride()[:2])]
    return once.contiguous().expand(x.shape)


def _poison_(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, causal: bool) -> None:
    """Add NaN to the rows of a narrow tile whose query, or a key that they see, is not finite.

    If all scores of a row are NaN, the operator treats the row as one that sees no key: out = 0, lse = 0.
    """
    bad_keys = (k * 0).sum(-1, dtype=lse.dtype)
    bad_keys = bad_keys.cumsum(-1) if causal else bad_keys.sum(-1, keepdim=True)
    bad = (q * 0).sum(-1, dtype=lse.dtype) + bad_keys
    lse.add_(bad)
    out.add_(bad.unsqueeze(-1))


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scores: ScoreOptions,
    needs: Needs,
) -> Gradients:
    k, v = (_dense(x, q.shape[2]) for x in (k, v))
    strips = _strips(k, causal)
    if len(strips) == 1:
        dq, dk, dv = _backward(grad_out, q, k, v, out, lse, 0.0, causal, scale=scores.scale)
        return dq, dk, dv
    dq = torch.zeros(q.shape, dtype=q.dtype)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (k, v))
    for start, stop in strips:
        below = [x[:, :, start:] for x in (grad_out, q)]
        final = [x[:, :, start:] for x in (out, lse)]
        share = _backward(*below, k[:, :, start:stop], v[:, :, start:stop], *final, 0.0, causal, scale=scores.scale)
        dq[:, :, start:] += share[0]
        dk[:, :, start:stop], dv[:, :, start:stop] = share[1:]
    return dq, dk, dv


FLASH = Kernel(
    name="cpu_flash",
    contract=Contract(
        device="cpu",
        head_dim_multiple={torch.float64: 1, torch.float32: 1, torch.bfloat16: 1, torch.float16: 1},
    ),
    compute_forward=forward,
    compute_backward=backward,
    row_copies=4,  # dense keys and values, and what a strip returns
)
