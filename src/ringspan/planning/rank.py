"""The plan of one rank: which tiles it computes, and which parcels it sends and receives, at each hop.

All ranks derive their plans from the same integers, so sends and receives match without communication. Planning one
rank takes time proportional to its own tiles and routes: it is fast for a billion tokens and for thousands of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ringspan.geometry import (
    Branch,
    Comb,
    Documents,
    Pattern,
    SegmentBranch,
    WindowBranch,
    band,
    group_heads,
    segment_runs,
)
from ringspan.layout import Layout, Span
from ringspan.planning.routes import Routing, Shared, SharedSegment, owner_sends, shared_window
from ringspan.planning.tiles import Message, Packing, Parcel, Tile, fuse_equal_segments, parcel_lanes


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
    draft = _Draft(layout, rank, kv_heads, causal, routing)
    for number in range(len(pattern.branches(documents.rows, kv_heads))):
        local: list[Tile] = []
        for start, stop in documents.spans():
            held = [span for span in draft.spans if max(start, span.start) < min(stop, span.stop)]
            if not held:
                continue
            branch = pattern.branches(stop - start, kv_heads)[number]
            if isinstance(branch, WindowBranch):
                branch = _window_or_segment(branch, stop - start, kv_heads, causal)
            if isinstance(branch, WindowBranch):
                local += draft.add_window(number, branch, (start, stop), held)
            else:
                local += draft.add_segments(number, branch, (start, stop), held)
        # Fresh tiles store their results, so they come before other tiles of the same rows.
        draft.hops[0].tiles += sorted(fuse_equal_segments(local), key=lambda tile: not tile.fresh)
    hops = tuple(draft.hops[number].hop() for number in range(max(draft.hops, default=0) + 1))
    return RankPlan(rank, layout.rows_of(rank), kv_heads, hops, tuple(draft.packings))


def _window_or_segment(window: WindowBranch, rows: int, kv_heads: int, causal: bool) -> Branch:
    """The window under causality, or one segment if it covers the document: that is one tile instead of a few."""
    window = window.up_to_own_row() if causal else window
    covers = window.rate == 1 and window.left >= rows - 1 and (causal or window.right >= rows - 1)
    return SegmentBranch(rows, 1, offsets=(0,) * kv_heads) if covers else window


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

    def add_segments(
        self, number: int, branch: SegmentBranch, document: tuple[int, int], held: list[Span]
    ) -> Iterator[Tile]:
        """Plan the segments of one document that cross ranks; yield the tiles of the others."""
        start, stop = document
        shared: dict[int, SharedSegment] = {}
        for span in held:
            first, last = max(start, span.start), min(stop, span.stop)
            for run in segment_runs(first - start, last - start, branch):
                begin = start + run.start - run.phase
                end = begin + run.segments * branch.segment_length
                if max(begin, start) >= first and min(end, stop) <= last:
                    lanes = run.lanes(branch, origin=span.start - span.local - start)
                    stride = branch.segment_length if run.segments > 1 else 0
                    for (comb,) in group_heads(lanes, segments=run.segments, stride=stride):
                        yield Tile(comb, comb, "causal" if self.causal else "full", fresh=number == 0)
                elif begin not in shared:
                    parts = tuple(self.layout.rank_spans(max(begin, start), min(end, stop)))
                    shared[begin] = SharedSegment(number, branch, begin, parts, self.causal)
        for segment in shared.values():
            self._add_messages(segment)
            for key_part in segment.own_parts(self.rank):
                self.hops[0].tiles += self._segment_tiles(segment, key_part)
            for key_part in segment.needed_parts(self.rank):
                hop = segment.distance(segment.owner(key_part), self.rank)
                self.hops[hop].tiles += self._segment_tiles(segment, key_part)

    def add_window(
        self, number: int, window: WindowBranch, document: tuple[int, int], held: list[Span]
    ) -> Iterator[Tile]:
        """Plan what a document's windows exchange with other ranks; yield the tiles of the rank's own rows."""
        start, stop = document
        mine = [(max(start, span.start), min(stop, span.stop)) for span in held]
        for queries in mine:
            for keys in mine:
                yield from self._window_tiles(window, document, queries, keys, fresh=number == 0 and keys == queries)
        if sum(last - first for first, last in mine) == stop - start:
            return
        shared = shared_window(number, window, self.kv_heads, document, self.layout)
        self._add_messages(shared)
        for part in shared.needed_parts(self.rank):
            hop = self.hops[shared.distance(shared.owner(part), self.rank)]
            for queries in mine:
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

    def _segment_tiles(self, segment: SharedSegment, key_part: int) -> Iterator[Tile]:
        """The rank's queries against the keys of a part, which are its own rows or a received parcel."""
        first_key = segment.parts[key_part].start
        if segment.owner(key_part) == self.rank:
            parcel, keys = None, segment.lanes(key_part, self.origin(first_key))
        else:
            parcel, keys = segment.parcel(key_part), parcel_lanes(segment.lanes(key_part))
        for i in segment.own_parts(self.rank):
            if segment.part_sees(i, key_part):
                queries = segment.lanes(i, self.origin(segment.parts[i].start))
                for query_comb, key_comb in group_heads(queries, keys):
                    yield Tile(query_comb, key_comb, "causal" if self.causal and i == key_part else "full", parcel)

    def _add_messages(self, shared: Shared) -> None:
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


def _forwards_gradient(routing: Routing, owner: int, rank: int, following: int | None) -> bool:
    """Whether a rank sends the gradient of a parcel to the next rank on the route instead of the owner."""
    return following is not None and not any(owner_sends(routing, owner, receiver) for receiver in (rank, following))
