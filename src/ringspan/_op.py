"""Attention as custom operators, so that torch.compile and selective checkpointing treat it as one operation.

Only registration, fake tensors and autograd; `ringspan.execute` computes. Operators take tensors and plain values:
pattern, order and costs as text, packed lengths as an int64 tensor (so that new lengths do not recompile), kernel and
ring by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringspan import kernels
from ringspan.execute import Call
from ringspan.geometry import parse_pattern
from ringspan.order import parse_order
from ringspan.planning import parse_costs
from ringspan.ring.backend import find_ring
from ringspan.ring.simulated import ALONE
from ringspan.softmax import sinks_gradient
from ringspan.validation import warn_if_transposed, warn_if_unselected

Values = tuple[Any, ...]


def _call(
    pattern: str, order: str, causal: bool, scale: float, softcap: float, kernel: str, costs: str, ring: str
) -> Call:
    return Call(
        parse_pattern(pattern),
        parse_order(order) if order else None,
        causal,
        kernels.ScoreOptions(scale, softcap),
        kernels.get(kernel),
        parse_costs(costs) if costs else None,
        find_ring(ring) if ring else ALONE,
    )


@torch.library.custom_op("ringspan::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    lengths: Tensor | None,
    pattern: str,
    order: str,
    causal: bool,
    scale: float,
    softcap: float,
    kernel: str,
    costs: str,
    ring: str,
    seq_len: int | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse, and the length of the whole sequence on which the ranks agreed."""
    call = _call(pattern, order, causal, scale, softcap, kernel, costs, ring)
    out, lse, whole = call.forward(q, k, v, sinks, lengths, seq_len, needs)
    if seq_len is None:
        warn_if_transposed(whole, q.shape[2])
    warn_if_unselected(call.pattern, whole, k.shape[2])
    return out, lse, torch.tensor(whole, dtype=torch.int64)


@attention_op.register_fake
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, heads, _dim = q.shape
    lse = q.new_empty((batch, heads, rows), dtype=kernels.accumulation_dtype(q.dtype))
    return q.new_empty(q.shape), lse, torch.empty((), dtype=torch.int64)


@torch.library.custom_op("ringspan::attention_backward", mutates_args=())
def attention_backward_op(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seq_len: Tensor,
    lengths: Tensor | None,
    pattern: str,
    order: str,
    causal: bool,
    scale: float,
    softcap: float,
    kernel: str,
    costs: str,
    ring: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and sinks; an empty tensor for any that is not needed."""
    call = _call(pattern, order, causal, scale, softcap, kernel, costs, ring)
    need_q, need_k, need_v, need_sinks = needs
    dq, dk, dv = (
        q.new_empty(0) if grad is None else grad
        for grad in call.backward(
            grad_out, grad_lse, q, k, v, out, lse, lengths, int(seq_len), (need_q, need_k, need_v)
        )
    )
    if not need_sinks or sinks is None:
        return dq, dk, dv, q.new_empty(0)
    return dq, dk, dv, sinks_gradient(grad_out, grad_lse, out, lse, sinks)


@attention_backward_op.register_fake
def _attention_backward_fake(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs = others[-1]
    dq, dk, dv = (q.new_empty(x.shape if need else 0) for x, need in zip((q, k, v), needs, strict=False))
    return dq, dk, dv, q.new_empty(0) if sinks is None or not needs[3] else sinks.new_empty(sinks.shape)


def _save_for_backward(ctx: Any, inputs: Values, output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, sinks, lengths, *values, _seq_len, needs = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *(x for x in (sinks, lengths) if x is not None))
    ctx.has_sinks, ctx.values, ctx.needs = sinks is not None, values, needs
    ctx.kept = _call(*values)  # keeps the ring and the order alive until backward


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> Values:
    q, k, v, out, lse, seq_len, *others = ctx.saved_tensors
    needs = list(ctx.needs)
    if grad_out is None and grad_lse is None:
        grad_out = torch.zeros_like(out)  # other ranks may wait for this rank's part of backward
    sinks = others.pop(0) if ctx.has_sinks else None
    lengths = others[0] if others else None
    grads = attention_backward_op(grad_out, grad_lse, q, k, v, sinks, out, lse, seq_len, lengths, *ctx.values, needs)
    no_grads = (None,) * (3 + len(ctx.values))
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *no_grads


attention_op.register_autograd(_backward, setup_context=_save_for_backward)


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> Values:
    raise NotImplementedError(
        "ringspan.attention does not support double backward (create_graph=True, gradient penalties). For small "
        "problems, use ringspan.oracle.dense_attention, which does."
    )


attention_backward_op.register_autograd(_no_double_backward)
