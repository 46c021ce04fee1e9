"""The online softmax: how two partial results over different keys become one. See docs/derivation.md."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into ``out`` (.., rows, dim) and ``lse`` (.., rows), both in place.

    Total: a row that has seen nothing has lse = -inf and out = 0; two such rows merge into such a
    row, without a NaN. A NaN that comes in stays visible.
    """
    total = torch.logaddexp(lse, part_lse)
    weight = (part_lse - total).exp_().masked_fill_(total == -torch.inf, 0.0)
    # One pass over out: lerp(a, b, w) = a + w (b - a), and the other weight is 1 - w.
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(total)
