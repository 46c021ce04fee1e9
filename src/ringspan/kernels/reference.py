"""The reference kernel in plain PyTorch, for any device and dtype, including fp64. It defines correctness."""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.kernels.kernel import Contract, Gradients, Kernel, Needs, ScoreOptions, accumulation_dtype


def _scores(q: Tensor, k: Tensor, causal: bool, options: ScoreOptions) -> tuple[Tensor, Tensor | None]:
    """The scores, -inf where they are masked, and tanh(s / softcap) if they are capped."""
    scores, tanh = (q * options.scale) @ k.mT, None
    if options.softcap:
        tanh = scores.div_(options.softcap).tanh_()
        scores = tanh * options.softcap
    if causal:
        rows, keys = scores.shape[-2:]
        future = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(future, -torch.inf)
    return scores, tanh


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(q.dtype)
    scores, _ = _scores(q.to(wide), k.to(wide), causal, options)
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
    options: ScoreOptions,
    needs: Needs,
) -> Gradients:
    dtype, wide = q.dtype, accumulation_dtype(q.dtype)
    grad_out, q, k, v, out = (x.to(wide) for x in (grad_out, q, k, v, out))
    scores, tanh = _scores(q, k, causal, options)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    dq = dk = dv = None
    if needs[2]:
        dv = (weights.mT @ grad_out).to(dtype)
    if needs[0] or needs[1]:
        delta = (grad_out * out).sum(-1, keepdim=True)
        dscores = (grad_out @ v.mT).sub_(delta).mul_(weights).mul_(options.scale)
        if tanh is not None:
            dscores.mul_(tanh.square_().neg_().add_(1))  # the derivative of the cap
        dq = (dscores @ k).to(dtype) if needs[0] else None
        dk = (dscores.mT @ q).to(dtype) if needs[1] else None
    return dq, dk, dv


KERNEL = Kernel(
    name="reference",
    contract=Contract(
        device="any",
        head_dim_multiple={torch.float64: 1, torch.float32: 1, torch.bfloat16: 1, torch.float16: 1},
        softcap=True,
    ),
    compute_forward=forward,
    compute_backward=backward,
    score_copies=5,
)
