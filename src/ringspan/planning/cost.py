"""What a plan costs: bytes, work, balance and memory of each rank, and how far a token reaches, from integers.

`rs.plan` returns a `RingPlan`; printing it gives a table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ringspan.geometry import Branch, Documents, Pattern, SegmentBranch, WindowBranch
from ringspan.layout import Layout, RankSpan
from ringspan.planning.heads import HeadLayout, head_ranks_of, heads_of, inside_ring, ring_routing, shards_of
from ringspan.planning.nesting import CPU_COSTS, TileCosts
from ringspan.planning.proof import MessageBatch, Proof, exchange_batch, hop_batches, pair_up
from ringspan.planning.rank import Hop, RankPlan, plan_rank
from ringspan.planning.routes import ByNode, Routing, node_of
from ringspan.planning.shared_windows import shared_window
from ringspan.planning.tiles import Message, Parcel

_MOST_RANKS_SAMPLED = 64  # in a larger ring: both ends and an even sample between
_MOST_TABLE_ROWS = 16


@dataclass(frozen=True, slots=True)
class TensorSizes:
    """Sizes of the tensors, which turn the row counts of a plan into bytes."""

    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    number_bytes: int = 4  # of an element in the input dtype
    wide_bytes: int = 4  # of an element in the accumulation dtype

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads}, kv_heads={self.kv_heads}: the KV heads must divide the query heads")

    @property
    def parcel_row_bytes(self) -> int:
        """Bytes of one row of a parcel: K and V."""
        return 2 * self.batch * self.head_dim * self.number_bytes

    @property
    def gradient_row_bytes(self) -> int:
        """Bytes of one row of a parcel's gradient, in the accumulation dtype."""
        return 2 * self.batch * self.head_dim * self.wide_bytes


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank: its rows of all tensors (inputs, outputs, accumulators, gradients) and its peak of parcels.

    ``exchanged``: with head ranks, also the tensors for its own heads, and the messages that carry them.
    """

    rows: int
    parcels: int
    exchanged: int = 0

    @property
    def total(self) -> int:
        return self.rows + self.parcels + self.exchanged


@dataclass(frozen=True, slots=True)
class Exchange:
    """Bytes that a rank sends to and receives from the other head ranks of its shard, at once."""

    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class Reach:
    """``longest`` is the most rows from the first to the last key that a query sees, in a document of ``tokens`` rows.

    ``crossing`` has the length of the segments or windows of each branch that sends rows between ranks; if empty, the
    ring sends nothing. With head ranks, these are the ranks that compute the same heads.
    """

    tokens: int
    ring_size: int
    longest: int
    crossing: tuple[int, ...]
    head_ranks: int = 1

    def __str__(self) -> str:
        seen = (
            f"all {self.tokens:,} tokens"
            if self.longest == self.tokens
            else f"at most {self.longest:,} of {self.tokens:,} tokens"
        )
        if self.ring_size > 1 and not self.crossing:
            sent = "nothing is sent" if self.head_ranks == 1 else "only heads are exchanged"
            return f"No branch crosses ranks, so {sent}; a token reaches {seen}."
        if self.ring_size > 1:
            lengths = ", ".join(f"{w:,}" for w in dict.fromkeys(self.crossing))
            return f"A token reaches {seen}; branches of {lengths} rows cross ranks."
        return f"A token reaches {seen}."


@dataclass(frozen=True)
class RingPlan:
    """The plan of a whole ring. The plan of each rank is made on first use."""

    pattern: Pattern
    documents: Documents
    layout: Layout
    causal: bool
    routing: Routing
    sizes: TensorSizes
    costs: TileCosts | None = CPU_COSTS

    def rank(self, rank: int) -> RankPlan:
        """The plan of one rank."""
        pattern, layout, rank, kv_heads, routing = inside_ring(
            self.pattern, self.layout, rank, self.sizes.kv_heads, self.routing
        )
        return plan_rank(pattern, self.documents, layout, rank, kv_heads, self.causal, routing, self.costs)

    @property
    def head_ranks(self) -> int:
        """How many ranks hold each shard together and exchange heads; 1 in a plain ring."""
        return head_ranks_of(self.layout)

    @property
    def queries_per_kv_head(self) -> int:
        """How many query heads read each KV head that a rank computes. Fewer if KV heads are replicated."""
        return self._own_heads[0] // self._own_heads[1]

    @property
    def _own_heads(self) -> tuple[int, int]:
        """The query heads and KV heads that a rank computes."""
        sizes, head_ranks = self.sizes, self.head_ranks
        return len(heads_of(0, sizes.heads, head_ranks)), len(heads_of(0, sizes.kv_heads, head_ranks))

    def exchanges(self, rank: int, *, backward: bool = False) -> tuple[Exchange, ...]:
        """What head ranks exchange before and after a pass; empty without them.

        Forward exchanges q, k and v, then out and lse. Backward exchanges these again with the gradients of out and
        lse, then the gradients of q, k and v, which all need gradients here. Sinks for each row are not counted.
        """
        if self.head_ranks == 1:
            return ()
        (heads, kv_heads), sizes = self._own_heads, self.sizes
        number, wide = sizes.head_dim * sizes.number_bytes, sizes.head_dim * sizes.wide_bytes
        if backward:
            replicated = self.head_ranks > sizes.kv_heads  # summed, so they are sent in the accumulation dtype
            row_before = (3 * heads + 2 * kv_heads) * number + 2 * heads * sizes.wide_bytes
            row_after = heads * number + 2 * kv_heads * (wide if replicated else number)
        else:
            row_before, row_after = (heads + 2 * kv_heads) * number, heads * (number + sizes.wide_bytes)
        first = rank - rank % self.head_ranks
        own = self.layout.rows_of(rank) * sizes.batch
        others = sum(self.layout.rows_of(peer) for peer in range(first, first + self.head_ranks)) * sizes.batch - own
        out = own * (self.head_ranks - 1)
        return Exchange(out * row_before, others * row_before), Exchange(others * row_after, out * row_after)

    def bytes_sent(self, rank: int, *, backward: bool = False) -> int:
        """Bytes that a rank sends in a forward pass or, with ``backward=True``, in a backward pass.

        Backward sends the same parcels again, and the gradient of each received parcel: to the next rank on its route,
        or back to its owner.
        """
        hops = self.rank(rank).hops
        forward = sum(message.parcel.rows for hop in hops for message in hop.sends) * self.sizes.parcel_row_bytes
        gradients = sum(m.parcel.rows for hop in hops for m in hop.gradients_out) * self.sizes.gradient_row_bytes
        exchanged = sum(exchange.sent for exchange in self.exchanges(rank, backward=backward))
        return exchanged + (forward + gradients if backward else forward)

    def bytes_received(self, rank: int, *, backward: bool = False) -> int:
        """Bytes that a rank receives in a forward pass or, with ``backward=True``, in a backward pass."""
        hops = self.rank(rank).hops
        forward = sum(message.parcel.rows for hop in hops for message in hop.receives) * self.sizes.parcel_row_bytes
        gradients = sum(m.parcel.rows for hop in hops for m in hop.gradients_in) * self.sizes.gradient_row_bytes
        exchanged = sum(exchange.received for exchange in self.exchanges(rank, backward=backward))
        return exchanged + (forward + gradients if backward else forward)

    def batches(self, rank: int, *, backward: bool = False) -> tuple[MessageBatch, ...]:
        """The messages of a pass, as a rank posts them: one batch for each hop and each exchange of head ranks.

        Backward as if q, k and v all need gradients. Sinks for each row are not counted.
        """
        sizes, count, part = self.sizes, self.head_ranks, rank % self.head_ranks
        ranks = range(part, self.layout.ring_size, count)
        own = self.rank(rank)
        hops = hop_batches(own, ranks, sizes.parcel_row_bytes, sizes.gradient_row_bytes, backward=backward)
        if not isinstance(self.layout, HeadLayout):
            return tuple(hops)
        number, wide = (sizes.batch * x for x in (sizes.head_dim * sizes.number_bytes, sizes.wide_bytes))
        q, k, v = ("q", sizes.heads, number), ("k", sizes.kv_heads, number), ("v", sizes.kv_heads, number)
        out, lse = ("out", sizes.heads, number), ("lse", sizes.heads, wide)
        before, after = [q, k, v], [out, lse]
        if backward:
            before = [("grad of out", *out[1:]), ("grad of lse", *lse[1:]), q, k, v, out, lse]
            summed = number if count <= sizes.kv_heads else sizes.head_dim * wide  # replicated heads are summed
            after = [q, ("k", sizes.kv_heads, summed), ("v", sizes.kv_heads, summed)]
        exchanged = [exchange_batch(self.layout, rank, before, to_heads=True)]
        returned = [exchange_batch(self.layout, rank, [each], to_heads=False) for each in after]
        return (*exchanged, *hops, *returned)

    def check(self) -> Proof:
        """Prove that the ring cannot hang: in a forward and a backward pass, the messages of all ranks pair up.

        Sends and receives between two ranks match in order and size, and no rank waits in a cycle, even where a batch
        completes only as a whole, as in NCCL. Raises PlanError otherwise. Plans every rank.

        >>> import ringspan as rs
        >>> rs.plan(rs.Full(), 4096, ring_size=4, layout="contiguous").check().messages
        36
        """
        size = self.layout.ring_size
        return pair_up([[*self.batches(rank), *self.batches(rank, backward=True)] for rank in range(size)])

    def work(self, rank: int) -> int:
        """The number of (query, key) pairs that a rank computes, over all query heads of one batch element."""
        return self.rank(rank).pairs * self.queries_per_kv_head

    def work_seen(self, rank: int) -> int:
        """`work` as the pattern defines it: a pair that several branches see counts once for each of them."""
        return self.rank(rank).pairs_seen * self.queries_per_kv_head

    @cached_property
    def share_computed(self) -> float:
        """The pairs that are computed over those that the branches see; below 1 where branches share pairs."""
        seen = sum(self.work_seen(rank) for rank in self.sample)
        return sum(self.work(rank) for rank in self.sample) / seen if seen else 1.0

    @cached_property
    def imbalance(self) -> float:
        """The largest work of a rank over the mean; 1 is perfect. Uses an even sample of ranks in a very large ring."""
        work = [self.work(rank) for rank in self.sample]
        mean = sum(work) / len(work)
        return max(work) / mean if mean else 1.0

    @cached_property
    def reach(self) -> Reach:
        """The longest distance between a query and its keys, and which segments cross ranks."""
        shards = shards_of(self.layout)
        reach = find_reach(self.pattern, self.documents, shards, self.sizes.kv_heads, self.causal)
        return replace(reach, head_ranks=self.head_ranks)

    @cached_property
    def sample(self) -> Sequence[int]:
        """The ranks whose cost is computed: all of them, or an even sample that includes both ends."""
        size = self.layout.ring_size
        if size <= _MOST_RANKS_SAMPLED:
            return range(size)
        return sorted({round(i * (size - 1) / (_MOST_RANKS_SAMPLED - 1)) for i in range(_MOST_RANKS_SAMPLED)})

    def memory(self, rank: int, *, backward: bool = False) -> RankMemory:
        """Bytes on a rank, without the workspace: its rows of every tensor, and the peak of its parcels."""
        sizes, rows = self.sizes, self.layout.rows_of(rank)
        query_rows, key_rows = rows * sizes.heads * sizes.batch, rows * sizes.kv_heads * sizes.batch
        accumulated = 0 if sizes.number_bytes == sizes.wide_bytes else sizes.head_dim * sizes.wide_bytes
        inputs = (query_rows + 2 * key_rows) * sizes.head_dim * sizes.number_bytes
        outputs = query_rows * (sizes.head_dim * sizes.number_bytes + sizes.wide_bytes)
        total = inputs + outputs + (0 if backward else query_rows * accumulated)
        if backward:
            total += query_rows * sizes.head_dim * sizes.number_bytes  # the gradient of the output
            total += inputs + (query_rows + 2 * key_rows) * accumulated  # gradients and their accumulators
        exchanged = 0
        if self.head_ranks > 1:  # what arrives, its own part of it, and the messages to send
            before, _ = self.exchanges(rank, backward=backward)
            exchanged = before.sent + before.sent // (self.head_ranks - 1) + before.received
        return RankMemory(total, self._peak_parcels(rank, backward), exchanged)

    def _peak_parcels(self, rank: int, backward: bool) -> int:
        """Parcels in use, in transfer, or kept to be forwarded at a later hop; in backward also their gradients.

        Buffers of parcels are freed hop by hop. Those of gradients are kept for reuse, so their peak so far counts.
        """
        own = self.rank(rank)
        parcels, held, last = [], dict[Parcel, int](), own.last_hops()
        for number in range(len(own.hops)):
            coming = own.hop(number + 1)
            held |= {m.parcel: m.parcel.rows for m in own.hop(number).receives}
            held = {parcel: rows for parcel, rows in held.items() if last[parcel] > number}
            packed = sum(m.parcel.rows for m in coming.sends if m.parcel.owner == own.rank)
            parcels.append(sum(held.values()) + _rows(coming.receives) + packed)
        gradients = accumulate(self._gradient_rows(rank) if backward else [0] * len(parcels), max)
        sizes = self.sizes
        return max(
            rows * sizes.parcel_row_bytes + gradient_rows * sizes.gradient_row_bytes
            for rows, gradient_rows in zip(parcels, gradients, strict=True)
        )

    def _gradient_rows(self, rank: int) -> list[int]:
        """For each hop, the peak of gradient rows held: in transfer, being accumulated, and waiting for their hop."""
        held, in_transfer, waiting = [], 0, dict[Parcel, int]()
        plan, before = self.rank(rank), Hop()
        for hop in plan.hops:
            own = _rows(hop.receives)
            # While this hop is computed, the gradients of the previous hop are in transfer. Then its own are sent.
            computing = own + in_transfer + sum(waiting.values())
            waiting |= {m.parcel: m.parcel.rows for m in before.gradients_in if m.parcel.owner != plan.rank}
            for message in hop.receives:
                waiting.pop(message.parcel, None)
            in_transfer, before = own + _rows(hop.gradients_in), hop
            held.append(max(computing, in_transfer + sum(waiting.values())))
        return held

    def __str__(self) -> str:
        """A table of rows, tiles, hops, parcels, bytes, work and memory of each rank."""
        head = ("rank", "rows", "tiles", "hops", "parcels in", "sent fwd", "sent bwd", "work", "parcels peak")
        size = self.layout.ring_size
        shown = range(size) if size <= _MOST_TABLE_ROWS else (*range(_MOST_TABLE_ROWS // 2), size - 1)
        work = {rank: self.work(rank) for rank in {*self.sample, *shown}}
        mean = sum(work[rank] for rank in self.sample) / len(self.sample) or 1
        lines = [head]
        for rank in shown:
            plan = self.rank(rank)
            lines.append(
                (
                    str(rank),
                    f"{self.layout.rows_of(rank):,}",
                    str(len(plan.tiles)),
                    str(len(plan.hops) - 1),
                    str(sum(len(hop.receives) for hop in plan.hops)),
                    mebibytes(self.bytes_sent(rank)),
                    mebibytes(self.bytes_sent(rank, backward=True)),
                    f"{work[rank] / mean:.3f}",
                    mebibytes(self.memory(rank).parcels),
                )
            )
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        title = (
            f"{self.pattern.text}; n = {self.layout.rows:,} over {size} ranks, {self.layout.name}, {self.routing}"
            f"{f', {self.head_ranks} head ranks' if self.head_ranks > 1 else ''}"
            f"{', causal' if self.causal else ''}; imbalance {self.imbalance:.3f}"
        )
        if self.share_computed < 1:
            title += f"; computes {self.share_computed:.1%} of the pairs that its branches see, each once"
        return "\n".join([title, *table])


def _rows(messages: Sequence[Message]) -> int:
    return sum(message.parcel.rows for message in messages)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.2f} MiB"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that ranks together send in one pass, inside nodes and between nodes.

    ``parcels_across`` counts parcels sent between nodes, ``gradients_across`` their gradients, which follow the
    route of the parcel and return from its end to the owner.
    """

    inside: int
    parcels_across: int
    gradients_across: int

    @property
    def across(self) -> int:
        return self.parcels_across + self.gradients_across


