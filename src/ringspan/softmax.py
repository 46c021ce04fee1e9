"""The online softmax: merges partial results over different keys. See docs/derivation.md."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into ``out`` (.., rows, dim) and ``lse`` (.., rows), both in place.

    Defined for all inputs: a row that has seen nothing has lse = -inf and out = 0, and two such rows merge into such a
    row, without a NaN. A NaN in the input stays visible.
    """
    torch.logaddexp(lse, part_lse, out=lse)
    weight = (part_lse - lse).exp_().masked_fill_(lse == -torch.inf, 0.0)
    # One pass over out: lerp(a, b, w) = a + w (b - a), since the weight of the earlier result is 1 - w.
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))


def put_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Store the first partial result: as `merge_` into rows that have seen nothing, in half the time.

    The previous contents are not read.
    """
    torch.mul(part, 1.0, out=out)  # copies and converts 16-bit parts
    torch.mul(part_lse, 1.0, out=lse)


def merge_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merge logits without a value, (heads,) or (batch, rows, heads), into ``out`` and ``lse``, in place.

    ``out`` is (batch, rows, heads, dim), ``lse`` (batch, heads, rows). This is `merge_` with a partial result of 0.
    """
    logits = _by_head(sinks, lse)
    total = torch.logaddexp(lse, logits)
    weight = (lse - total).exp_().masked_fill_(total == -torch.inf, 0.0)
    out.mul_(weight.transpose(1, 2).unsqueeze(-1))
    lse.copy_(total)


def sinks_gradient(grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks, from the final ``out`` and ``lse``: a key with this logit and the value 0.

    For sinks of shape (heads,), the sum over the given rows: over a ring, add up the gradients of all ranks, as for
    every parameter that all ranks hold.
    """
    share = torch.zeros_like(lse)  # of the derivative of the loss by the logit, before its softmax weight
    if grad_lse is not None:
        share += grad_lse
    if grad_out is not None:
        share -= (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    weight = (_by_head(sinks, lse) - lse).exp_().masked_fill_(lse == -torch.inf, 0.0)
    grad = share.mul_(weight)
    # Contiguous, as the fake operator promises to torch.compile.
    return (grad.sum((0, 2)) if sinks.dim() == 1 else grad.transpose(1, 2).contiguous()).to(sinks.dtype)


def _by_head(sinks: Tensor, lse: Tensor) -> Tensor:
    """Sinks as (batch, heads, rows), or as something that broadcasts to it."""
    wide = sinks.to(lse.dtype)
    return wide[:, None] if sinks.dim() == 1 else wide.transpose(1, 2)
