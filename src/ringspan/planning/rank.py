"""The plan of one rank: which tiles it computes at which hop, and which parcels come and go.

All ranks derive their plans from the same integers, so what one sends another awaits. A rank's plan costs no more
than its own tiles and routes: it stays small for a billion tokens and for thousands of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ringspan.geometry import Documents, Pattern, group_heads, segment_runs
from ringspan.layout import Layout, Span
from ringspan.planning.parcels import Message, Packing, packing, parcel_lanes
from ringspan.planning.routes import Routing, SharedSegment, owner_sends
from ringspan.planning.tiles import Tile, fuse_equal_segments


@dataclass(frozen=True, slots=True)
class Hop:
    """One step around the ring: hop 0 is the rank's own rows, hop s the parcels that arrive at that step.

    In backward the gradient of a parcel travels as the parcel did, one step behind: each rank adds its share, and the
    last one on the route sends the sum home. ``gradients_out`` says to whom the gradients of this hop's parcels go,
    ``gradients_in`` what others send after their hop of this number: of own parcels, or of parcels that this rank is
    about to use.
    """

    tiles: tuple[Tile, ...] = ()
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    gradients_out: tuple[Message, ...] = ()
    gradients_in: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Everything that one rank does for its ``rows`` rows and ``kv_heads`` KV heads."""

    rank: int
    rows: int
    kv_heads: int
    hops: tuple[Hop, ...]
    packings: tuple[Packing, ...]

    def hop(self, number: int) -> Hop:
        """The hop of this number; an empty one past the last."""
        return self.hops[number] if number < len(self.hops) else Hop()

    @property
    def pairs(self) -> int:
        """The work: how many (query, key) pairs are computed, over all KV heads."""
        return sum(tile.pairs for hop in self.hops for tile in hop.tiles)

    @property
    def starts_everywhere(self) -> bool:
        """Whether every row of every head has a fresh tile, so that nothing need be there before."""
        return sum(tile.queries.size for tile in self.tiles if tile.fresh) == self.rows * self.kv_heads

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles, in the order in which they are computed."""
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
            for piece in segment_runs(first - start, last - start, branch):
                begin = start + piece.start - piece.phase
                end = begin + piece.segments * branch.segment_length
                if max(begin, start) >= first and min(end, stop) <= last:
                    lanes = piece.lanes(branch.rate, offsets, origin=span.start - span.local - start)
                    stride = branch.segment_length if piece.segments > 1 else 0
                    combs = group_heads(lanes, segments=piece.segments, stride=stride)
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
    """(first row, row after the last) of each document that lies in a span, at least in part, and that span."""
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
        # Both ends of a message must list it in the same order: sorted by parcel.
        lists = (self.sends, self.receives, self.gradients_out, self.gradients_in)
        messages = (tuple(sorted(some, key=lambda m: (m.parcel, m.peer))) for some in lists)
        return Hop(tuple(self.tiles), *messages)


def _plan_shared(
    segment: SharedSegment,
    rank: int,
    spans: tuple[Span, ...],
    routing: Routing,
    drafts: defaultdict[int, _HopDraft],
    packings: list[Packing],
) -> None:
    """What a shared segment means for one of its participants."""
    mine = segment.parts_of[rank]
    for key_part in mine:
        parcel = segment.parcel(key_part)
        receivers = list(segment.receivers(key_part))
        if receivers:
            packings.append(packing(parcel, segment.lanes(key_part, _origin(segment, key_part, spans))))
        for previous, receiver, following in zip((None, *receivers), receivers, (*receivers[1:], None), strict=False):
            hop = drafts[segment.distance(rank, receiver)]
            if previous is None or owner_sends(routing, rank, receiver):
                hop.sends.append(Message(parcel, receiver))
            if not _passes_gradient(routing, rank, receiver, following):
                hop.gradients_in.append(Message(parcel, receiver))
    for key_part, part in enumerate(segment.parts):
        met = [i for i in mine if segment.meet(i, key_part)]
        if not met:
            continue
        hop = drafts[segment.distance(part.rank, rank)]
        hop.tiles += _tiles(segment, met, key_part, spans)
        if part.rank == rank:
            continue
        parcel, owner = segment.parcel(key_part), part.rank
        previous = owner if owner_sends(routing, owner, rank) else segment.before(rank, key_part)
        following = None if routing == "direct" else segment.after(rank, key_part)
        hop.receives.append(Message(parcel, previous))
        if following is not None and not owner_sends(routing, owner, following):
            drafts[segment.distance(owner, following)].sends.append(Message(parcel, following))
        if previous != owner and _passes_gradient(routing, owner, previous, rank):
            drafts[segment.distance(owner, previous)].gradients_in.append(Message(parcel, previous))
        passed_to = following if _passes_gradient(routing, owner, rank, following) else None
        hop.gradients_out.append(Message(parcel, owner if passed_to is None else passed_to))


def _passes_gradient(routing: Routing, owner: int, rank: int, following: int | None) -> bool:
    """Whether a rank hands its gradient of a parcel to the next one on the route, instead of sending it home."""
    return following is not None and not any(owner_sends(routing, owner, receiver) for receiver in (rank, following))


def _tiles(segment: SharedSegment, query_parts: list[int], key_part: int, spans: tuple[Span, ...]) -> Iterator[Tile]:
    """Own queries against the keys of a part: own rows, or a parcel."""
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
    """What to take off a row of the sequence to get the row of the rank, in the span that holds this part."""
    start = segment.parts[part].start
    (span,) = (span for span in spans if span.start <= start < span.stop)
    return span.start - span.local
