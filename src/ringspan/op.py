"""The engine as one registered operator, so that torch.compile takes it whole and checkpointing can keep it.

Operators take tensors and plain values only: the pattern travels as its text, packed lengths as an int64
tensor (so that new lengths do not recompile), a kernel as its name.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringspan import kernels
from ringspan.engine import run_backward, run_forward
from ringspan.geometry import Documents, Pattern, parse_pattern, unselected_row
from ringspan.planning import Plan, plan_rows

Values = tuple[Any, ...]


def _plan(k: Tensor, lengths: Tensor | None, pattern: str, causal: bool) -> Plan:
    rows, kv_heads = k.shape[1:3]
    documents = Documents((rows,) if lengths is None else tuple(lengths.tolist()))
    documents.check_rows(rows)
    _warn_if_unselected(parse_pattern(pattern), rows, kv_heads)
    return plan_rows(parse_pattern(pattern), documents, kv_heads, causal)


@lru_cache(maxsize=256)
def _warn_if_unselected(pattern: Pattern, rows: int, kv_heads: int) -> None:
    found = unselected_row(pattern, rows, kv_heads)
    if found:
        warnings.warn(
            f"{pattern} selects row {found[0]} of KV head {found[1]} in no branch: such rows see nothing and "
            "their output is 0. Add a branch with dilation rate 1 if that is not meant.",
            stacklevel=2,
        )


@torch.library.custom_op("ringspan::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    pattern: str,
    causal: bool,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    plan = _plan(k, lengths, pattern, causal)
    return run_forward(plan, q, k, v, scale, kernels.get(kernel))


@attention_op.register_fake
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _dim = q.shape
    lse = q.new_empty((batch, heads, rows), dtype=kernels.accumulation_dtype(q.dtype))
    return q.new_empty(q.shape), lse


@torch.library.custom_op("ringspan::attention_backward", mutates_args=())
def attention_backward_op(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    needs: Sequence[bool],
    lengths: Tensor | None,
    pattern: str,
    causal: bool,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; an empty tensor for each that nobody needs."""
    plan = _plan(k, lengths, pattern, causal)
    need_q, need_k, need_v = needs
    grads = run_backward(
        plan, grad_out, grad_lse, q, k, v, out, lse, scale, kernels.get(kernel), (need_q, need_k, need_v)
    )
    dq, dk, dv = (q.new_empty(0) if grad is None else grad for grad in grads)
    return dq, dk, dv


@attention_backward_op.register_fake
def _attention_backward_fake(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    needs: Sequence[bool],
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (q.new_empty(x.shape if need else 0) for x, need in zip((q, k, v), needs, strict=True))
    return dq, dk, dv


def _keep_for_backward(ctx: Any, inputs: Values, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, lengths, *values = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *(() if lengths is None else (lengths,)))
    ctx.values = values


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Values:
    q, k, v, out, lse, *lengths = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    grads: Values = (None, None, None)
    if grad_out is not None or grad_lse is not None:
        grads = attention_backward_op(
            grad_out, grad_lse, q, k, v, out, lse, needs, lengths[0] if lengths else None, *ctx.values
        )
    no_grads = (None,) * (1 + len(ctx.values))
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *no_grads


attention_op.register_autograd(_backward, setup_context=_keep_for_backward)


def _refuse(ctx: Any, *grads: Tensor | None) -> Values:
    raise NotImplementedError(
        "ringspan.attention has first derivatives only: a double backward (create_graph=True, gradient "
        "penalties) is not supported. Use ringspan.oracle.dense_attention for small problems that need it."
    )


attention_backward_op.register_autograd(_refuse)
