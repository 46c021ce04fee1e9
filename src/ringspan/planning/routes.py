"""Routes: which ranks exchange parcels because a border between them cuts a segment or a window, and who sends them.

The *parts* of a shared segment are its rows on each rank; the ranks that own them are its *participants*. The rows of a
part form a parcel, which is sent only to participants with a query that sees it. A participant receives it at the hop
that is its cyclic distance from the owner among the participants, so each rank receives about one shard per hop.

Windows share rows near the borders of a document's spans, the *halo*. The parts of a shared window are strips of the
halo, each cut so that every rank needs all of it or nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, Protocol, TypeVar

from ringspan.geometry import Documents, Lane, Pattern, WindowBranch, as_int, band
from ringspan.layout import Layout, RankSpan
from ringspan.planning.chain import Chain, RowClass, Rows
from ringspan.planning.nesting import TileCosts, group_branches
from ringspan.planning.tiles import Packing, Parcel, make_packing, parcel_lanes

P = TypeVar("P", bound=Hashable)
_MOST_SPANS_COMPARED = 64  # windows that reach farther use plain distances as hops


@dataclass(frozen=True, slots=True)
class ByNode:
    """Relay routing in which a parcel enters each node only once: inside its own node, the owner sends it directly.

    Ranks ``0 .. ranks_per_node - 1`` are on the first node, and so on. A route visits the ranks of every other node
    consecutively, so they relay the parcel to one another. Only the return into the owner's own node is avoided.
    """

    ranks_per_node: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks_per_node", as_int("ranks_per_node", self.ranks_per_node))
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={self.ranks_per_node}: a node has at least 1 rank")

    def __str__(self) -> str:
        return f"relay by nodes of {self.ranks_per_node}"


Routing = Literal["relay", "direct"] | ByNode


def check_routing(routing: object) -> None:
    """Raise unless ``routing`` is valid."""
    if routing not in ("relay", "direct") and not isinstance(routing, ByNode):
        raise ValueError(f"routing={routing!r}: must be 'relay', 'direct' or ByNode(ranks_per_node)")


def node_of(rank: int, ranks_per_node: int) -> int:
    """The node of a rank."""
    return rank // ranks_per_node


def owner_sends(routing: Routing, owner: int, receiver: int) -> bool:
    """Whether a receiver gets the parcel from its owner, wherever it is on the route."""
    if isinstance(routing, ByNode):
        return node_of(owner, routing.ranks_per_node) == node_of(receiver, routing.ranks_per_node)
    return routing == "direct"


class Shared(Protocol[P]):
    """Rows that several ranks exchange, in parts: each is a parcel with its own route."""

    def own_parts(self, rank: int) -> Iterable[P]:
        """The parts that a rank owns and others need."""

    def needed_parts(self, rank: int) -> Iterable[P]:
        """The parts of other ranks that a rank needs."""

    def owner(self, part: P) -> int:
        """The rank that owns a part."""

    def parcel(self, part: P) -> Parcel:
        """The parcel that holds the rows of a part."""

    def packing(self, part: P, origin: int = 0) -> Packing:
        """How the owner packs a part; ``origin`` is the row of the sequence at its local row 0."""

    def distance(self, owner: int, rank: int) -> int:
        """The hop at which a rank receives the parts of an owner."""

    def receivers(self, part: P) -> Iterable[int]:
        """The ranks that need a part, in order of distance."""

    def previous_holder(self, rank: int, part: P) -> int:
        """The rank that holds the parcel before ``rank``: the previous receiver on the route, or the owner."""

    def next_receiver(self, rank: int, part: P) -> int | None:
        """The rank that receives the parcel after ``rank``, or None at the end of the route."""


class Strand(NamedTuple):
    """Rows of one part for some receivers: those after it, or before it, that share a segment of ``level`` with it.

    They need the rows that this level selects in the shared segment and, farther from them, those of coarser levels.
    """

    part: int
    level: int
    after: bool


@dataclass(frozen=True)
class SharedSegment:
    """A segment of the coarsest level of a chain, cut by borders between ranks.

    ``document`` is the row of the sequence at which the document begins; all other rows are positions in the document.
    """

    chain: Chain
    document: int
    parts: tuple[RankSpan, ...]
    causal: bool

    @cached_property
    def participants(self) -> tuple[int, ...]:
        """The ranks that hold rows of the segment, in the order of the ring."""
        return tuple(sorted({part.rank for part in self.parts}))

    @cached_property
    def _place(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.participants)}

    @cached_property
    def parts_of(self) -> dict[int, list[int]]:
        """The indices of the parts that each participant holds."""
        held: dict[int, list[int]] = {}
        for i, part in enumerate(self.parts):
            held.setdefault(part.rank, []).append(i)
        return held

    def rows(self, part: int) -> Rows:
        """The rows of a part."""
        return self.parts[part].start, self.parts[part].stop

    def distance(self, owner: int, rank: int) -> int:
        """The number of steps from ``owner`` to ``rank`` along the ring of participants."""
        return (self._place[rank] - self._place[owner]) % len(self.participants)

    def owner(self, part: Strand) -> int:
        return self.parts[part.part].rank

    def nearest(self, query_part: int, key_part: int) -> int | None:
        """The finest level in which a query of one part sees a key of the other; None if there is none."""
        if self.causal and key_part > query_part:
            return None
        queries, keys = self.rows(query_part), self.rows(key_part)
        for level, box in enumerate(self.chain.boxes(queries, keys)):
            if box is not None and self._sees(level, *box):
                return level
        return None

    def _sees(self, level: int, queries: Rows, keys: Rows) -> bool:
        """Whether a KV head selects rows of both."""
        if min(queries[1] - queries[0], keys[1] - keys[0]) >= self.chain.levels[level].rate:
            return True
        return bool(self._heads_in(level, queries) & self._heads_in(level, keys))

    def _heads_in(self, level: int, rows: Rows) -> int:
        """The KV heads that select any of these rows, as a bit mask."""
        if (level, rows) not in self._found_heads:
            lanes = self.chain.lanes(RowClass(level), *rows)
            self._found_heads[level, rows] = sum(1 << head for head, lane in enumerate(lanes) if lane.rows)
        return self._found_heads[level, rows]

    @cached_property
    def _found_heads(self) -> dict[tuple[int, Rows], int]:
        return {}

    def strands(self, rank: int, key_part: int) -> tuple[Strand, ...]:
        """What a rank needs of another's part: one strand, or two if it has queries close to it on both sides."""
        levels: dict[bool, int] = {}
        for i in self.parts_of[rank]:
            if (level := self.nearest(i, key_part)) is not None:
                levels[i > key_part] = min(level, levels.get(i > key_part, level))
        first, stop = self.rows(key_part)
        found: list[Strand] = []
        for after, level in sorted(levels.items(), key=lambda side: side[1]):
            # If one segment holds the whole part, both sides need the same rows, and a finer strand has them too.
            whole = self.chain.block(level, first)[1] >= stop
            if not found or not whole:
                found.append(Strand(key_part, level, after or whole))
        return tuple(found)

    def own_parts(self, rank: int) -> list[Strand]:
        return [strand for part in self.parts_of.get(rank, []) for strand in self._routes(part)]

    def needed_parts(self, rank: int) -> Iterator[Strand]:
        for key_part, part in enumerate(self.parts):
            if part.rank != rank:
                yield from self.strands(rank, key_part)

    def _routes(self, part: int) -> dict[Strand, list[int]]:
        """The strands of a part, each with its receivers in order of distance."""
        if part not in self._found_routes:
            routes = self._found_routes[part] = {}
            place = self._place[self.parts[part].rank]
            for rank in (*self.participants[place + 1 :], *self.participants[:place]):
                for strand in self.strands(rank, part):
                    routes.setdefault(strand, []).append(rank)
        return self._found_routes[part]

    @cached_property
    def _found_routes(self) -> dict[int, dict[Strand, list[int]]]:
        return {}

    def receivers(self, part: Strand) -> list[int]:
        return self._routes(part.part)[part]

    def pieces(self, strand: Strand) -> list[tuple[Rows, int]]:
        """The rows of a strand, those nearest to its receivers first, and the level that selects them."""
        first, stop = self.rows(strand.part)
        pieces = []
        for level in range(strand.level, self.chain.top + 1):
            if strand.after:
                start, end = max(first, self.chain.block(level, self.parts[strand.part].stop - 1)[0]), stop
                stop = start
            else:
                start, end = first, min(stop, self.chain.block(level, self.parts[strand.part].start)[1])
                first = end
            if start < end:
                pieces.append(((start, end), level))
        return pieces

    def lanes(self, strand: Strand, origin: int = 0) -> list[list[Lane]]:
        """For each piece and KV head, the rows of a strand, relative to ``origin`` in the sequence."""
        moved = self.document - origin
        return [
            [replace(lane, start=lane.start + moved) for lane in self.chain.lanes(RowClass(level), *rows)]
            for rows, level in self.pieces(strand)
        ]

    def parcel(self, part: Strand) -> Parcel:
        rows = sum(lane.rows for lanes in self.lanes(part) for lane in lanes)
        strand = (self.chain.heads[0], part.level, int(part.after))
        start = self.document + self.parts[part.part].start
        return Parcel(min(self.chain.numbers), start, strand, self.owner(part), rows)

    def packing(self, part: Strand, origin: int = 0) -> Packing:
        return make_packing(self.parcel(part), *self.lanes(part, origin))

    def key_lanes(self, strand: Strand, rows: RowClass, keys: Rows) -> Iterator[list[Lane]]:
        """Where a strand's parcel holds key rows of a class: for each piece of it, the lane of each KV head."""
        base = 0
        for piece, level in self.pieces(strand):
            held = self.chain.lanes(RowClass(level), *piece)
            first, stop = max(piece[0], keys[0]), min(piece[1], keys[1])
            if first < stop:
                wanted, rate = self.chain.lanes(rows, first, stop), self.chain.levels[level].rate
                yield [
                    Lane(there.start + (lane.start - all_rows.start) // rate, lane.rows, lane.step // rate)
                    for lane, all_rows, there in zip(wanted, held, parcel_lanes(held, base), strict=True)
                ]
            base += sum(lane.rows for lane in held)

    def previous_holder(self, rank: int, part: Strand) -> int:
        owner = self.owner(part)
        return next((other for other in self._walk(rank, part, -1) if part in self.strands(other, part.part)), owner)

    def next_receiver(self, rank: int, part: Strand) -> int | None:
        return next((other for other in self._walk(rank, part, 1) if part in self.strands(other, part.part)), None)

    def _walk(self, rank: int, strand: Strand, step: int) -> Iterator[int]:
        """The ranks from ``rank`` to the owner, forwards or backwards, that hold rows in the segments of a strand."""
        low, high = self._places_near(strand)
        place, owner = self._place[rank], self.owner(strand)
        while True:
            place += step
            if not low <= place <= high:
                place = low if step > 0 else high
                # Without this, finding the ends of causal routes would take time quadratic in the size of the ring.
                latest = self._latest_before(owner) if step > 0 else self._latest_after(owner)
                if self.causal and latest <= strand.part:
                    return  # no rank between here and the owner holds a later part
            if self.participants[place] == owner:
                return
            yield self.participants[place]

    def _places_near(self, strand: Strand) -> tuple[int, int]:
        """The first and the last place of a rank that holds rows in the segments of a strand's level."""
        rows = self.rows(strand.part)
        if strand.level == self.chain.top:
            return 0, len(self.participants) - 1
        start, stop = self.chain.block(strand.level, rows[0])[0], self.chain.block(strand.level, rows[1] - 1)[1]
        if (start, stop) not in self._found_places:
            held = self.parts[bisect_right(self._stops, start) : bisect_left(self._starts, stop)]
            places = [self._place[part.rank] for part in held]
            self._found_places[start, stop] = min(places), max(places)
        return self._found_places[start, stop]

    @cached_property
    def _found_places(self) -> dict[Rows, tuple[int, int]]:
        return {}

    @cached_property
    def _starts(self) -> list[int]:
        return [part.start for part in self.parts]

    @cached_property
    def _stops(self) -> list[int]:
        return [part.stop for part in self.parts]

    def _latest_before(self, owner: int) -> int:
        """The latest part held by any participant before the owner, in ring order; -1 if there is none."""
        return self._running_latest[self._place[owner]]

    def _latest_after(self, owner: int) -> int:
        """The latest part held by any participant after the owner, in ring order; -1 if there is none."""
        return self._running_latest_reversed[len(self.participants) - 1 - self._place[owner]]

    @cached_property
    def _running_latest(self) -> list[int]:
        return list(accumulate((self.parts_of[rank][-1] for rank in self.participants), max, initial=-1))

    @cached_property
    def _running_latest_reversed(self) -> list[int]:
        return list(accumulate((self.parts_of[rank][-1] for rank in reversed(self.participants)), max, initial=-1))


@dataclass(frozen=True)
class SharedWindow:
    """The windows of one branch over one document that lies on several ranks. Rows are positions in the sequence.

    Takes time proportional to the spans in reach of a rank's own spans.
    """

    number: int  # of the branch
    window: WindowBranch
    heads: int
    document: tuple[int, int]
    layout: Layout

    @cached_property
    def spans(self) -> tuple[RankSpan, ...]:
        """The document's rows by rank, in order."""
        return tuple(self.layout.rank_spans(*self.document))

    @cached_property
    def _starts(self) -> list[int]:
        return [span.start for span in self.spans]

    def _spans_within(self, start: int, stop: int) -> range:
        """The numbers of the spans that hold any of the rows ``start .. stop - 1``."""
        first = max(0, bisect_right(self._starts, start) - 1)
        return range(first + (self.spans[first].stop <= start), bisect_left(self._starts, stop))

    @cached_property
    def _strips(self) -> dict[int, list[tuple[RankSpan, tuple[int, ...]]]]:
        return {}

    def strips(self, number: int) -> list[tuple[RankSpan, tuple[int, ...]]]:
        """The rows of a span that other ranks need, cut where the ranks that need them change, and these ranks."""
        if number not in self._strips:
            span, needs = self.spans[number], list[tuple[int, int, RankSpan]]()
            for other in self._spans_within(span.start - self.window.right, span.stop + self.window.left):
                reader = self.spans[other]
                start = max(span.start, reader.start - self.window.left)
                stop = min(span.stop, reader.stop + self.window.right)
                if reader.rank != span.rank and start < stop:
                    needs.append((start, stop, reader))
            strips: list[tuple[RankSpan, tuple[int, ...]]] = []
            for start, stop in pairwise(sorted({row for need in needs for row in need[:2]})):
                readers = (reader for first, last, reader in needs if first <= start and stop <= last)
                ranks = {reader.rank for reader in readers if self._sees_any(reader, start, stop)}
                route = tuple(sorted(ranks, key=lambda rank: self.distance(span.rank, rank)))
                joins = bool(strips) and strips[-1][0].stop == start and strips[-1][1] == route
                first = strips.pop()[0].start if joins else start
                if route:
                    strips.append((RankSpan(span.rank, first, stop), route))
            self._strips[number] = strips
        return self._strips[number]

    def _sees_any(self, reader: RankSpan, start: int, stop: int) -> bool:
        """Whether a span sees any of these rows; a dilated window may step over all of them."""
        first = self.document[0]
        queries, keys = (reader.start - first, reader.stop - first), (start - first, stop - first)
        return self.window.rate == 1 or any(True for _ in band(queries, keys, self.window))

    @cached_property
    def _hops(self) -> dict[int, int]:
        """The hop of each distance between ranks that exchange rows: far ranks are no later hop if nearer ones idle."""
        size, found = self.layout.ring_size, set[int]()
        for span in self.spans:
            reach = self._spans_within(span.start - self.window.right, span.stop + self.window.left)
            if len(reach) > _MOST_SPANS_COMPARED:
                return {distance: distance for distance in range(size)}
            found |= {(self.spans[other].rank - span.rank) % size for other in reach}
        return {distance: hop for hop, distance in enumerate(sorted(found | {0}))}

    def distance(self, owner: int, rank: int) -> int:
        return self._hops[(rank - owner) % self.layout.ring_size]

    def _part(self, part: int) -> tuple[RankSpan, tuple[int, ...]]:
        """A part is the number of its strip's first row in the sequence, so that it needs no list of all strips."""
        (number,) = self._spans_within(part, part + 1)
        return next(strip for strip in self.strips(number) if strip[0].start == part)

    def own_parts(self, rank: int) -> list[int]:
        numbers = (self._spans_within(span.start, span.stop) for span in self.layout.spans(rank))
        held = (number for each in numbers for number in each if self.spans[number].rank == rank)
        return [strip.start for number in held for strip, _ in self.strips(number)]

    def needed_parts(self, rank: int) -> Iterator[int]:
        numbers = {
            number
            for span in self.layout.spans(rank)
            for own in self._spans_within(span.start, span.stop)
            if self.spans[own].rank == rank
            for number in self._spans_within(
                self.spans[own].start - self.window.left, self.spans[own].stop + self.window.right
            )
        }
        for number in sorted(numbers):
            yield from (strip.start for strip, route in self.strips(number) if rank in route)

    def owner(self, part: int) -> int:
        return self._part(part)[0].rank

    def rows(self, part: int) -> tuple[int, int]:
        """The first row of a part and the row after its last."""
        strip, _ = self._part(part)
        return strip.start, strip.stop

    def parcel(self, part: int) -> Parcel:
        strip, _ = self._part(part)
        return Parcel(self.number, strip.start, (), strip.rank, (strip.stop - strip.start) * self.heads)

    def packing(self, part: int, origin: int = 0) -> Packing:
        start, stop = self.rows(part)
        return make_packing(self.parcel(part), [Lane(start - origin, stop - start, 1)] * self.heads)

    def receivers(self, part: int) -> Iterator[int]:
        return iter(self._part(part)[1])

    def previous_holder(self, rank: int, part: int) -> int:
        strip, route = self._part(part)
        return (strip.rank, *route)[route.index(rank)]

    def next_receiver(self, rank: int, part: int) -> int | None:
        route = self._part(part)[1]
        return (*route, None)[route.index(rank) + 1]


@lru_cache(maxsize=1024)
def shared_window(
    number: int, window: WindowBranch, heads: int, document: tuple[int, int], layout: Layout
) -> SharedWindow:
    """A shared window, which the plans of all ranks of this process use together."""
    return SharedWindow(number, window, heads, document, layout)


def shared_segment(chain: Chain, document: Rows, row: int, layout: Layout, causal: bool) -> SharedSegment:
    """The segment of a chain's coarsest level that holds a row of the document."""
    start, stop = document
    first, last = chain.block(chain.top, row)
    spans = layout.rank_spans(start + max(first, 0), min(start + last, stop))
    return SharedSegment(
        chain, start, tuple(RankSpan(span.rank, span.start - start, span.stop - start) for span in spans), causal
    )


def packing_from_sequence(
    parcel: Parcel,
    pattern: Pattern,
    documents: Documents,
    layout: Layout,
    kv_heads: int,
    causal: bool,
    costs: TileCosts | None = None,
) -> Packing:
    """How to fill a parcel from the whole sequence: as its owner does, but with rows of the sequence, not of the rank.

    >>> from ringspan.geometry import Dilated
    >>> ring = Layout("contiguous", 16, ring_size=2)
    >>> pattern, parcel = Dilated((16,), (4,)), Parcel(branch=0, start=8, strand=(0, 0, 1), owner=1, rows=2)
    >>> ((rows, places),) = packing_from_sequence(parcel, pattern, Documents((16,)), ring, 1, causal=False).combs
    >>> rows.lane(0), places.lane(0)
    ((8, 12), (0, 1))
    """
    start, stop = next((a, b) for a, b in documents.spans() if a <= parcel.start < b)
    rows_per_rank = -(-layout.rows // layout.ring_size)
    for group in group_branches(pattern, stop - start, kv_heads, rows_per_rank, causal, costs):
        if isinstance(group, Chain):
            if min(group.numbers) == parcel.branch and group.heads[0] == parcel.strand[0]:
                shared = shared_segment(group, (start, stop), parcel.start - start, layout, causal)
                part = next(i for i, span in enumerate(shared.parts) if start + span.start == parcel.start)
                return shared.packing(Strand(part, parcel.strand[1], bool(parcel.strand[2])))
        elif group[0] == parcel.branch:
            return make_packing(parcel, [Lane(parcel.start, parcel.rows // kv_heads, 1)] * kv_heads)
    raise AssertionError(f"{parcel} is not in the plan of {pattern.text}")
