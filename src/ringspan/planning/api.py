"""`rs.plan` and `rs.best_layout`: what a ring would do, without tensors and without processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch

from ringspan.geometry import Dilated, Documents, Full, Pattern
from ringspan.kernels import accumulation_dtype
from ringspan.layout import Layout, LayoutName
from ringspan.planning import RingPlan, Routing, TensorSizes, check_routing
from ringspan.planning.breakeven import ASSUMED_RATES, DeviceRates, LayoutAdvice, advise_layout


def plan(
    pattern: Pattern,
    seq_len: int,
    *,
    ring_size: int = 1,
    layout: LayoutName = "zigzag",
    causal: bool = False,
    routing: Routing = "relay",
    lengths: Sequence[int] | None = None,
    batch: int = 1,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> RingPlan:
    """What each rank of a ring computes, sends and holds for a sequence of ``seq_len`` rows.

    Print it for a table; ask it for ``bytes_sent(rank)``, ``work(rank)``, ``imbalance`` and ``memory(rank)``. A rank's
    plan is made when it is asked for, and costs no more than its own tiles and routes.

    >>> import ringspan as rs
    >>> ring = rs.plan(rs.Dilated((2048, 8192), (1, 4)), 16384, ring_size=4, layout="contiguous", causal=True)
    >>> ring.bytes_sent(0), ring.bytes_sent(1)
    (4194304, 0)
    """
    if not isinstance(pattern, (Full, Dilated)):
        raise TypeError(f"pattern={pattern!r}: must be Dilated(segment_lengths, dilation_rates) or Full()")
    check_routing(routing)
    documents = Documents((seq_len,) if lengths is None else tuple(lengths))
    documents.check_rows(seq_len)
    kv_heads = heads if kv_heads is None else kv_heads
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
    """The layout with the shorter modelled time of a forward and a backward pass, and why.

    The model is that of ``ringspan plan``. Its ``rates`` are those of a GPU and a 200 Gbit/s link unless given: 1e14
    FLOP/s, 25e9 bytes/s, 20 µs per hop (`ringspan.planning.breakeven.DeviceRates`).

    >>> import ringspan as rs
    >>> print(rs.best_layout(rs.Full(), 2**20, 8, causal=True))  # doctest: +NORMALIZE_WHITESPACE
    zigzag: faster by the model, 4.95 s (waiting 21.5 ms, latency 0.32 ms);
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
