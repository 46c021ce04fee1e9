"""Checks and conversions of the arguments of a call: tensors, patterns, kernels, scale and packed documents.

Attention, decoding, planning and streaming share them. Each error states the value, the rule and the way out. Nothing
is computed here.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ringspan import kernels
from ringspan.geometry import Pattern, unselected_warning
from ringspan.geometry.documents import OFFSETS_EXAMPLE, lengths_of_documents, lengths_of_offsets
from ringspan.kernels import Kernel

Lengths: TypeAlias = "Iterable[int] | Tensor"
# Warnings point at the first line of the call stack that is in neither of these folders.
_LIBRARY_FOLDERS = tuple(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__))


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Raise unless q, k and v are 4-D tensors without forward-mode tangents."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: must be a torch.Tensor")
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: must be (batch, seq, heads, head_dim)")
    _check_reverse_mode(q, k, v)


def check_operands(q: Tensor, k: Tensor, v: Tensor, *, some_rows: bool = False) -> None:
    """Raise unless dtypes, devices and shapes of q, k and v agree. Call it after `autocast`.

    With ``some_rows``, q holds only some rows of the sequence.
    """
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype}, but q is {q.dtype}: all three need one dtype; cast with .to()")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but q is on {q.device}: move all three to one device")
    if not q.dtype.is_floating_point:
        raise ValueError(f"q is {q.dtype}: attention needs floating-point numbers; cast with .to()")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)}, v has {tuple(v.shape)}: they must be equal")
    for dim, what in ((0, "batch"), (1, "seq"), (3, "head_dim")):
        if q.shape[dim] != k.shape[dim] and not (some_rows and what == "seq"):
            raise ValueError(
                f"q has shape {tuple(q.shape)}, k has {tuple(k.shape)}: {what} must be equal "
                f"(shapes are (batch, seq, heads, head_dim))"
            )
    heads, kv_heads, head_dim = q.shape[2], k.shape[2], q.shape[3]
    if heads == 0 or kv_heads == 0 or head_dim == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}, k has {tuple(k.shape)}: heads and head_dim must be at least 1")
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, k and v have {kv_heads}: the KV heads must divide the query heads")


def _check_reverse_mode(*tensors: Tensor) -> None:
    """Refuse dual tensors: torch would treat the missing forward-mode derivative of a custom operator as 0."""
    if any(unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "forward-mode derivatives (torch.func.jvp, jacfwd, linearize, forward_ad): ringspan's attention has "
            "reverse-mode gradients only. Use .backward() or torch.autograd.grad, or "
            "ringspan.oracle.dense_attention for small problems that need forward mode"
        )


def check_sinks(sinks: Any, q: Tensor) -> None:
    """Raise unless ``sinks`` is None, or floating-point (heads,) or (batch, seq, heads) on the device of q."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks is a {type(sinks).__name__}: must be a torch.Tensor")
    _check_reverse_mode(sinks)
    batch, rows, heads, _ = q.shape
    if sinks.shape not in ((heads,), (batch, rows, heads)):
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)}, q has {tuple(q.shape)}: must be (heads,) or (batch, seq, heads), "
            "one logit per query head"
        )
    if not sinks.dtype.is_floating_point:
        raise ValueError(f"sinks is {sinks.dtype}: must be floating-point; cast with .to()")
    if sinks.device != q.device:
        raise ValueError(f"sinks is on {sinks.device}, but q is on {q.device}: move both to one device")


def kernel_for(name: str | None, q: Tensor, softcap: float = 0.0) -> Kernel:
    """The kernel with this name, or the best one for the device and dtype of q. Raises if it does not support them."""
    chosen = kernels.choose(q.device, q.dtype, softcap=softcap).kernel if name is None else kernels.get(name)
    refusal = chosen.contract.refusal(q.device.type, q.dtype, q.shape[-1], softcap)
    if refusal:
        raise ValueError(f"kernel {chosen.name!r}: {refusal}, or name another kernel, such as kernel='reference'")
    return chosen


def scale_for(scale: Any, q: Tensor) -> float:
    """The softmax scale: as given, or head_dim ** -0.5."""
    return float(q.shape[-1] ** -0.5) if scale is None else _finite("scale", scale, q)


