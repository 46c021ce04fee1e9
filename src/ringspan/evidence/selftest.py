"""A self-test that takes a moment: attention forward and backward on a device, against the dense definition in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringspan.api import attention
from ringspan.geometry import Dilated, Pattern
from ringspan.kernels import choose
from ringspan.oracle import dense_attention

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ROWS, _HEADS, _DIM = 64, 4, 16
_PATTERN = Dilated((16, 64), (1, 4))
_FP64_ALLOWED = 1e-12


@dataclass(frozen=True, slots=True)
class SelfTest:
    """One device and dtype: an error beside what is allowed, for the result that comes nearest to its limit.

    The results are output, lse, dq, dk and dv. If the test could not be run, ``failure`` says why.
    """

    device: str
    dtype: str
    kernel: str
    result: str = ""
    error: float = 0.0
    allowed: float = 0.0
    failure: str = ""

    @property
    def holds(self) -> bool:
        return not self.failure and self.error <= self.allowed


def run_self_test(device: str, dtype: torch.dtype) -> SelfTest:
    """Run attention here in this dtype.

    fp64 must be within 1e-12 of the definition. Any other dtype may be twice as wrong as dense softmax in that dtype is
    on the same numbers, or by four roundings of the largest result if that is more.
    """
    kernel, name = "", str(dtype).removeprefix("torch.")
    try:
        kernel = choose(device, dtype).kernel.name
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(4, 1, _ROWS, _HEADS, _DIM, generator=generator, dtype=torch.float64).to(dtype)
        *inputs, weights = numbers.to(device).unbind()
        right = _results(dense_attention, inputs, weights, torch.float64)
        dense = _results(dense_attention, inputs, weights, dtype)
        ours = _results(_with_lse, inputs, weights, dtype)
        worst, error, allowed = _nearest_to_its_limit(ours, dense, right, dtype)
    except Exception as raised:  # whatever a driver or a broken installation may raise
        return SelfTest(device, name, kernel, failure=f"{type(raised).__name__}: {raised}")
    return SelfTest(device, name, kernel, worst, error, allowed)


def _with_lse(*tensors: Tensor, pattern: Pattern, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = tensors
    return attention(q, k, v, pattern=pattern, causal=causal, return_lse=True)


def _results(
    attend: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], weights: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Everything that attention gives, computed in this dtype and then widened."""
    tensors = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out, lse = attend(*tensors, pattern=_PATTERN, causal=True)
    gradients = torch.autograd.grad((out * weights.to(dtype)).sum(), tensors)
    return {
        name: x.detach().double()
        for name, x in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True)
    }


def _nearest_to_its_limit(
    ours: dict[str, Tensor], dense: dict[str, Tensor], right: dict[str, Tensor], dtype: torch.dtype
) -> tuple[str, float, float]:
    """(name, error, allowed error) of the result whose error is the largest part of what is allowed."""
    found = []
    for name, wanted in right.items():
        if not ours[name].isfinite().all():
            raise ArithmeticError(f"{name} is not finite")
        error, dense_error = ((x[name] - wanted).abs().max().item() for x in (ours, dense))
        rounding = torch.finfo(dtype).eps * wanted.abs().max().item()
        allowed = _FP64_ALLOWED if dtype == torch.float64 else max(2 * dense_error, 4 * rounding)
        found.append((name, error, allowed))
    return max(found, key=lambda line: line[1] / line[2])
