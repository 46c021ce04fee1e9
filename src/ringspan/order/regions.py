"""Which rank holds which cell of a grid whose cells are ordered once, and then split into contiguous shards."""

from __future__ import annotations

from torch import Tensor

from ringspan.layout import Layout
from ringspan.order.grid import GridOrder


def ranks_of_cells(order: GridOrder, ring_size: int) -> Tensor:
    """The rank of each cell, in the shape of the grid.

    >>> from ringspan import Hilbert
    >>> ranks_of_cells(Hilbert((2, 4)), 2).tolist()
    [[0, 0, 1, 1], [0, 0, 1, 1]]
    """
    layout = Layout("contiguous", order.period, ring_size)
    ranks = order.permutation.new_zeros(order.period)
    for rank in range(ring_size):
        for span in layout.spans(rank):
            ranks[order.permutation[span.start : span.stop]] = rank
    return ranks.view(order.shape)
