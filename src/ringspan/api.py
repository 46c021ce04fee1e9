"""`attention`: checks every argument, then calls the operator."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from ringspan._op import attention_op
from ringspan.geometry import Pattern, as_int, check_pattern
from ringspan.order import Order, check_causality
from ringspan.planning import Optimize, costs_for
from ringspan.ring import Ring, SimulatedRing
from ringspan.validation import (
    Lengths,
    autocast,
    check_operands,
    check_sinks,
    check_tensors,
    kernel_for,
    packed_lengths,
    scale_for,
    softcap_for,
)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern,
    causal: bool = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    lengths: Lengths | None = ...,
    cu_seqlens: Lengths | None = ...,
    order: Order | None = ...,
    return_lse: Literal[False] = ...,
    kernel: str | None = ...,
    optimize: Optimize = ...,
    ring: Ring | SimulatedRing | None = ...,
    seq_len: int | None = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern,
    causal: bool = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    lengths: Lengths | None = ...,
    cu_seqlens: Lengths | None = ...,
    order: Order | None = ...,
    return_lse: Literal[True],
    kernel: str | None = ...,
    optimize: Optimize = ...,
    ring: Ring | SimulatedRing | None = ...,
    seq_len: int | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lengths: Lengths | None = None,
    cu_seqlens: Lengths | None = None,
    order: Order | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    optimize: Optimize = "auto",
    ring: Ring | SimulatedRing | None = None,
    seq_len: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention under a pattern.

    Args:
        q: (batch, seq, heads, head_dim).
        k, v: (batch, seq, kv_heads, head_dim), where kv_heads divides heads: query head j reads KV head
            j // (heads // kv_heads).
        pattern: `Full()`, `Window(...)`, `Dilated(...)`, or a sum such as ``Window(511) + Dilated((4096,), (4,))``.
        causal: whether a query sees only keys up to its own position.
        scale: factor of the scores before the softmax, any finite number; head_dim ** -0.5 by default.
        softcap: replaces each score s by softcap * tanh(s / softcap), as in Gemma 2. Uses the reference kernel.
        sinks: for each query head, (heads,), or for each row and head, (batch, seq, heads): a logit that joins the
            softmax but has no value, as in gpt-oss. Differentiable, and part of the lse. Over a `Ring`, (heads,) is the
            same on all ranks, and its gradient is that of this rank's rows: sum it over the ranks.
        lengths: packed documents: the rows hold documents of these lengths, one after another. Each is a sequence of
            its own: positions restart at 0, and no document sees another. Ints, or an int64 tensor; with a tensor,
            torch.compile does not recompile when the values change.
        cu_seqlens: the same documents as offsets (0, n1, n1 + n2, ..), as in flash-attn. Ints, or an int32 or int64
            tensor.
        order: the order in which the pattern sees the rows, such as `rs.Hilbert(shape)`. Results come back in the order
            of the inputs. Without causality this is undo(attention(apply(q), apply(k), apply(v))). With causality, only
            a folded order (`rs.Hilbert.folded`) is possible: the pattern follows the curve, and no query sees a later
            row. Each packed document is ordered separately.
        return_lse: also return the log-sum-exp of the scores, (batch, heads, seq), which is differentiable too.
        kernel: the name of a kernel (`ringspan.kernels.names()`); by default the best one for the device and dtype.
        optimize: whether pairs of rows that several branches see are computed once: ``"auto"``, where that is faster;
            ``"none"``, never; or the costs to decide by, `TileCosts`. Results are equal up to rounding.
        ring: splits the sequence over devices. With a `Ring`, q, k, v and the results are this rank's rows
            (`Ring.split_sequence`); ``lengths`` and ``cu_seqlens`` describe the whole sequence. With a `SimulatedRing`,
            all tensors are whole.
        seq_len: the length of the whole sequence. If given, skips the all-gather that checks that all ranks agree:
            after the first call over the ring, only parcels are sent.

    Returns:
        (batch, seq, heads, head_dim) in the dtype of q. A row that sees nothing is 0, and its lse is -inf.

    Under `torch.autocast`, q, k and v are cast to its dtype, as in PyTorch's own attention. Gradients are reverse-mode
    only: forward-mode derivatives (`torch.func.jvp`) raise NotImplementedError.

    >>> import torch, ringspan as rs
    >>> q, k, v = torch.randn(3, 1, 1000, 4, 16).unbind()
    >>> rs.attention(q, k, v, pattern=rs.Dilated((64, 256), (1, 4)), causal=True).shape
    torch.Size([1, 1000, 4, 16])
    """
    check_tensors(q, k, v)
    q, k, v = autocast(q, k, v)
    check_operands(q, k, v)
    check_pattern(pattern, k.shape[2])
    cap = softcap_for(softcap, q)
    name = kernel_for(kernel, q, cap).name
    check_sinks(sinks, q)
    check_options(causal, order, ring)
    seq_len = None if seq_len is None else as_int("seq_len", seq_len)
    if ring is None and seq_len is not None and seq_len != q.shape[1]:
        raise ValueError(f"seq_len={seq_len}, but q has {q.shape[1]} rows: must be equal without a ring")
    packed = packed_lengths(lengths, cu_seqlens, seq_len if isinstance(ring, Ring) else q.shape[1])
    factor = scale_for(scale, q)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (q, k, v, sinks)]
    ring_name = "" if ring is None else ring.name
    order_text = "" if order is None else order.text
    costs = costs_for(optimize, q.device.type)
    costs_text = "" if costs is None else costs.text
    out, lse, _ = attention_op(
        q,
        k,
        v,
        sinks,
        packed,
        pattern.text,
        order_text,
        causal,
        factor,
        cap,
        name,
        costs_text,
        ring_name,
        seq_len,
        needs,
    )
    return (out, lse) if return_lse else out


def check_options(causal: Any, order: Any, ring: Any) -> None:
    """Raise unless ``causal`` is a bool, ``order`` an order that it allows or None, and ``ring`` a ring or None."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal={causal!r}: must be True or False")
    if order is not None and not isinstance(order, Order):
        raise TypeError(f"order={order!r}: must be an order such as Hilbert(shape) or Hilbert.folded(segment_length)")
    if order is not None:
        check_causality(order, causal)
    if ring is not None and not isinstance(ring, (Ring, SimulatedRing)):
        raise TypeError(
            f"ring is a {type(ring).__name__}: must be a Ring or a SimulatedRing; make one with Ring(group)"
        )
