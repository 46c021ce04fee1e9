"""Head ranks: groups of ranks that hold one shard of a ring together, and exchange rows for heads during a call.

A ring of ``size`` ranks with ``head_ranks=U`` has size / U shards. Rank r * U + u holds the u-th part of the rows of
shard r, with all heads. For a call, the U ranks of a shard exchange: each gets all rows of the shard for its own heads,
and the ranks with the same u run a ring of size / U over these heads. Pure integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ringspan.geometry import Dilated, Pattern, PatternSum, as_int
from ringspan.layout import Layout, RankSpan, Span
from ringspan.planning.routes import ByNode, Routing


@dataclass(frozen=True)
class HeadLayout(Layout):
    """The layout of a ring with head ranks: ``ring_size`` counts all ranks, and ``shards`` lays out the ring's shards.

    >>> layout = HeadLayout("zigzag", 16, ring_size=4, head_ranks=2)
    >>> [layout.spans(rank) for rank in (0, 1)]
    [(Span(start=0, stop=4, local=0),), (Span(start=12, stop=16, local=0),)]
    """

    head_ranks: int = 1
    shards: Layout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_head_ranks(self.ring_size, self.head_ranks)
        shards = Layout(self.name, self.rows, self.ring_size // self.head_ranks, self.lengths)
        object.__setattr__(self, "shards", shards)
        for name in ("name", "rows", "lengths"):  # as Layout normalises them
            object.__setattr__(self, name, getattr(shards, name))

    def spans(self, rank: int) -> tuple[Span, ...]:
        if not 0 <= rank < self.ring_size:
            raise ValueError(f"rank={rank}: must be in 0 .. {self.ring_size - 1}")
        shard, part = divmod(rank, self.head_ranks)
        first, last = (self.shards.rows_of(shard) * i // self.head_ranks for i in (part, part + 1))
        found = []
        for span in self.shards.spans(shard):
            start, stop = (min(max(span.start, span.start - span.local + row), span.stop) for row in (first, last))
            if start < stop:
                found.append(Span(start, stop, span.local + start - span.start - first))
        return tuple(found)

    def rank_spans(self, start: int, stop: int) -> Iterator[RankSpan]:
        every = sorted((span.start, span.stop, rank) for rank in range(self.ring_size) for span in self.spans(rank))
        for first, last, rank in every:
            if max(first, start) < min(last, stop):
                yield RankSpan(rank, max(first, start), min(last, stop))


def with_head_ranks(shards: Layout, head_ranks: int) -> Layout:
    """The layout in which ``head_ranks`` ranks hold each shard together."""
    if head_ranks == 1:
        return shards
    return HeadLayout(shards.name, shards.rows, shards.ring_size * head_ranks, shards.lengths, head_ranks=head_ranks)


def head_ranks_of(layout: Layout) -> int:
    """How many ranks hold a shard together; 1 in a plain ring."""
    return layout.head_ranks if isinstance(layout, HeadLayout) else 1


def shards_of(layout: Layout) -> Layout:
    """The layout over shards: in a plain ring, the layout itself."""
    return layout.shards if isinstance(layout, HeadLayout) else layout


def check_head_ranks(ring_size: int, head_ranks: int) -> None:
    """Raise unless the ranks of a ring can be divided into groups of ``head_ranks``."""
    if as_int("head_ranks", head_ranks) < 1 or ring_size % head_ranks:
        raise ValueError(
            f"head_ranks={head_ranks}, but the ring has {ring_size} ranks: must be at least 1 and divide them"
        )


def check_heads(heads: int, kv_heads: int, head_ranks: int) -> None:
    """Raise unless every head rank can have the same number of heads.

    KV heads are divided too or, if there are fewer than head ranks, replicated.
    """
    way_out = "use another number of head ranks, or a ring without them"
    if heads % head_ranks:
        raise ValueError(f"{heads} query heads over {head_ranks} head ranks: head_ranks must divide them; {way_out}")
    if kv_heads % head_ranks and head_ranks % kv_heads:
        raise ValueError(
            f"{kv_heads} KV heads over {head_ranks} head ranks: head_ranks must divide them, or be a multiple of them "
            f"(then each KV head is replicated); {way_out}"
        )


def refuse_head_ranks(what: str, head_ranks: int) -> None:
    """Raise for what is defined only for a plain ring."""
    if head_ranks > 1:
        raise ValueError(
            f"{what} over a ring with head_ranks={head_ranks}: not supported; use a ring without head ranks"
        )


def heads_of(part: int, heads: int, head_ranks: int) -> range:
    """The heads that a head rank computes, of tensors with so many heads. KV heads may be replicated.

    >>> [heads_of(part, 8, 4) for part in range(4)]
    [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    >>> [heads_of(part, 2, 4) for part in range(4)]
    [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]
    """
    first = part * heads // head_ranks
    return range(first, first + max(1, heads // head_ranks))


def inside_ring(
    pattern: Pattern, layout: Layout, rank: int, kv_heads: int, routing: Routing
) -> tuple[Pattern, Layout, int, int, Routing]:
    """(pattern, layout, rank, KV heads, routing) of the plain ring in which a rank computes its heads.

    Head offsets follow the KV head in the whole tensors.
    """
    if not isinstance(layout, HeadLayout):
        return pattern, layout, rank, kv_heads, routing
    shard, part = divmod(rank, layout.head_ranks)
    own = heads_of(part, kv_heads, layout.head_ranks)
    seen = _for_heads(pattern, own.start, kv_heads)
    return seen, layout.shards, shard, len(own), ring_routing(routing, layout.head_ranks)


def ring_routing(routing: Routing, head_ranks: int) -> Routing:
    """The routing among the shards of a ring, whose nodes hold ranks_per_node / head_ranks of them."""
    if not isinstance(routing, ByNode) or head_ranks == 1:
        return routing
    if routing.ranks_per_node % head_ranks:
        raise ValueError(
            f"ByNode({routing.ranks_per_node}) with head_ranks={head_ranks}: head_ranks must divide the ranks of a "
            "node, so that heads are exchanged inside it; choose another number, or routing='relay'"
        )
    return ByNode(routing.ranks_per_node // head_ranks)


def _for_heads(pattern: Pattern, first: int, kv_heads: int) -> Pattern:
    """The pattern for KV heads ``first`` on, of ``kv_heads`` in tensors that may themselves hold only some heads."""
    if isinstance(pattern, PatternSum):
        return PatternSum(tuple(_for_heads(term, first, kv_heads) for term in pattern.terms))
    if isinstance(pattern, Dilated):
        return pattern.for_heads(pattern.first_head + first, pattern.total_heads or kv_heads)
    return pattern
