"""The online softmax: how two partial results over different keys become one. See docs/derivation.md."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into ``out`` (.., rows, dim) and ``lse`` (.., rows), both in place.

    Total: a row that has seen nothing has lse = -inf and out = 0; two such rows merge into such a
    row, without a NaN. A NaN that comes in stays visible.
    """
    torch.logaddexp(lse, part_lse, out=lse)
    weight = (part_lse - lse).exp_().masked_fill_(lse == -torch.inf, 0.0)
    # One pass over out: lerp(a, b, w) = a + w (b - a), and the weight of what was there is 1 - w.
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))


def put_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Put the first partial result in place: what `merge_` would give on rows that have seen nothing, in half the time.

    Whatever was there before is not read.
    """
    torch.mul(part, 1.0, out=out)  # copies, and converts 16-bit parts on the way
    torch.mul(part_lse, 1.0, out=lse)
