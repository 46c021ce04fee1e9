"""The plan of one rank: which tiles it computes, and which parcels it sends and receives, at each hop.

All ranks derive their plans from the same integers, so sends and receives match without communication. Planning one
rank takes time proportional to its own tiles and routes: it is fast for a billion tokens and for thousands of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ringspan.geometry import Documents, Pattern, group_heads, segment_runs
from ringspan.layout import Layout, Span
from ringspan.planning.parcels import Message, Packing, Parcel, make_packing, parcel_lanes
from ringspan.planning.routes import Routing, SharedSegment, owner_sends
from ringspan.planning.tiles import Tile, fuse_equal_segments


@dataclass(frozen=True, slots=True)
class Hop:
    """One step around the ring: hop 0 computes the rank's own rows, hop s the parcels that arrive at step s.

    In backward, the gradient of a parcel follows the parcel's route one hop later: each rank adds its share, and the
    last rank on the route sends the sum back to the owner. ``gradients_out`` are sent after this hop, one for each
    received parcel. ``gradients_in`` arrive after this hop: gradients of the rank's own parcels, or partial sums for
    parcels that this rank uses next.
    """

    tiles: tuple[Tile, ...] = ()
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    gradients_out: tuple[Message, ...] = ()
    gradients_in: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Everything that one rank computes and sends for its ``rows`` rows and ``kv_heads`` KV heads."""

    rank: int
    rows: int
    kv_heads: int
    hops: tuple[Hop, ...]
    packings: tuple[Packing, ...]

    def hop(self, number: int) -> Hop:
        """The hop with this number; an empty hop past the last."""
        return self.hops[number] if number < len(self.hops) else Hop()

    def last_hops(self) -> dict[Parcel, int]:
        """For each received parcel, the hop at whose start it has been used, and forwarded if necessary."""
        last: dict[Parcel, int] = {}
        for number, hop in enumerate(self.hops):
            for message in hop.sends:
                if message.parcel in last:
                    last[message.parcel] = max(last[message.parcel], number)
            last |= {message.parcel: number + 1 for message in hop.receives}
        return last

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs computed, over all KV heads."""
        return sum(tile.pairs for hop in self.hops for tile in hop.tiles)

    @property
    def fresh_everywhere(self) -> bool:
        """Whether every row of every head has a fresh tile, so that accumulators need no initialisation."""
        return sum(tile.queries.size for tile in self.tiles if tile.fresh) == self.rows * self.kv_heads

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles, in the order of computation."""
        return tuple(tile for hop in self.hops for tile in hop.tiles)


@lru_cache(maxsize=256)
def plan_rank(
    pattern: Pattern,
    documents: Documents,
    layout: Layout,
    rank: int,
    kv_heads: int,
    causal: bool,
    routing: Routing = "relay",
) -> RankPlan:
    """The plan of one rank. A ring of one rank has one hop and no parcels.

    >>> from ringspan.geometry import Dilated
    >>> one = Layout("contiguous", 2**30, ring_size=1)
    >>> len(plan_rank(Dilated((2048, 8192), (1, 4)), Documents((2**30,)), one, 0, kv_heads=4, causal=True).tiles)
    2
    """
    drafts: defaultdict[int, _HopDraft] = defaultdict(_HopDraft)
    packings: list[Packing] = []
    spans = layout.spans(rank)
    for i in range(len(pattern.branches(documents.rows))):
        local: list[Tile] = []
        shared: dict[tuple[int, int], SharedSegment] = {}
        for start, stop, span in _held_documents(documents, spans):
            branch = pattern.branches(stop - start)[i]
            offsets = pattern.offsets(branch.rate, kv_heads)
            first, last = max(start, span.start), min(stop, span.stop)
            for run in segment_runs(first - start, last - start, branch):
                begin = start + run.start - run.phase
                end = begin + run.segments * branch.segment_length
                if max(begin, start) >= first and min(end, stop) <= last:
                    lanes = run.lanes(branch.rate, offsets, origin=span.start - span.local - start)
                    stride = branch.segment_length if run.segments > 1 else 0
                    combs = group_heads(lanes, segments=run.segments, stride=stride)
                    local += (Tile(comb, comb, causal, fresh=i == 0) for (comb,) in combs)
                elif (start, begin) not in shared:
                    parts = tuple(layout.rank_spans(max(begin, start), min(end, stop)))
                    shared[start, begin] = SharedSegment(i, branch.rate, offsets, begin, parts, causal)
        drafts[0].tiles += fuse_equal_segments(local)
        for segment in shared.values():
            _plan_shared(segment, rank, spans, routing, drafts, packings)
    hops = tuple(drafts[number].hop() for number in range(max(drafts, default=0) + 1))
    return RankPlan(rank, layout.rows_of(rank), kv_heads, hops, tuple(packings))


