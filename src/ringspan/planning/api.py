"""`rs.plan` and `rs.best_layout`: what a ring would compute and send, without tensors or processes."""

from __future__ import annotations

from typing import get_args

import torch

from ringspan.geometry import Documents, Pattern
from ringspan.kernels import accumulation_dtype
from ringspan.layout import Layout, LayoutName
from ringspan.planning import RingPlan, Routing, TensorSizes, check_routing
from ringspan.planning.breakeven import ASSUMED_RATES, DeviceRates, LayoutAdvice, advise_layout
from ringspan.validation import Lengths, check_pattern, document_lengths


def plan(
    pattern: Pattern,
    seq_len: int,
    *,
    ring_size: int = 1,
    layout: LayoutName = "zigzag",
    causal: bool = False,
    routing: Routing = "relay",
    lengths: Lengths | None = None,
    cu_seqlens: Lengths | None = None,
    batch: int = 1,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> RingPlan:
    """What each rank of a ring computes, sends and holds for a sequence of ``seq_len`` rows.

    Printing the plan gives a table; ``bytes_sent(rank)``, ``work(rank)``, ``imbalance`` and ``memory(rank)`` give
    single values. A rank's plan is made on first use, in time proportional to its own tiles and routes.

    >>> import ringspan as rs
    >>> ring = rs.plan(rs.Dilated((2048, 8192), (1, 4)), 16384, ring_size=4, layout="contiguous", causal=True)
    >>> ring.bytes_sent(0), ring.bytes_sent(1)
    (4194304, 0)
    """
    check_routing(routing)
    packed = document_lengths(lengths, cu_seqlens, seq_len)
    documents = Documents((seq_len,) if packed is None else packed)
    documents.check_rows(seq_len)
    kv_heads = heads if kv_heads is None else kv_heads
    check_pattern(pattern, kv_heads)
    sizes = TensorSizes(batch, heads, kv_heads, head_dim, dtype.itemsize, accumulation_dtype(dtype).itemsize)
    return RingPlan(pattern, documents, Layout(layout, seq_len, ring_size), causal, routing, sizes)


def best_layout(
    pattern: Pattern,
    seq_len: int,
    ring_size: int,
    *,
    causal: bool = False,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    rates: DeviceRates = ASSUMED_RATES,
) -> LayoutAdvice:
    """The layout with the shorter modelled time for a forward and a backward pass, and the reason.

    Uses the model of ``ringspan plan``. The default ``rates`` describe a GPU and a 200 Gbit/s link: 1e14 FLOP/s, 25e9
    bytes/s, 20 µs per hop (`rs.DeviceRates`).

    >>> import ringspan as rs
    >>> print(rs.best_layout(rs.Full(), 2**20, 8, causal=True))  # doctest: +NORMALIZE_WHITESPACE
    zigzag: faster in the model, 4.95 s (waiting 21.5 ms, latency 0.32 ms);
    contiguous: 9.26 s (waiting 21.5 ms, latency 0.32 ms)
    >>> rs.best_layout(rs.Dilated((512, 1024), (1, 2)), 4096, 4, causal=True).layout
    'contiguous'
    """
    names: tuple[LayoutName, ...] = get_args(LayoutName)
    options = dict(causal=causal, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    return advise_layout(
        {name: plan(pattern, seq_len, ring_size=ring_size, layout=name, **options) for name in names},  # type: ignore[arg-type]
        rates,
    )