def traffic(
    plan: RingPlan, ranks_per_node: int, *, backward: bool = False, ranks: Iterable[int] | None = None
) -> Traffic:
    """Bytes sent inside and between nodes in a forward pass or, with ``backward=True``, in a backward pass.

    By all ranks, or by the given ones.

    >>> from ringspan.geometry import Documents, Full
    >>> from ringspan.layout import Layout
    >>> from ringspan.planning import ByNode, TensorSizes
    >>> def across(routing):
    ...     layout = Layout("contiguous", 64, 8)
    ...     ring = RingPlan(Full(), Documents((64,)), layout, False, routing, TensorSizes(1, 1, 1, 8))
    ...     return traffic(ring, ranks_per_node=4).across
    >>> across("direct"), across("relay"), across(ByNode(4))
    (16384, 7168, 4096)
    """
    ring_routing(ByNode(ranks_per_node), plan.head_ranks)  # raises if head ranks are not in one node
    inside, parcels_across, gradients_across = 0, 0, 0
    for rank in range(plan.layout.ring_size) if ranks is None else ranks:
        here, part = node_of(rank, ranks_per_node), rank % plan.head_ranks
        inside += sum(exchange.sent for exchange in plan.exchanges(rank, backward=backward))
        for hop in plan.rank(rank).hops:
            moves = [(message.peer, message.parcel.rows * plan.sizes.parcel_row_bytes, False) for message in hop.sends]
            if backward:
                row_bytes = plan.sizes.gradient_row_bytes
                moves += [(m.peer, m.parcel.rows * row_bytes, True) for m in hop.gradients_out]
            for peer, size, is_gradient in moves:
                if node_of(peer * plan.head_ranks + part, ranks_per_node) == here:
                    inside += size
                elif is_gradient:
                    gradients_across += size
                else:
                    parcels_across += size
    return Traffic(inside, parcels_across, gradients_across)


