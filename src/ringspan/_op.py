"""The engine as one registered operator, so that torch.compile takes it whole and checkpointing can keep it.

Operators take tensors and plain values only: pattern and order travel as their texts, packed lengths as an int64
tensor (so that new lengths do not recompile), kernel and ring as their names.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ringspan import kernels
from ringspan.engine import walk_backward, walk_forward
from ringspan.execute import Call
from ringspan.geometry import Pattern, parse_pattern, unselected_warning
from ringspan.order import parse_order
from ringspan.ring.agreement import digest, fingerprint
from ringspan.ring.backend import Players, find_ring
from ringspan.ring.simulated import ALONE
from ringspan.softmax import merge_

Values = tuple[Any, ...]


def _players(ring: str) -> Players:
    return find_ring(ring) if ring else ALONE


def _note(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, needs: Sequence[bool], **values: Any
) -> dict[str, Any]:
    """What ranks must agree on, and the fingerprint of their rows."""
    batch, _, heads, dim = q.shape
    return {
        "call": "attention",
        "batch, heads, kv_heads, dim": (batch, heads, k.shape[2], dim),
        "dtype": str(q.dtype),
        "lengths": None if lengths is None else digest(str(lengths.tolist())),
        "who needs gradients (q, k, v)": tuple(needs),
        "fingerprint": fingerprint(q, k, v),
        **{name: digest(str(value)) for name, value in values.items()},
    }


@lru_cache(maxsize=256)
def _warn_if_transposed(rows: int, heads: int) -> None:
    """Many heads over few rows: rather a tensor of another layout."""
    if heads >= 64 and 4 * rows <= heads:
        warnings.warn(
            f"q has {heads} heads over a sequence of {rows} rows. ringspan takes (batch, seq, heads, dim): if yours is "
            "(batch, heads, seq, dim), as in torch's scaled_dot_product_attention, pass x.transpose(1, 2).",
            stacklevel=2,
        )


@lru_cache(maxsize=256)
def _warn_if_unselected(pattern: Pattern, rows: int, kv_heads: int) -> None:
    warning = unselected_warning(pattern, rows, kv_heads)
    if warning:
        warnings.warn(warning, stacklevel=2)


@torch.library.custom_op("ringspan::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    pattern: str,
    order: str,
    causal: bool,
    scale: float,
    kernel: str,
    ring: str,
    seq_len: int | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse, and the length of the whole sequence as the ranks agreed on it."""
    players = _players(ring)
    layout = players.agree(
        q.shape[1],
        lambda: _note(q, k, v, lengths, needs, pattern=pattern, order=order, causal=causal, scale=scale),
        seq_len,
        q,
    )
    if seq_len is None:
        _warn_if_transposed(layout.rows, q.shape[2])
    _warn_if_unselected(parse_pattern(pattern), layout.rows, k.shape[2])
    call = Call.of(players, layout, k, lengths, pattern, order, causal)
    start = partial(walk_forward, scale=scale, kernel=kernels.get(kernel))
    ranks: list[list[Any]] = []
    for one in call.passes:
        parts = call.walk(one, [(q, 1), (k, 1), (v, 1)], start, row_dims=(1, 2))
        for (out, lse), (part, part_lse) in zip(ranks, parts, strict=False):
            merge_(out.transpose(1, 2), lse, part.transpose(1, 2), part_lse)
        ranks = ranks or parts
    outs, lses = zip(*ranks, strict=True)
    return (
        players.collect(layout, [out.to(q.dtype) for out in outs], 1),
        players.collect(layout, list(lses), 2),
        torch.tensor(layout.rows, dtype=torch.int64),
    )


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
    out: Tensor,
    lse: Tensor,
    whole_rows: Tensor,
    lengths: Tensor | None,
    pattern: str,
    order: str,
    causal: bool,
    scale: float,
    kernel: str,
    ring: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; an empty tensor for each that nobody needs."""
    players = _players(ring)
    layout = players.agree(q.shape[1], dict, int(whole_rows), q)
    call = Call.of(players, layout, k, lengths, pattern, order, causal)
    tensors = [(grad_out, 1), (grad_lse, 2), (q, 1), (k, 1), (v, 1), (out, 1), (lse, 2)]
    need_q, need_k, need_v = needs
    start = partial(walk_backward, scale=scale, kernel=kernels.get(kernel), needs=(need_q, need_k, need_v))
    ranks: list[list[Any]] = []
    for one in call.passes:
        shares = call.walk(one, tensors, start, row_dims=(1, 1, 1))
        for total, share in zip(ranks, shares, strict=False):
            for grad, more in zip(total, share, strict=True):
                if grad is not None:
                    grad.add_(more)
        ranks = ranks or shares
    dq, dk, dv = (
        players.collect(layout, [grad.to(q.dtype) for grad in grads], 1) if need else q.new_empty(0)
        for grads, need in zip(zip(*ranks, strict=True), needs, strict=True)
    )
    return dq, dk, dv


@attention_backward_op.register_fake
def _attention_backward_fake(
    grad_out: Tensor | None, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    needs = others[-1]
    dq, dk, dv = (q.new_empty(x.shape if need else 0) for x, need in zip((q, k, v), needs, strict=True))
    return dq, dk, dv


def _keep_for_backward(ctx: Any, inputs: Values, output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, lengths, *values, _seq_len, needs = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *(() if lengths is None else (lengths,)))
    ctx.values, ctx.needs = values, needs
    # A ring or an order that nobody else keeps lives until backward is done.
    ctx.kept = _players(values[-1]), parse_order(values[1]) if values[1] else None


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> Values:
    q, k, v, out, lse, whole_rows, *lengths = ctx.saved_tensors
    needs = list(ctx.needs)
    if grad_out is None and grad_lse is None:
        grad_out = torch.zeros_like(out)  # other ranks may need this one's walk
    packed = lengths[0] if lengths else None
    grads = attention_backward_op(grad_out, grad_lse, q, k, v, out, lse, whole_rows, packed, *ctx.values, needs)
    no_grads = (None,) * (3 + len(ctx.values))
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *no_grads


attention_op.register_autograd(_backward, setup_context=_keep_for_backward)


def _refuse(ctx: Any, *grads: Tensor | None) -> Values:
    raise NotImplementedError(
        "ringspan.attention has first derivatives only: a double backward (create_graph=True, gradient "
        "penalties) is not supported. Use ringspan.oracle.dense_attention for small problems that need it."
    )


attention_backward_op.register_autograd(_refuse)
