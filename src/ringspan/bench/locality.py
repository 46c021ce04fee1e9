"""What orders make of neighbourhoods, counted: who sees his neighbours on the grid, and how many rows travel for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ringspan.order import GridOrder
from ringspan.order.regions import ranks_of_cells

_STEPS_PER_DOUBLING = 16  # of the segment lengths that are tried


def share_of_neighbours_seen(order: GridOrder, segment_length: int, radius: float) -> float:
    """Of all pairs of cells at most ``radius`` apart, the share that lies in one segment: these see each other.

    >>> from ringspan import RowMajor
    >>> share_of_neighbours_seen(RowMajor((4, 4)), 4, radius=1)
    0.5
    """
    segments = (order.inverse // segment_length).view(order.shape)
    met = pairs = 0
    for here, there in _pairs(segments, radius):
        met += int((here == there).sum())
        pairs += here.numel()
    return met / pairs


def shortest_segment(order: GridOrder, share: float, radius: float) -> int:
    """The shortest segment, tried in small steps, with which so large a share of neighbours see each other."""
    for step in itertools.count(_STEPS_PER_DOUBLING):
        length = min(order.period, round(2 ** (step / _STEPS_PER_DOUBLING)))
        if share_of_neighbours_seen(order, length, radius) >= share:
            return length
    raise AssertionError("one segment of all cells holds every pair")


def rows_that_travel(order: GridOrder, ring_size: int, radius: float) -> list[int]:
    """For each rank of a ring, how many rows of others it needs so that all pairs at most ``radius`` apart can meet.

    The cells are ordered once and then split into contiguous shards.

    >>> from ringspan import RowMajor
    >>> rows_that_travel(RowMajor((4, 4)), 2, radius=1)
    [4, 4]
    """
    cells = torch.arange(order.period).view(order.shape)
    needed = torch.zeros(ring_size, order.period, dtype=torch.bool)
    ranks = ranks_of_cells(order, ring_size)
    for (here, there), (mine, other) in zip(_pairs(ranks, radius), _pairs(cells, radius), strict=True):
        apart = here != there
        needed[here[apart], other[apart]] = True
        needed[there[apart], mine[apart]] = True
    return needed.sum(1).tolist()


def _pairs(grid: Tensor, radius: float) -> Iterator[tuple[Tensor, Tensor]]:
    """All pairs of cells at most ``radius`` apart, each once: two windows of the grid for each difference."""
    reach = range(-math.floor(radius), math.floor(radius) + 1)
    for difference in itertools.product(reach, repeat=grid.dim()):
        if difference > (0,) * grid.dim() and sum(d * d for d in difference) <= radius * radius:
            here, there = grid, grid
            for axis, d in enumerate(difference):
                side = grid.shape[axis] - abs(d)
                if side <= 0:
                    break
                here, there = here.narrow(axis, max(0, -d), side), there.narrow(axis, max(0, d), side)
            else:
                yield here, there