def find_reach(pattern: Pattern, documents: Documents, layout: Layout, kv_heads: int, causal: bool = False) -> Reach:
    """The reach of a pattern on a ring. Exact for the layout; takes one step per border between ranks.

    >>> from ringspan.geometry import Dilated
    >>> print(find_reach(Dilated((4, 8), (1, 2)), Documents((32,)), Layout("contiguous", 32, 4), kv_heads=2))
    No branch crosses ranks, so nothing is sent; a token reaches at most 8 of 32 tokens.
    >>> print(find_reach(Dilated((4, 8), (1, 2)), Documents((32,)), Layout("zigzag", 32, 4), kv_heads=2))
    A token reaches at most 8 of 32 tokens; branches of 8 rows cross ranks.
    """
    tokens = max(documents.lengths, default=0)
    parts = list(layout.rank_spans(0, layout.rows))
    reaches = [min(_seen(branch, causal).reach, tokens) for branch in pattern.branches(tokens)]
    crossing = [w for i, w in enumerate(reaches) if _crosses(i, pattern, documents, layout, parts, kv_heads, causal)]
    return Reach(tokens, layout.ring_size, max(reaches), tuple(crossing))


def _seen(branch: Branch, causal: bool) -> Branch:
    return branch.up_to_own_row() if causal and isinstance(branch, WindowBranch) else branch


