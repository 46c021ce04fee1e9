"""Rows of whole tensors by rank: taking a rank's rows, and putting all ranks' rows together again."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from ringspan.layout import Layout


@overload
def take_rows(x: Tensor, layout: Layout, rank: int, dim: int) -> Tensor: ...
@overload
def take_rows(x: None, layout: Layout, rank: int, dim: int) -> None: ...
@overload
def take_rows(x: Tensor | None, layout: Layout, rank: int, dim: int) -> Tensor | None: ...
def take_rows(x: Tensor | None, layout: Layout, rank: int, dim: int) -> Tensor | None:
    """The rank's rows of a whole tensor, in the order in which the rank keeps them."""
    if x is None or layout.ring_size == 1:
        return x
    spans = [x.narrow(dim, span.start, span.stop - span.start) for span in layout.spans(rank)]
    if not spans:
        return x.narrow(dim, 0, 0)
    return torch.cat(spans, dim) if len(spans) > 1 else spans[0]


def join_rows(parts: list[Tensor], layout: Layout, dim: int) -> Tensor:
    """The whole tensor, from every rank's rows."""
    if layout.ring_size == 1:
        return parts[0]
    stretches = [
        (span.start, part.narrow(dim, span.local, span.stop - span.start))
        for rank, part in enumerate(parts)
        for span in layout.spans(rank)
    ]
    stretches.sort(key=lambda stretch: stretch[0])
    return torch.cat([x for _, x in stretches], dim) if stretches else parts[0]