def _held_documents(documents: Documents, spans: tuple[Span, ...]) -> Iterator[tuple[int, int, Span]]:
    """(start, stop, span) for each document and each span that holds rows of it."""
    for start, stop in documents.spans():
        for span in spans:
            if max(start, span.start) < min(stop, span.stop):
                yield start, stop, span


@dataclass
class _HopDraft:
    tiles: list[Tile] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    gradients_out: list[Message] = field(default_factory=list)
    gradients_in: list[Message] = field(default_factory=list)

    def hop(self) -> Hop:
        # Sender and receiver must list their messages in the same order: sorted by parcel.
        lists = (self.sends, self.receives, self.gradients_out, self.gradients_in)
        messages = (tuple(sorted(each, key=lambda m: (m.parcel, m.peer))) for each in lists)
        return Hop(tuple(self.tiles), *messages)


def _plan_shared(
    segment: SharedSegment,
    rank: int,
    spans: tuple[Span, ...],
    routing: Routing,
    drafts: defaultdict[int, _HopDraft],
    packings: list[Packing],
) -> None:
    """Add one participant's tiles and messages of a shared segment to the drafts of its hops."""
    mine = segment.parts_of[rank]
    for key_part in mine:
        parcel = segment.parcel(key_part)
        receivers = list(segment.receivers(key_part))
        if receivers:
            packings.append(make_packing(parcel, segment.lanes(key_part, _origin(segment, key_part, spans))))
        for previous, receiver, following in zip((None, *receivers), receivers, (*receivers[1:], None), strict=False):
            hop = drafts[segment.distance(rank, receiver)]
            if previous is None or owner_sends(routing, rank, receiver):
                hop.sends.append(Message(parcel, receiver))
            if not _forwards_gradient(routing, rank, receiver, following):
                hop.gradients_in.append(Message(parcel, receiver))
    for key_part, part in enumerate(segment.parts):
        query_parts = [i for i in mine if segment.part_sees(i, key_part)]
        if not query_parts:
            continue
        hop = drafts[segment.distance(part.rank, rank)]
        hop.tiles += _tiles(segment, query_parts, key_part, spans)
        if part.rank == rank:
            continue
        parcel, owner = segment.parcel(key_part), part.rank
        previous = owner if owner_sends(routing, owner, rank) else segment.previous_holder(rank, key_part)
        following = None if routing == "direct" else segment.next_receiver(rank, key_part)
        hop.receives.append(Message(parcel, previous))
        if following is not None and not owner_sends(routing, owner, following):
            drafts[segment.distance(owner, following)].sends.append(Message(parcel, following))
        if previous != owner and _forwards_gradient(routing, owner, previous, rank):
            drafts[segment.distance(owner, previous)].gradients_in.append(Message(parcel, previous))
        next_rank = following if _forwards_gradient(routing, owner, rank, following) else None
        hop.gradients_out.append(Message(parcel, owner if next_rank is None else next_rank))


def _forwards_gradient(routing: Routing, owner: int, rank: int, following: int | None) -> bool:
    """Whether a rank sends the gradient of a parcel to the next rank on the route instead of the owner."""
    return following is not None and not any(owner_sends(routing, owner, receiver) for receiver in (rank, following))


def _tiles(segment: SharedSegment, query_parts: list[int], key_part: int, spans: tuple[Span, ...]) -> Iterator[Tile]:
    """The rank's queries against the keys of a part, which are its own rows or a received parcel."""
    own = any(span.start <= segment.parts[key_part].start < span.stop for span in spans)
    if own:
        parcel, keys = None, segment.lanes(key_part, _origin(segment, key_part, spans))
    else:
        parcel, keys = segment.parcel(key_part), parcel_lanes(segment.lanes(key_part))
    for i in query_parts:
        queries = segment.lanes(i, _origin(segment, i, spans))
        for query_comb, key_comb in group_heads(queries, keys):
            yield Tile(query_comb, key_comb, segment.causal and i == key_part, parcel)


def _origin(segment: SharedSegment, part: int, spans: tuple[Span, ...]) -> int:
    """The offset from a sequence row to the rank's local row, in the span that holds this part."""
    start = segment.parts[part].start
    (span,) = (span for span in spans if span.start <= start < span.stop)
    return span.start - span.local
