"""How far results may be from the definition in fp64, in the doctor's self-test and where kernels are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringspan.kernels import accumulation_dtype

_FP64_ALLOWED = 1e-12
_TIMES_DENSE, _STEPS, _LSE_STEPS = 2, 4, 10


@dataclass(frozen=True, kw_only=True)
class ClosestResult:
    """The error and the allowed error of the result that is closest to its limit. ``failure``: why there is none."""

    result: str = ""
    error: float = 0.0
    allowed: float = 0.0
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and self.error <= self.allowed


def closest_to_limit(
    found: Mapping[str, Tensor], dense: Mapping[str, Tensor], right: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[str, float, float]:
    """(name, error, allowed error) of the result with the largest ratio of error to allowed error; all are fp64.

    In fp64 the error may be at most 1e-12. In other dtypes it may be the largest of

    - twice the error of dense softmax in that dtype on the same inputs,
    - four rounding steps of the largest value of the result,
    - ten rounding steps, in the accumulation dtype, of the largest lse times that value, because weights that are
      recomputed from the lse carry its rounding.

    An error of the lse multiplies all weights of a row, so it may be at most one rounding step, or ten times the
    rounding of the lse itself in the accumulation dtype. A result that is zero everywhere is what rounding leaves of
    larger values: the largest value of all results counts.
    """
    if dtype == torch.float64:
        allowed = dict.fromkeys(right, _FP64_ALLOWED)
    else:
        step, lse_step = (torch.finfo(each).eps for each in (dtype, accumulation_dtype(dtype)))
        lse = max(1.0, _largest(right["lse"]))
        largest = max(map(_largest, right.values()))
        sizes = {name: _largest(wanted) or largest for name, wanted in right.items()}
        allowed = {
            name: max(
                _TIMES_DENSE * _largest(dense[name] - wanted), _STEPS * step * size, _LSE_STEPS * lse_step * lse * size
            )
            for (name, wanted), size in zip(right.items(), sizes.values(), strict=True)
        }
        allowed["lse"] = max(step, _LSE_STEPS * lse_step * lse)
    lines = []
    for name, wanted in right.items():
        if not found[name].isfinite().all():
            raise ArithmeticError(f"{name} is not finite")
        lines.append((name, _largest(found[name] - wanted), allowed[name]))
    return max(lines, key=lambda line: line[1] / line[2])


def _largest(x: Tensor) -> float:
    return x.abs().max().item()


def results_of(
    attend: Callable[..., tuple[Tensor, Tensor]],
    qkv: Sequence[Tensor],
    weights: Tensor,
    dtype: torch.dtype,
    *,
    sinks: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Output, lse and gradients of attention, computed in this dtype and converted to fp64 on the CPU."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (*qkv, *([] if sinks is None else [sinks]))]
    out, lse = attend(*leaves[:3], **options, **({} if sinks is None else {"sinks": leaves[3]}))
    gradients = torch.autograd.grad((out * weights.to(dtype)).sum(), leaves)
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    return {name: x.detach().cpu().double() for name, x in zip(names, (out, lse, *gradients), strict=False)}
