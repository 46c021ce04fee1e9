"""What `ringspan plan` knows: plans of a ring under each layout, and what they cost its ranks. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ringspan.geometry import Documents, Pattern
from ringspan.layout import Layout, LayoutName
from ringspan.planning import Memory, Passing, RingPlan, Sizes, check_passing

NUMBER_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MOST_RANKS_LISTED = 16


@dataclass(frozen=True, slots=True)
class RankPrice:
    """What one rank computes, moves and holds. ``share`` is its work over an even share of all work: 1 is perfect."""

    rank: int
    rows: int
    tiles: int
    hops: int
    parcels_received: int
    sent_forward: int
    sent_backward: int
    work: int
    share: float
    memory_forward: Memory
    memory_backward: Memory


@dataclass(frozen=True, slots=True)
class LayoutPrice:
    """The ranks that were priced under one layout: one, all, or a sample of a large ring."""

    plan: RingPlan
    ranks: tuple[RankPrice, ...]

    @property
    def is_whole(self) -> bool:
        return len(self.ranks) == self.plan.layout.ring_size

    @property
    def busiest(self) -> RankPrice:
        return max(self.ranks, key=lambda price: price.work)

    def listed(self) -> dict[str, RankPrice]:
        """The ranks that a table shows, by name: all of them or, of a large ring, first, middle, last and busiest."""
        if len(self.ranks) <= MOST_RANKS_LISTED:
            return {str(price.rank): price for price in self.ranks}
        places = {"first": self.ranks[0], "middle": self.ranks[len(self.ranks) // 2], "last": self.ranks[-1]}
        places["busiest"] = self.busiest
        return {f"{price.rank:,} {name}": price for name, price in places.items()}


def make_plans(
    pattern: Pattern,
    tokens: int,
    ring_size: int,
    layouts: tuple[LayoutName, ...],
    *,
    causal: bool,
    passing: Passing,
    batch: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: str,
) -> dict[LayoutName, RingPlan]:
    """As `rs.plan`, for each layout, with the dtype by its name: so that torch need not be there.

    >>> from ringspan.geometry import Full
    >>> plans = make_plans(
    ...     Full(), 4096, 4, ("contiguous",), causal=True, passing="relay",
    ...     batch=1, heads=8, kv_heads=8, dim=64, dtype="float32",
    ... )
    >>> plans["contiguous"].bytes_sent(0)
    4194304
    """
    if dtype not in NUMBER_BYTES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(NUMBER_BYTES)}")
    check_passing(passing)
    accumulated = "float64" if dtype == "float64" else "float32"
    sizes = Sizes(batch, heads, kv_heads, dim, NUMBER_BYTES[dtype], NUMBER_BYTES[accumulated])
    documents = Documents((tokens,))
    return {
        name: RingPlan(pattern, documents, Layout(name, tokens, ring_size), causal, passing, sizes) for name in layouts
    }


def price_layout(plan: RingPlan, rank: int | None = None) -> LayoutPrice:
    """Price one rank, if it is named; otherwise all ranks or, of a large ring, an even sample with both ends."""
    even_share = all_work(plan) / plan.layout.ring_size
    ranks = plan.sample if rank is None else (rank,)
    return LayoutPrice(plan, tuple(_price(plan, i, even_share) for i in ranks))


def all_work(plan: RingPlan) -> int:
    """(query, key) pairs of the whole ring: those of one device that does everything, which is cheap to plan."""
    return replace(plan, layout=Layout("contiguous", plan.layout.rows, 1)).work(0)


def _price(plan: RingPlan, rank: int, even_share: float) -> RankPrice:
    own = plan.rank(rank)
    return RankPrice(
        rank=rank,
        rows=own.rows,
        tiles=len(own.tiles),
        hops=len(own.hops) - 1,
        parcels_received=sum(len(hop.receives) for hop in own.hops),
        sent_forward=plan.bytes_sent(rank),
        sent_backward=plan.bytes_sent(rank, backward=True),
        work=plan.work(rank),
        share=plan.work(rank) / even_share if even_share else 1.0,
        memory_forward=plan.memory(rank),
        memory_backward=plan.memory(rank, backward=True),
    )
