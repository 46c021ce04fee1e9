"""What other ways to split attention would cost, from the numbers of a plan: a plain ring and an all-gather of K/V.

Both ignore the pattern. A plain ring passes all K/V rows of every rank around, so each rank sends k - 1 shards. An
all-gather sends as many bytes, and then holds all rows at once. Both compute every pair that causality allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ringspan.planning import RingPlan


@dataclass(frozen=True, slots=True)
class Baseline:
    """One rank: bytes sent in a forward pass, peak bytes of K/V rows of other ranks, and (query, key) pairs."""

    sent: int
    parcels: int
    work: int


def plain_ring(plan: RingPlan, rank: int) -> Baseline:
    """A rank forwards each shard but that of its next neighbour, and holds two at a time: in use, and in transfer.

    >>> import ringspan as rs
    >>> ring = rs.plan(rs.Window(7), 64, ring_size=4, layout="contiguous", heads=1, head_dim=1)
    >>> plain_ring(ring, 0)
    Baseline(sent=384, parcels=256, work=1024)
    """
    size = plan.layout.ring_size
    rows = [plan.layout.rows_of((rank - hop) % size) for hop in range(size)]
    held = max((a + b for a, b in pairwise(rows)), default=0)
    row = plan.sizes.kv_heads * plan.sizes.parcel_row_bytes
    return Baseline((sum(rows) - rows[-1] if size > 1 else 0) * row, held * row, dense_work(plan, rank))


def all_gather(plan: RingPlan, rank: int) -> Baseline:
    """The same bytes over a ring of links, but all rows of the other ranks are held at once."""
    row = plan.sizes.kv_heads * plan.sizes.parcel_row_bytes
    others = (plan.layout.rows - plan.layout.rows_of(rank)) * row
    return Baseline(plain_ring(plan, rank).sent, others, dense_work(plan, rank))


def dense_work(plan: RingPlan, rank: int) -> int:
    """The pairs of full attention for the rank's rows: all keys or, if causal, those up to each row."""
    rows = plan.layout.rows
    spans = [(span.start, span.stop) for span in plan.layout.spans(rank)]
    if plan.causal:
        seen = sum((stop * (stop + 1) - start * (start + 1)) // 2 for start, stop in spans)
    else:
        seen = sum((stop - start) * rows for start, stop in spans)
    return seen * plan.sizes.heads
