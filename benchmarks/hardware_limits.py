"""Memory, network and compute limits of rings of GPUs, computed from plans. Nothing is measured.

Public specifications: a device is an NVIDIA H100 SXM (80 GB, 989 TFLOP/s dense bf16, NVLink 450 GB/s each way
inside a node of 8, one 400 Gb/s adapter per device between nodes: NVIDIA's data sheets of H100 and DGX H100).
Attention is assumed to reach 40 % of the peak. The layer has 32 query heads and 8 KV heads of 128, bf16, causal,
batch 1.
"""

from __future__ import annotations

from typing import Any

import torch

import ringspan as rs
from ringspan.layout import LayoutName
from ringspan.planning import ByNode, RingPlan, Routing
from ringspan.planning.cost import traffic
from ringspan.planning.timing import DeviceRates, ring_time

MEMORY_BYTES = 80e9
FLOPS = 0.4 * 989e12
INSIDE, ACROSS = 450e9, 50e9  # bytes/s each way
LATENCY = 20e-6
RANKS_PER_NODE = 8
_SAMPLED_RANKS = 3


def longnet(tokens: int) -> rs.Dilated:
    """LongNet's geometric ladder: segments of 2048, 8192, .. up to the whole sequence, rates 1, 4, .."""
    lengths, rates = [2048], [1]
    while lengths[-1] < tokens:
        lengths.append(min(4 * lengths[-1], tokens))
        rates.append(4 * rates[-1])
    return rs.Dilated(tuple(lengths), tuple(rates))


def layer(tokens: int, ranks: int, routing: Routing = "relay", layout: LayoutName = "contiguous") -> RingPlan:
    return rs.plan(
        longnet(tokens),
        tokens,
        ring_size=ranks,
        layout=layout,
        causal=True,
        routing=routing,
        heads=32,
        kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
    )


def communication(ranks: int) -> dict[str, Any]:
    """Bytes that a rank receives in a forward pass and holds of other ranks at a time, compared with other methods."""
    tokens = 2**20 * ranks // 8
    plan = layer(tokens, ranks)
    row = 2 * plan.sizes.kv_heads * plan.sizes.head_dim * plan.sizes.number_bytes
    rows = tokens // ranks
    sampled_ranks = _sampled_ranks(ranks)
    return {
        "ranks": ranks,
        "tokens": tokens,
        "ringspan": max(plan.bytes_received(rank) for rank in sampled_ranks),
        "plain_ring": (ranks - 1) * rows * row,
        "all_gather": (ranks - 1) * rows * row,
        "ringspan_held": max(plan.memory(rank).parcels for rank in sampled_ranks),
        "plain_ring_held": 2 * rows * row,
        "all_gather_held": (ranks - 1) * rows * row,
    }


def nodes(ranks: int) -> dict[str, Any]:
    """Bytes that cross node boundaries in a backward pass, all ranks together, for each routing."""
    tokens, per_node = 2**20 * ranks // 8, min(RANKS_PER_NODE, ranks // 2)
    routings: tuple[Routing, ...] = ("direct", "relay", ByNode(per_node))
    layouts: tuple[LayoutName, ...] = ("contiguous", "zigzag")
    lines = []
    for layout in layouts:
        line: dict[str, Any] = {"layout": layout}
        for name, routing in zip(("direct", "relay", "by_node"), routings, strict=True):
            moved = traffic(layer(tokens, ranks, routing, layout), per_node, backward=True)
            line[name] = {"parcels": moved.parcels_across, "gradients": moved.gradients_across, "inside": moved.inside}
        lines.append(line)
    return {"ranks": ranks, "tokens": tokens, "ranks_per_node": per_node, "lines": lines}


def hardware_limits(ranks: int) -> dict[str, Any]:
    """The longest sequence that fits in memory, the time of a layer there, and the length from which transfers hide."""
    bandwidth = INSIDE if ranks <= RANKS_PER_NODE else ACROSS
    rates = DeviceRates(FLOPS, bandwidth, LATENCY)
    longest, tokens = 0, 2**14 * ranks
    keeps_up = None
    while _fits(tokens, ranks):
        longest = tokens
        time = ring_time(layer(tokens, ranks), rates)
        if keeps_up is None and time.waiting + time.latency <= 0.1 * time.work:
            keeps_up = tokens
        tokens *= 2
    plan = layer(longest, ranks)
    memory = max(plan.memory(rank, backward=True).total for rank in _sampled_ranks(ranks))
    return {
        "ranks": ranks,
        "bandwidth": bandwidth,
        "longest": longest,
        "memory": memory,
        "work": time.work,
        "waiting": time.waiting,
        "latency": time.latency,
        "keeps_up_from": keeps_up,
    }


def _fits(tokens: int, ranks: int) -> bool:
    plan = layer(tokens, ranks)
    return max(plan.memory(rank, backward=True).total for rank in _sampled_ranks(ranks)) <= MEMORY_BYTES


def _sampled_ranks(ranks: int) -> list[int]:
    return sorted({round(i * (ranks - 1) / (_SAMPLED_RANKS - 1)) for i in range(_SAMPLED_RANKS)})
