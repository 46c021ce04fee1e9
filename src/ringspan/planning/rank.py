"""The plan of one rank: which tiles it computes, and which parcels it sends and receives, at each hop.

All ranks derive their plans from the same integers, so sends and receives match without communication. Planning one
rank takes time proportional to its own tiles and routes: it is fast for a billion tokens and for thousands of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ringspan.geometry import Comb, Documents, Lane, Pattern, WindowBranch, band, group_heads
from ringspan.layout import Layout, Span
from ringspan.planning.chain import Chain, Product, Region, Rows, triangle
from ringspan.planning.nesting import CPU_COSTS, TileCosts, group_branches
from ringspan.planning.routes import P, Routing, Shared, owner_sends
from ringspan.planning.shared_segments import SharedSegment, Strand, shared_segment
from ringspan.planning.shared_windows import shared_window
from ringspan.planning.tiles import Message, Packing, Parcel, Tile, fuse_equal_segments


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
    def pairs_seen(self) -> int:
        """The number of pairs as the pattern defines them: a pair that is seen in two branches counts twice."""
        return sum(tile.pairs * tile.multiplicity for hop in self.hops for tile in hop.tiles)

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
    costs: TileCosts | None = CPU_COSTS,
) -> RankPlan:
    """The plan of one rank. A ring of one rank has one hop and no parcels.

    With ``costs``, pairs that several branches see are computed once where that is cheaper.

    >>> from ringspan.geometry import Dilated
    >>> one = Layout("contiguous", 2**30, ring_size=1)
    >>> pattern, documents = Dilated((2048, 8192), (1, 4)), Documents((2**30,))
    >>> len(plan_rank(pattern, documents, one, 0, kv_heads=4, causal=True, costs=None).tiles)
    2
    """
    draft = _Draft(layout, rank, kv_heads, causal, routing)
    rows_per_rank = -(-layout.rows // layout.ring_size)
    local: list[Tile] = []
    for (start, stop), held in _documents_of(documents, draft.spans):
        for group in group_branches(pattern, stop - start, kv_heads, rows_per_rank, causal, costs):
            if isinstance(group, Chain):
                local += draft.add_chain(group, (start, stop), held)
            else:
                local += draft.add_window(*group, (start, stop), held)
    # Fresh tiles store their results, so they come before other tiles of the same rows.
    draft.hops[0].tiles = sorted(fuse_equal_segments(local), key=lambda tile: not tile.fresh)
    hops = tuple(draft.hops[number].hop() for number in range(max(draft.hops, default=0) + 1))
    return RankPlan(rank, layout.rows_of(rank), kv_heads, hops, tuple(draft.packings))


def _documents_of(documents: Documents, spans: tuple[Span, ...]) -> Iterator[tuple[Rows, list[Rows]]]:
    """The documents that a rank holds rows of, each with its ranges of these rows. Spans are in order."""
    first = 0
    for start, stop in documents.spans():
        while first < len(spans) and spans[first].stop <= start:
            first += 1
        held, i = [], first
        while i < len(spans) and spans[i].start < stop:
            held.append((max(start, spans[i].start), min(stop, spans[i].stop)))
            i += 1
        if start < stop and held:
            yield (start, stop), held


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


class _Draft:
    """The plan of one rank while it is made: tiles, messages and packings."""

    def __init__(self, layout: Layout, rank: int, kv_heads: int, causal: bool, routing: Routing) -> None:
        self.layout, self.rank, self.kv_heads, self.causal, self.routing = layout, rank, kv_heads, causal, routing
        self.spans = layout.spans(rank)
        self.hops: defaultdict[int, _HopDraft] = defaultdict(_HopDraft)
        self.packings: list[Packing] = []

    def origin(self, row: int) -> int:
        """The row of the sequence that would be local row 0, in the span that holds ``row``."""
        return next(span.start - span.local for span in self.spans if span.start <= row < span.stop)

    def add_chain(self, chain: Chain, document: Rows, held: list[Rows]) -> Iterator[Tile]:
        """Plan the segments of one document that cross ranks; yield the tiles of the rank's own rows."""
        start, stop = document
        mine = [(first - start, last - start) for first, last in held]
        for queries in mine:
            origin = self.origin(start + queries[0]) - start
            for region in chain.own_regions(*queries, self.causal):
                yield from self._own_tiles(chain, region, origin, origin)
            for keys in mine:
                if keys < queries or (keys > queries and not self.causal):
                    for region in chain.cross_regions(queries, keys):
                        yield from self._own_tiles(chain, region, origin, self.origin(start + keys[0]) - start)
        if sum(last - first for first, last in mine) == stop - start:
            return
        planned: set[int] = set()
        for first, last in mine:
            for row in (first, last - 1):
                segment, end = chain.block(chain.top, row)
                inside = first <= max(segment, 0) and min(end, stop - start) <= last
                if segment not in planned and not inside:
                    self._add_shared(shared_segment(chain, document, row, self.layout, self.causal))
                planned.add(segment)

    def _add_shared(self, shared: SharedSegment) -> None:
        """Plan what the ranks of a segment exchange, and the tiles of what this rank receives."""
        self._add_messages(shared)
        for strand in shared.needed_parts(self.rank):
            hop = self.hops[shared.distance(shared.owner(strand), self.rank)]
            alone = len(shared.strands(self.rank, strand.part)) == 1
            for i in shared.parts_of[self.rank]:
                sees = not self.causal or i > strand.part
                if sees and (alone or (i > strand.part) == strand.after):
                    hop.tiles += self._received_tiles(shared, strand, i)

    def _own_tiles(self, chain: Chain, region: Region, query_origin: int, key_origin: int) -> Iterator[Tile]:
        """Tiles of the rank's own rows. ``fresh`` tiles have the branch that comes first in the pattern."""
        for product in chain.products(region, self.causal):
            queries = _moved(chain.lanes(product.queries, *region.queries), query_origin)
            keys = _moved(chain.lanes(product.keys, *region.keys), key_origin)
            yield from _tiles(product, queries, keys, region, fresh=product.fresh and 0 in chain.numbers)

    def _received_tiles(self, shared: SharedSegment, strand: Strand, query_part: int) -> Iterator[Tile]:
        """The rank's queries in a part against the keys of a received parcel."""
        chain, parcel = shared.chain, shared.parcel(strand)
        origin = self.origin(shared.document + shared.parts[query_part].start) - shared.document
        for region in chain.cross_regions(shared.rows(query_part), shared.rows(strand.part)):
            if region.within < strand.level:
                continue  # no rows: otherwise the strand would be of this level
            for product in chain.products(region, self.causal):
                queries = _moved(chain.lanes(product.queries, *region.queries), origin)
                for keys in shared.key_lanes(strand, product.keys, region.keys):
                    yield from _tiles(product, queries, keys, region, parcel)

    def add_window(self, number: int, window: WindowBranch, document: Rows, held: list[Rows]) -> Iterator[Tile]:
        """Plan what a document's windows exchange with other ranks; yield the tiles of the rank's own rows."""
        start, stop = document
        for queries in held:
            for keys in held:
                yield from self._window_tiles(window, document, queries, keys, fresh=number == 0 and keys == queries)
        if sum(last - first for first, last in held) == stop - start:
            return
        shared = shared_window(number, window, self.kv_heads, document, self.layout)
        self._add_messages(shared)
        for part in shared.needed_parts(self.rank):
            hop = self.hops[shared.distance(shared.owner(part), self.rank)]
            for queries in held:
                keys, parcel = shared.rows(part), shared.parcel(part)
                hop.tiles += self._window_tiles(window, document, queries, keys, parcel=parcel)

    def _window_tiles(
        self,
        window: WindowBranch,
        document: tuple[int, int],
        queries: tuple[int, int],
        keys: tuple[int, int],
        *,
        parcel: Parcel | None = None,
        fresh: bool = False,
    ) -> Iterator[Tile]:
        """Query rows against key rows of the sequence, which are the rank's own or those of a parcel."""
        start = document[0]
        to_local = self.origin(queries[0]) - start
        to_keys, head_step = (
            (self.origin(keys[0]) - start, 0) if parcel is None else (keys[0] - start, keys[1] - keys[0])
        )
        in_document = [(first - start, last - start) for first, last in (queries, keys)]
        for part in band(in_document[0], in_document[1], window):
            repeat = dict(segments=part.segments, stride=part.stride, step=part.step)
            query_comb = Comb(0, self.kv_heads, 0, part.query - to_local, rows=part.query_rows, **repeat)
            key_comb = Comb(0, self.kv_heads, head_step, part.key - to_keys, rows=part.key_rows, **repeat)
            yield Tile(query_comb, key_comb, part.mask, parcel, fresh and part.first)

    def _add_messages(self, shared: Shared[P]) -> None:
        """Add what this rank sends and receives of the shared rows to its hops."""
        rank, routing = self.rank, self.routing
        for part in shared.own_parts(rank):
            parcel, receivers = shared.parcel(part), list(shared.receivers(part))
            if receivers:
                self.packings.append(shared.packing(part, self.origin(parcel.start)))
            route = zip((None, *receivers), receivers, (*receivers[1:], None), strict=False)
            for before, receiver, following in route:
                hop = self.hops[shared.distance(rank, receiver)]
                if before is None or owner_sends(routing, rank, receiver):
                    hop.sends.append(Message(parcel, receiver))
                if not _forwards_gradient(routing, rank, receiver, following):
                    hop.gradients_in.append(Message(parcel, receiver))
        for part in shared.needed_parts(rank):
            parcel, owner = shared.parcel(part), shared.owner(part)
            hop = self.hops[shared.distance(owner, rank)]
            previous = owner if owner_sends(routing, owner, rank) else shared.previous_holder(rank, part)
            following = None if routing == "direct" else shared.next_receiver(rank, part)
            hop.receives.append(Message(parcel, previous))
            if following is not None and not owner_sends(routing, owner, following):
                self.hops[shared.distance(owner, following)].sends.append(Message(parcel, following))
            if previous != owner and _forwards_gradient(routing, owner, previous, rank):
                self.hops[shared.distance(owner, previous)].gradients_in.append(Message(parcel, previous))
            next_rank = following if _forwards_gradient(routing, owner, rank, following) else None
            hop.gradients_out.append(Message(parcel, owner if next_rank is None else next_rank))


def _moved(lanes: list[Lane], origin: int) -> list[Lane]:
    return [Lane(lane.start - origin, lane.rows, lane.step) for lane in lanes]


def _tiles(
    product: Product,
    queries: list[Lane],
    keys: list[Lane],
    region: Region,
    parcel: Parcel | None = None,
    *,
    fresh: bool = False,
) -> Iterator[Tile]:
    if product.mask != "full":
        queries, keys = triangle(queries, keys)
    for query_comb, key_comb in group_heads(queries, keys, segments=region.segments, stride=region.stride):
        yield Tile(query_comb, key_comb, product.mask, parcel, fresh, product.multiplicity)


def _forwards_gradient(routing: Routing, owner: int, rank: int, following: int | None) -> bool:
    """Whether a rank sends the gradient of a parcel to the next rank on the route instead of the owner."""
    return following is not None and not any(owner_sends(routing, owner, receiver) for receiver in (rank, following))