def softcap_for(softcap: Any, q: Tensor) -> float:
    """The soft cap of the scores; 0 for None."""
    if softcap is None:
        return 0.0
    cap, wide = _finite("softcap", softcap, q), kernels.accumulation_dtype(q.dtype)
    if cap < torch.finfo(wide).tiny:
        raise ValueError(f"softcap={softcap}: must be positive in {wide}, or None for scores without a cap")
    return cap


def _finite(name: str, value: Any, q: Tensor) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r}: must be a number")
    wide = kernels.accumulation_dtype(q.dtype)
    if not abs(value) <= torch.finfo(wide).max:  # NaN too
        raise ValueError(f"{name}={value}: must be finite in {wide}, the dtype of the scores")
    return float(value)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, cast to the dtype of `torch.autocast` if it is enabled, as PyTorch's own attention does."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Disables autocast, which would cast the fp32 products inside attention down again."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def packed_lengths(lengths: Any, cu_seqlens: Any, seq_len: int | None) -> Tensor | None:
    """Lengths of packed documents as an int64 tensor, from ``lengths`` or from offsets. None if both are None.

    Args:
        lengths: one length per document: ints, or a 1-D int64 tensor.
        cu_seqlens: offsets (0, n1, n1 + n2, ..), one more than there are documents: ints, or a 1-D tensor of int32 or
            int64.
        seq_len: length of the whole sequence, where it is known; the last offset must equal it.

    torch.compile traces the conversion of tensors as one operator, so other values do not recompile.

    >>> packed_lengths(None, (0, 3, 3, 5), 5).tolist()
    [3, 0, 2]
    """
    if isinstance(cu_seqlens, Tensor) and lengths is None:
        if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
            raise ValueError(
                f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}: must be int32 or int64 with one "
                f"dimension: {OFFSETS_EXAMPLE}"
            )
        return lengths_of_offsets_op(cu_seqlens, seq_len)
    if isinstance(lengths, Tensor) and cu_seqlens is None:
        if lengths.dtype != torch.int64 or lengths.dim() != 1:
            raise ValueError(
                f"lengths is {lengths.dtype} of shape {tuple(lengths.shape)}: must be int64, one number per document"
            )
        return lengths
    found = lengths_of_documents(lengths, cu_seqlens, seq_len)
    return None if found is None else torch.tensor(found, dtype=torch.int64)


def document_lengths(lengths: Any, cu_seqlens: Any, seq_len: int | None) -> tuple[int, ...] | None:
    """The same as plain ints, for code that is not compiled."""
    packed = packed_lengths(lengths, cu_seqlens, seq_len)
    return None if packed is None else tuple(packed.tolist())


@torch.library.custom_op("ringspan::lengths_of_offsets", mutates_args=())
def lengths_of_offsets_op(cu_seqlens: Tensor, seq_len: int | None) -> Tensor:
    """Differences of the offsets, int64, on the CPU. Raises if they are not offsets of a sequence of this length."""
    return torch.tensor(lengths_of_offsets(cu_seqlens.tolist(), seq_len), dtype=torch.int64)


@lengths_of_offsets_op.register_fake
def _lengths_of_offsets_fake(cu_seqlens: Tensor, seq_len: int | None) -> Tensor:
    return torch.empty(cu_seqlens.shape[0] - 1, dtype=torch.int64)


def warn_if_transposed(seq_len: int, heads: int) -> None:
    """Warn when many heads meet few rows: the tensors are probably (batch, heads, seq, head_dim)."""
    if heads >= 64 and 4 * seq_len <= heads:
        _warn_once(
            f"q has {heads} heads and a sequence of {seq_len} rows. ringspan takes (batch, seq, heads, head_dim). If "
            "yours is (batch, heads, seq, head_dim), as in torch's scaled_dot_product_attention, pass "
            "q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), and transpose the result back. If not, pass "
            "seq_len= to silence this warning."
        )


def warn_if_unselected(pattern: Pattern, seq_len: int, kv_heads: int) -> None:
    """Warn when no branch of the pattern selects some (row, head)."""
    message = _unselected_warning(pattern, seq_len, kv_heads)
    if message:
        _warn_once(message)


_unselected_warning = lru_cache(maxsize=256)(unselected_warning)


@lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    """Warn at the caller's line: the first one that is neither in ringspan nor in torch."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY_FOLDERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