def _crosses(
    i: int, pattern: Pattern, documents: Documents, layout: Layout, parts: list[RankSpan], kv_heads: int, causal: bool
) -> bool:
    """Whether branch ``i`` sends rows between ranks.

    If two rows of one segment and head are on different ranks, so are two adjacent selected rows, with a border between
    them.
    """
    borders = [part.start for part in parts]
    spans = list(documents.spans())
    firsts = [start for start, _ in spans]
    for border in borders[1:]:
        start, stop = spans[bisect_right(firsts, border) - 1]
        branch = _seen(pattern.branches(stop - start, kv_heads)[i], causal)
        if isinstance(branch, WindowBranch):
            if branch.reach == 1:
                continue
            shared = shared_window(i, branch, kv_heads, (start, stop), layout)
            if any(shared.strips(number) for number in range(len(shared.spans))):
                return True
            continue
        for offset in set(branch.offsets):
            pair = _around(border, branch, offset, start, stop)
            if pair and len({parts[bisect_right(borders, row) - 1].rank for row in pair}) == 2:
                return True
    return False


def _around(border: int, branch: SegmentBranch, offset: int, start: int, stop: int) -> tuple[int, int] | None:
    """The last selected row before a border and the first one after it, or None if they are in different segments."""
    phase = (border - start + branch.shift) % branch.segment_length
    segment = border - phase
    after = border + (offset - phase) % branch.rate
    before = after - branch.rate
    inside = before >= max(segment, start) and after < min(segment + branch.segment_length, stop)
    return (before, after) if inside else None
