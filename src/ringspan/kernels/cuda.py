"""PyTorch's CUDA kernels (flash, memory-efficient, cuDNN) behind one interface.

They accept different inputs and return lse in different shapes; the contracts and wrappers below hide that. The aten
operators are private to PyTorch; tests/kernels/test_cuda.py runs each with fake tensors and checks its schema.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.kernels.kernel import Contract, Gradients, Kernel, Needs, ScoreOptions

_aten = torch.ops.aten
_LSE_ROWS = 32  # the efficient kernel pads the rows of its lse to a multiple of this, with +inf


def _no_dropout_state(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A placeholder for the random state, which is not read because dropout is 0."""
    return torch.zeros((), dtype=dtype, device=x.device)


def _dense(lse: Tensor) -> Tensor:
    return lse if lse.is_contiguous() else lse.clone(memory_format=torch.contiguous_format)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: ScoreOptions) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, scale=scores.scale)
    return out, lse


def flash_backward(
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
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward.default(
        grad_out,
        q,
        k,
        v,
        out,
        _dense(lse),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        seed,
        _no_dropout_state(q, torch.uint64),
        scale=scores.scale,
    )
    return dq, dk, dv


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: ScoreOptions) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention.default(
        q, k, v, None, True, 0.0, causal, scale=scores.scale
    )
    return out, lse.narrow(2, 0, q.shape[2])


def efficient_backward(
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
    padding = -lse.shape[-1] % _LSE_ROWS
    padded = _dense(torch.nn.functional.pad(lse, (0, padding), value=torch.inf))
    state = _no_dropout_state(q, torch.int64)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward.default(
        grad_out, q, k, v, None, out, padded, state, state, 0.0, [*needs, False], causal, scale=scores.scale
    )
    return dq, dk, dv


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: ScoreOptions) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, True, 0.0, causal, scale=scores.scale
    )
    return out, lse.reshape(q.shape[:3])


def cudnn_backward(
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
    state = _no_dropout_state(q, torch.int64)
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward.default(
        grad_out,
        q,
        k,
        v,
        out,
        _dense(lse).unsqueeze(-1),
        state,
        state,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scores.scale,
    )
    return dq, dk, dv


_HALF = {torch.bfloat16: 8, torch.float16: 8}

FLASH = Kernel(
    name="cuda_flash",
    contract=Contract(
        device="cuda", head_dim_multiple=_HALF, max_head_dim=256, min_capability=(8, 0), aligned_bytes=16
    ),
    compute_forward=flash_forward,
    compute_backward=flash_backward,
)

EFFICIENT = Kernel(
    name="cuda_efficient",
    contract=Contract(
        device="cuda",
        head_dim_multiple={torch.float32: 4, **_HALF},
        min_capability=(5, 0),
        aligned_bytes=16,
    ),
    compute_forward=efficient_forward,
    compute_backward=efficient_backward,
)

CUDNN = Kernel(
    name="cuda_cudnn",
    contract=Contract(
        device="cuda",
        head_dim_multiple=_HALF,
        max_head_dim=128,
        min_capability=(8, 0),
        aligned_bytes=16,
        zero_strides=False,
    ),
    compute_forward=cudnn_forward,
    compute_backward=cudnn_backward,
)
