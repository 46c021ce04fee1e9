"""Which neighbours of a tile it sees on a slide, in row order and in Hilbert order, and at which cost.

Counts are exact and follow from the pattern: no attention runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import ringspan as rs
from ringspan.geometry import SegmentBranch
from ringspan.integrations.gigapath import segment_lengths_of
from ringspan.layout import Layout

HEADS, HEAD_DIM = 16, 48  # of gigapath_slide_enc12l768d
PATTERN = rs.Dilated(segment_lengths_of(262144, 256), (1, 2, 4, 8, 16), head_offsets="blocked")
ORDERS = ("row order", "Hilbert")
RADII = (1, 2, 4, 8, 16)  # tiles
RING_SIZES = (2, 4, 8)
SHARED_RADIUS = 8  # of the neighbourhoods that are split between ranks


def pieces_of(tiles: int) -> int:
    return 2 if tiles < 10_000 else 3


def positions_of(name: str, cells: Tensor) -> Tensor:
    """The row of each tile in the sequence. Row 0 is the CLS row."""
    rows = torch.arange(len(cells)) if name == "row order" else rs.Hilbert.from_points(cells).inverse
    return 1 + rows  # cells are sorted by x, then by y


def heads_that_see(positions: Tensor, pattern: rs.Dilated, heads: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each branch: a number for each tile, and the bits of the heads that select it.

    A head whose bit is set sees exactly the tiles with the same number, in this branch.
    """
    for branch in pattern.branches(int(positions.max()) + 1, heads):
        assert isinstance(branch, SegmentBranch)
        place = positions + branch.shift
        residue = place % branch.segment_length % branch.rate
        bits = torch.zeros(branch.rate, dtype=torch.int32)
        for head, offset in enumerate(branch.offsets):
            bits[offset] |= 1 << head
        yield (place // branch.segment_length * branch.rate + residue).int(), bits[residue]


def neighbours(cells: Tensor, radius: int) -> Iterator[tuple[float, Tensor, Tensor]]:
    """All pairs of tiles at most ``radius`` apart, each once: for each offset, its length and its pairs of tiles."""
    width, height = (cells.amax(0) + 1 + 2 * radius).tolist()
    grid = torch.full((width * height,), -1, dtype=torch.int32)
    places = (cells[:, 0] + radius) * height + cells[:, 1] + radius
    grid[places] = torch.arange(len(cells), dtype=torch.int32)
    for dx in range(radius + 1):
        for dy in range(-radius, radius + 1):
            if (dx, dy) > (0, 0) and dx * dx + dy * dy <= radius * radius:
                there = grid[places + dx * height + dy]
                here = (there >= 0).nonzero().flatten()
                yield math.hypot(dx, dy), here, there[here]


@lru_cache(maxsize=1)
def bit_counts() -> Tensor:
    numbers = torch.arange(2**HEADS)
    return sum(((numbers >> bit) & 1 for bit in range(HEADS)), start=torch.zeros_like(numbers)).int()


def count_neighbours(cells: Tensor, name: str) -> dict[str, Any]:
    """Shares of the pairs of tiles at most each radius apart, and what the shards of ranks need of each other.

    ``any_head``: pairs that see each other in at least one head. ``mean_head``: the mean over heads. ``rows_needed``:
    rows of other ranks that ranks need, so that all pairs at most `SHARED_RADIUS` apart could meet.
    """
    positions = positions_of(name, cells)
    branches = list(heads_that_see(positions, PATTERN, HEADS))
    ranks = {size: rank_of_rows(len(cells) + 1, size)[positions] for size in RING_SIZES}
    needed = {size: torch.zeros(size, len(cells), dtype=torch.bool) for size in RING_SIZES}
    pairs, any_head, heads = ([0] * len(RADII) for _ in range(3))
    for distance, here, there in neighbours(cells, RADII[-1]):
        seeing = torch.zeros(len(here), dtype=torch.int32)
        for numbers, bits in branches:
            seeing |= torch.where(numbers[here] == numbers[there], bits[here], 0)
        found = len(here), int((seeing > 0).sum()), int(bit_counts()[seeing].sum())
        for i, radius in enumerate(RADII):
            if distance <= radius:
                pairs[i], any_head[i], heads[i] = pairs[i] + found[0], any_head[i] + found[1], heads[i] + found[2]
        if distance <= SHARED_RADIUS:
            for size, rank in ranks.items():
                apart = (rank[here] != rank[there]).nonzero().flatten()
                one, other = here[apart], there[apart]
                needed[size][rank[one], other] = True
                needed[size][rank[other], one] = True
    return dict(
        pairs=pairs,
        any_head=[found / total for found, total in zip(any_head, pairs, strict=True)],
        mean_head=[found / total / HEADS for found, total in zip(heads, pairs, strict=True)],
        rows_needed={size: int(rows.sum()) for size, rows in needed.items()},
    )


def rank_of_rows(rows: int, ring_size: int) -> Tensor:
    """The rank of each row, contiguous layout."""
    layout = Layout("contiguous", rows, ring_size)
    return torch.repeat_interleave(torch.tensor([layout.rows_of(rank) for rank in range(ring_size)]))


def cost(tiles: int) -> dict[str, Any]:
    """Pairs of one layer, and the rows and bytes that a ring sends in a forward pass. The order does not matter."""
    plans = {
        size: rs.plan(PATTERN, tiles + 1, ring_size=size, layout="contiguous", heads=HEADS, head_dim=HEAD_DIM)
        for size in (1, *RING_SIZES)
    }
    sent = {size: sum(plan.bytes_sent(rank) for rank in range(size)) for size, plan in plans.items() if size > 1}
    return dict(pairs=plans[1].work(0), bytes=sent, row_bytes=plans[1].sizes.parcel_row_bytes)
