"""The CPU flash kernel of PyTorch, called on strided views without a copy.

The aten operator is a private name of another library; tests/kernels checks that it still is what
we think. It kills the process on empty operands and answers wrongly, in silence, when the last
stride is not 1 or when K has fewer heads than Q: the contract rules all three out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.kernels.kernel import Contract, Kernel, Needs

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    FLASH.contract.check_call(q, k, v, causal)
    out, lse = _forward(q, k, v, 0.0, causal, scale=scale)
    return out, lse


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
    FLASH.contract.check_call(q, k, v, causal)
    dq, dk, dv = _backward(grad_out, q, k, v, out, lse, 0.0, causal, scale=scale)
    return dq, dk, dv


FLASH = Kernel(
    name="cpu_flash",
    contract=Contract(
        device="cpu",
        head_dim_multiple={torch.float64: 1, torch.float32: 1, torch.bfloat16: 1, torch.float16: 1},
    ),
    forward=forward,
    backward=backward,
)
