"""`rs.plan` and `rs.best_layout`: what a ring would compute and send, without tensors or processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringspan.geometry import Documents, Pattern, check_pattern
from ringspan.geometry.documents import lengths_of_documents
from ringspan.layout import AnyLayout, Layout, layouts_to_compare
from ringspan.planning import Optimize, RingPlan, Routing, TensorSizes, check_routing, costs_for
from ringspan.planning.breakeven import LayoutAdvice, advise_layout
from ringspan.planning.dtypes import bytes_of
from ringspan.planning.heads import check_head_ranks, check_heads, ring_routing, with_head_ranks
from ringspan.planning.timing import ASSUMED_RATES, DeviceRates

if TYPE_CHECKING:
    import torch

    from ringspan.order import Order
    from ringspan.validation import Lengths


def plan(
    pattern: Pattern,
    seq_len: int,
    *,
    ring_size: int = 1,
    head_ranks: int = 1,
    layout: AnyLayout = "zigzag",
    causal: bool = False,
    routing: Routing = "relay",
    lengths: Lengths | None = None,
    cu_seqlens: Lengths | None = None,
    batch: int = 1,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype | str = "float32",
    order: Order | None = None,
    optimize: Optimize = "auto",
    device: str = "cpu",
) -> RingPlan:
    """What each rank of a ring computes, sends and holds for a sequence of ``seq_len`` rows.

    Printing the plan gives a table; ``bytes_sent(rank)``, ``work(rank)``, ``imbalance`` and ``memory(rank)`` give
    single values. A rank's plan is made on first use, in time proportional to its own tiles and routes. ``ring_size``
    counts all ranks; ``head_ranks`` of them hold each shard together and exchange heads (see `Ring`). ``order`` and
    ``optimize`` are those of `rs.attention`; ``"auto"`` depends on the type of the ``device``. With an order, a causal
    call may take several passes, one after another: bytes and work are those of all of them, the peak of parcels is at
    most that of the plan. ``dtype`` may also be a name, such as ``"bfloat16"``; without an order, planning needs no
    torch.

    >>> import ringspan as rs
    >>> ring = rs.plan(rs.Dilated((2048, 8192), (1, 4)), 16384, ring_size=4, layout="contiguous", causal=True)
    >>> ring.bytes_sent(0), ring.bytes_sent(1)
    (4194304, 0)
    """
    check_routing(routing)
    costs = costs_for(optimize, device)
    packed = lengths_of_documents(lengths, cu_seqlens, seq_len)
    documents = Documents((seq_len,) if packed is None else packed)
    documents.check_rows(seq_len)
    kv_heads = heads if kv_heads is None else kv_heads
    check_pattern(pattern, kv_heads)
    sizes = TensorSizes(batch, heads, kv_heads, head_dim, *bytes_of(dtype))
    check_head_ranks(ring_size, head_ranks)
    check_heads(heads, kv_heads, head_ranks)
    ring_routing(routing, head_ranks)
    shards = Layout(layout, seq_len, ring_size // head_ranks, documents.lengths)
    if order is not None:
        from ringspan.order import check_causality, check_fits, passes, shares_pairs  # noqa: PLC0415 - imports torch

        check_causality(order, causal)
        found = passes(pattern, order, causal)
        check_fits(order, documents, shards, moves=any(one.order is not None for one in found))
        costs = costs if shares_pairs(found) else None
    return RingPlan(pattern, documents, with_head_ranks(shards, head_ranks), causal, routing, sizes, costs)


def best_layout(
    pattern: Pattern,
    seq_len: int,
    ring_size: int,
    *,
    head_ranks: int | Sequence[int] = 1,
    causal: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Lengths | None = None,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype | str = "float32",
    rates: DeviceRates = ASSUMED_RATES,
    devices_per_node: int | None = None,
) -> LayoutAdvice:
    """The layout with the shorter modelled time for a forward and a backward pass, and the reason.

    Uses the model of ``ringspan plan``. The default ``rates`` describe a GPU and a 200 Gbit/s link: 1e14 FLOP/s, 25e9
    bytes/s, 20 µs per hop (`rs.DeviceRates`). With several ``head_ranks``, the best of them is chosen too; on a tie,
    the first. With ``devices_per_node``, messages between nodes share the links of ``rates.node_bandwidth``.

    With several packed documents, ``Balanced(pattern, causal)`` is considered too. A simpler layout wins if it is less
    than 2 % slower: contiguous before zigzag before balanced.

    >>> import ringspan as rs
    >>> print(rs.best_layout(rs.Full(), 2**20, 8, causal=True))  # doctest: +NORMALIZE_WHITESPACE
    zigzag: faster in the model, 5.02 s (waiting 21.5 ms, latency 0.02 ms);
    contiguous: 9.33 s (waiting 21.5 ms, latency 0.02 ms)
    >>> rs.best_layout(rs.Dilated((512, 1024), (1, 2)), 4096, 4, causal=True).layout
    'contiguous'
    >>> rs.best_layout(rs.Full(), 2**18, 8, causal=True, lengths=(2**17, *[2**9] * 2**8)).layout
    'balanced'
    >>> rs.best_layout(rs.Full(), 2**14, 16, head_ranks=(1, 2, 4, 8), heads=32, kv_heads=8).head_ranks
    8
    """
    packed = lengths_of_documents(lengths, cu_seqlens, seq_len)
    layouts = layouts_to_compare(pattern, causal, packed)
    options: dict[str, object] = dict(causal=causal, lengths=packed, heads=heads, kv_heads=kv_heads)
    options |= dict(ring_size=ring_size, head_dim=head_dim, dtype=dtype, optimize=rates.costs)
    choices = [head_ranks] if isinstance(head_ranks, int) else list(head_ranks)
    if not choices:
        raise ValueError("head_ranks=(): give at least one number to choose from; 1 is a plain ring")
    advice = []
    for count in choices:
        options["head_ranks"] = count
        plans = {layout: plan(pattern, seq_len, layout=layout, **options) for layout in layouts}  # type: ignore[arg-type]
        advice.append(advise_layout(plans, rates, devices_per_node))
    return min(advice, key=lambda one: one.times[one.layout].total)
