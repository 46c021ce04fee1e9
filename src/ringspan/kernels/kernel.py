"""The interface of a kernel: one tile forward, one tile backward, and the contract that its operands must meet.

Operands are (x, y, rows, dim), where x and y index independent tiles (segments, heads). lse is the natural log-sum-exp,
(x, y, rows), in the accumulation dtype, whatever the underlying operator returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ringspan.geometry import Mask

Needs = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Forward = Callable[[Tensor, Tensor, Tensor, bool, "ScoreOptions"], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, "ScoreOptions", Needs],
    Gradients,
]


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """How scores are made from q and k: s = scale * q . k and, if ``softcap`` is not 0, softcap * tanh(s / softcap)."""

    scale: float
    softcap: float = 0.0


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32. Partial results, lse and gradients are accumulated in it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Contract:
    """What a kernel requires of its operands. Checked before every call, because the operators may not check.

    ``head_dim_multiple`` is given per dtype; other dtypes are refused. Every address and every stride except the last
    must be a multiple of ``aligned_bytes``. ``softcap`` tells whether the kernel can cap scores.
    """

    device: str
    head_dim_multiple: dict[torch.dtype, int]
    max_head_dim: int | None = None
    min_capability: tuple[int, int] | None = None
    aligned_bytes: int = 1
    zero_strides: bool = True
    softcap: bool = False

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(self.head_dim_multiple)

    def refusal(self, device: str, dtype: torch.dtype, head_dim: int, softcap: float = 0.0) -> str | None:
        """Why these operands are refused, or None."""
        if self.device not in ("any", device):
            return f"device={device}: this kernel runs on {self.device}"
        if dtype not in self.head_dim_multiple:
            return f"dtype={dtype}: this kernel takes {', '.join(map(str, self.dtypes))}"
        multiple = self.head_dim_multiple[dtype]
        if head_dim % multiple:
            return f"head_dim={head_dim}: must be a multiple of {multiple} for {dtype}; pad the heads with zeros"
        if self.max_head_dim is not None and head_dim > self.max_head_dim:
            return f"head_dim={head_dim}: at most {self.max_head_dim}"
        if softcap and not self.softcap:
            return f"softcap={softcap}: this kernel cannot cap scores"
        return None

    def check_call(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, softcap: float) -> None:
        """Raise on anything that the operator may accept without an error and compute wrongly."""
        refusal = self.refusal(q.device.type, q.dtype, q.shape[-1], softcap)
        if refusal:
            raise ValueError(refusal)
        if 0 in q.shape or 0 in k.shape:
            raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}: a tile must not be empty")
        if q.shape[:2] != k.shape[:2] or q.shape[-1] != k.shape[-1] or k.shape != v.shape:
            raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: tiles must match")
        if mask != "full" and q.shape[2] != k.shape[2]:
            raise ValueError(f"a {mask} tile is square, but has {q.shape[2]} queries and {k.shape[2]} keys")
        for x in (q, k, v):
            self._check_strides(x)

    def _check_strides(self, x: Tensor) -> None:
        if x.stride(-1) != 1:
            raise ValueError(f"strides {x.stride()}: the last must be 1")
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            if size > 1 and stride == 0 and not self.zero_strides:
                raise ValueError(f"strides {x.stride()}: this kernel accepts no expanded operands")
        if any(n * x.element_size() % self.aligned_bytes for n in (x.storage_offset(), *x.stride()[:-1])):
            raise ValueError(
                f"strides {x.stride()} at offset {x.storage_offset()}: each must be a multiple of "
                f"{self.aligned_bytes} bytes; pass contiguous tensors with an even number of heads or a larger head_dim"
            )


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to compute a tile.

    ``score_copies`` is the number of (query rows x key rows) matrices that the kernel holds at a time: 0 for fused
    kernels; ``row_copies`` that of (rows x dim) matrices besides operands and results. The engine cuts its calls to fit
    the workspace. The two functions compute full and causal tiles; an anticausal tile is a causal one with rows and
    keys in reverse order.
    """

    name: str
    contract: Contract
    compute_forward: Forward = field(repr=False)
    compute_backward: Backward = field(repr=False)
    score_copies: int = 0
    row_copies: int = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: ScoreOptions) -> tuple[Tensor, Tensor]:
        """The tile's output and lse."""
        self.contract.check_call(q, k, v, mask, scores.softcap)
        factor, scores = _with_positive_scale(scores, q.dtype)
        if mask == "anticausal":
            q, k, v = _reversed(q, k, v)
        out, lse = self.compute_forward(q if factor == 1 else q * factor, k, v, mask != "full", scores)
        return (out.flip(2), lse.flip(2)) if mask == "anticausal" else (out, lse)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Mask,
        scores: ScoreOptions,
        needs: Needs,
    ) -> Gradients:
        """The tile's share of the gradients of q, k and v, given the final out and lse."""
        self.contract.check_call(q, k, v, mask, scores.softcap)
        factor, scores = _with_positive_scale(scores, q.dtype)
        if mask == "anticausal":
            grad_out, q, k, v, out, lse = _reversed(grad_out, q, k, v, out, lse)
        scaled_q = q if factor == 1 else q * factor
        grads = self.compute_backward(grad_out, scaled_q, k, v, out, lse, mask != "full", scores, needs)
        dq, dk, dv = (None if x is None else x.flip(2) for x in grads) if mask == "anticausal" else grads
        return dq if dq is None or factor == 1 else dq * factor, dk, dv


def _reversed(*operands: Tensor) -> tuple[Tensor, ...]:
    """Copies with the rows in reverse order."""
    return tuple(x.flip(2) for x in operands)


def _with_positive_scale(scores: ScoreOptions, dtype: torch.dtype) -> tuple[float, ScoreOptions]:
    """A factor for q, and the remaining options for the kernel, whose scale is positive in the accumulation dtype.

    Fused kernels multiply masked scores (-inf) or the maximum of a row by the scale, so a scale of 0 or less gives NaN.
    """
    scale, smallest = scores.scale, torch.finfo(accumulation_dtype(dtype)).tiny
    if scale >= smallest:
        return 1.0, scores
    factor, scale = (-1.0, -scale) if -scale >= smallest else (scale, 1.0)
    return factor, replace(scores, scale=scale)
