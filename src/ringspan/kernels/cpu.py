"""PyTorch's CPU flash kernel, called on strided views without a copy.

The aten operator is private to PyTorch; tests/kernels checks that it still behaves as expected. It kills the process on
empty operands, and returns wrong results without an error if the last stride is not 1 or if K has fewer heads than Q.
The contract excludes all three. It also hides NaN in tiles with fewer keys than a vector register has lanes; `_poison_`
restores it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.kernels.kernel import Contract, Gradients, Kernel, Needs, ScoreOptions

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_MOST_LANES = 64  # of fp32 in the widest vector registers (2,048 bits)


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: ScoreOptions) -> tuple[Tensor, Tensor]:
    out, lse = _forward(q, k, v, 0.0, causal, scale=scores.scale)
    if k.shape[2] < _MOST_LANES and not lse.all():
        _poison_(out, lse, q, k, causal)
    return out, lse


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
    dq, dk, dv = _backward(grad_out, q, k, v, out, lse, 0.0, causal, scale=scores.scale)
    return dq, dk, dv


FLASH = Kernel(
    name="cpu_flash",
    contract=Contract(
        device="cpu",
        head_dim_multiple={torch.float64: 1, torch.float32: 1, torch.bfloat16: 1, torch.float16: 1},
    ),
    compute_forward=forward,
    compute_backward=backward,
)
