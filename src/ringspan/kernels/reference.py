"""The reference kernel in plain PyTorch, for any device and dtype, including fp64. It defines correctness."""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.kernels.kernel import Contract, Kernel, Needs, accumulation_dtype


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = (q * scale) @ k.mT
    if causal:
        rows, keys = scores.shape[-2:]
        future = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(future, -torch.inf)
    return scores


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(q.dtype)
    scores = _scores(q.to(wide), k.to(wide), causal, scale)
    lse = torch.logsumexp(scores, dim=-1)
    out = scores.sub_(lse.unsqueeze(-1)).exp_() @ v.to(wide)
    return out.to(q.dtype), lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dtype, wide = q.dtype, accumulation_dtype(q.dtype)
    grad_out, q, k, v, out = (x.to(wide) for x in (grad_out, q, k, v, out))
    weights = _scores(q, k, causal, scale).sub_(lse.unsqueeze(-1)).exp_()
    dq = dk = dv = None
    if needs[2]:
        dv = (weights.mT @ grad_out).to(dtype)
    if needs[0] or needs[1]:
        delta = (grad_out * out).sum(-1, keepdim=True)
        dscores = (grad_out @ v.mT).sub_(delta).mul_(weights).mul_(scale)
        dq = (dscores @ k).to(dtype) if needs[0] else None
        dk = (dscores.mT @ q).to(dtype) if needs[1] else None
    return dq, dk, dv


KERNEL = Kernel(
    name="reference",
    contract=Contract(
        device="any",
        head_dim_multiple={torch.float64: 1, torch.float32: 1, torch.bfloat16: 1, torch.float16: 1},
    ),
    compute_forward=forward,
    compute_backward=backward,
    score_copies=4,
)
