"""Rehearsal against reality: rings that fit here, run for real and rehearsed, rank by rank."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

import ringspan as rs
from ringspan.runtime.device import Cpu
from ringspan.runtime.launch import run_local_ranks
from ringspan.tools.rehearse import Network, rehearse_ring

SIZES = (
    (2**15, 64),
    (2**17, 128),
)  # tokens and dim of a head: below and above 32 MiB a tensor, where glibc keeps memory
HEADS, REPEATS = 4, 3


def pattern_of(tokens: int) -> rs.Dilated:
    """Segments of 256, and the whole sequence at a rate of 32."""
    return rs.Dilated((256, tokens), (1, 32))


def reality(ranks: int) -> dict[str, Any]:
    """Bytes sent and growth of the first and the last rank, forward and backward: real, and rehearsed."""
    return {"ranks": ranks, "lines": [line for size in SIZES for line in _lines(ranks, *size)]}


def _lines(ranks: int, tokens: int, dim: int) -> Iterator[dict[str, Any]]:
    """Medians over the repetitions: the C library keeps, now and then, a buffer that was freed."""
    repeated = [list(_measured(ranks, tokens, dim)) for _ in range(REPEATS)]
    for same_rank in zip(*repeated, strict=True):
        growths = {name: statistics.median(x[name] for x in same_rank) for name in ("real_growth", "rehearsed_growth")}
        yield same_rank[0] | growths


def _measured(ranks: int, tokens: int, dim: int) -> Iterator[dict[str, Any]]:
    real = run_local_ranks(ranks, _real_rank, tokens, dim)
    plan = rs.plan(pattern_of(tokens), tokens, ring_size=ranks, layout="zigzag", causal=True, heads=HEADS, head_dim=dim)
    chosen = {"first": 0, "last": ranks - 1}
    rehearsed = rehearse_ring(
        plan, chosen, Network(bandwidth=25e9), torch.float32, backward=True, threads=1, timeout_seconds=600
    )
    for rank in rehearsed.ranks.values():
        assert rank.backward is not None
        yield {
            "tokens": tokens,
            "dim": dim,
            "rank": rank.rank,
            "real_bytes": real[rank.rank][0],
            "rehearsed_bytes": rank.forward.bytes_sent + rank.backward.bytes_sent,
            "real_growth": real[rank.rank][1],
            "rehearsed_growth": rank.peak_growth,
        }


def _real_rank(tokens: int, dim: int) -> tuple[int, int]:
    ring = rs.Ring(layout="zigzag")
    rows = ring.layout_of(tokens).rows_of(ring.rank)
    torch.manual_seed(ring.rank)  # every process begins with the same seed

    def step() -> None:
        q, k, v = (torch.randn(1, rows, HEADS, dim).requires_grad_() for _ in range(3))
        out = rs.attention(q, k, v, pattern=pattern_of(tokens), causal=True, ring=ring)
        out.backward(torch.ones_like(out))

    rs.attention(*torch.ones(3, 1, 4, 1, dim), pattern=rs.Full())  # what is set up once is not counted
    growth = Cpu().peak_growth(step)[1]
    return ring.counters.bytes_sent, growth
