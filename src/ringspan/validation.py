"""What q, k, v and the options of a call must be, checked before anything is computed: errors name the value, the rule
and the way out. `ringspan.attention` and decoding share these doors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ringspan import kernels
from ringspan.geometry import Dilated, Full
from ringspan.kernels import Kernel


def check_tensors(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: must be a torch.Tensor")
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: must be (batch, seq, heads, dim)")
    _check_reverse_mode(q, k, v)


def check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype}, but q is {q.dtype}: all three need one dtype; cast with .to()")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but q is on {q.device}: move all three to one device")
    if not q.dtype.is_floating_point:
        raise ValueError(f"q is {q.dtype}: attention needs floating-point numbers; cast with .to()")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)}, v has {tuple(v.shape)}: they must be equal")
    for dim, what in ((0, "batch"), (1, "seq"), (3, "dim")):
        if q.shape[dim] != k.shape[dim]:
            raise ValueError(
                f"q has shape {tuple(q.shape)}, k has {tuple(k.shape)}: {what} must be equal "
                f"(shapes are (batch, seq, heads, dim))"
            )
    heads, kv_heads, dim = q.shape[2], k.shape[2], q.shape[3]
    if heads == 0 or kv_heads == 0 or dim == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}, k has {tuple(k.shape)}: heads and dim must be at least 1")
    if heads % kv_heads:
        raise ValueError(
            f"q has {heads} heads, k and v have {kv_heads}: the number of KV heads must divide that of query heads"
        )


def _check_reverse_mode(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse dual tensors: a custom operator has no forward-mode derivative, and torch would take it for 0."""
    if any(unpack_dual(x).tangent is not None for x in (q, k, v)):
        raise NotImplementedError(
            "forward-mode derivatives (torch.func.jvp, jacfwd, linearize, forward_ad): ringspan's attention has "
            "reverse-mode gradients only. Use .backward() or torch.autograd.grad, or "
            "ringspan.oracle.dense_attention for small problems that need forward mode"
        )


def check_pattern(pattern: Any, kv_heads: int) -> None:
    if not isinstance(pattern, (Full, Dilated)):
        raise TypeError(f"pattern={pattern!r}: must be Dilated(segment_lengths, dilation_rates) or Full()")
    pattern.check_heads(kv_heads)


def kernel_for(name: str | None, q: Tensor) -> Kernel:
    """The kernel of this name, or the best for the device and dtype of q; an error if it does not take them."""
    chosen = kernels.choose(q.device, q.dtype).kernel if name is None else kernels.get(name)
    refusal = chosen.contract.refusal(q.device.type, q.dtype, q.shape[-1])
    if refusal:
        raise ValueError(f"kernel {chosen.name!r}: {refusal}, or name another kernel, such as kernel='reference'")
    return chosen


def scale_for(scale: Any, q: Tensor) -> float:
    """The factor of the scores: as given, or dim ** -0.5."""
    if scale is None:
        return float(q.shape[-1] ** -0.5)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale={scale!r}: must be a number")
    wide = kernels.accumulation_dtype(q.dtype)
    if not abs(scale) <= torch.finfo(wide).max:  # NaN too
        raise ValueError(f"scale={scale}: must be finite in {wide}, the dtype of the scores")
    return float(scale)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as `torch.autocast` would have them, as in PyTorch's own attention."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Attention chooses its dtypes itself: under autocast its fp32 products would be cast down again."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
