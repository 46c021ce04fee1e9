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
