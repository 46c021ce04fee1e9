"""Routes: which ranks exchange parcels because a border between them cuts a segment or a window, and who sends them.

The *parts* of a shared segment are its rows on each rank; the ranks that own them are its *participants*. The rows of a
part form a parcel, which is sent only to participants with a query that sees it. A participant receives it at the hop
that is its cyclic distance from the owner among the participants, so each rank receives about one shard per hop.

Windows share rows near the borders of a document's spans, the *halo*. The parts of a shared window are strips of the
halo, each cut so that every rank needs all of it or nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal, Protocol

from ringspan.geometry import Documents, Lane, Pattern, SegmentBranch, SegmentRun, WindowBranch, as_int, band
from ringspan.layout import Layout, RankSpan
from ringspan.planning.tiles import Packing, Parcel, make_packing

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


class Shared(Protocol):
    """Rows that several ranks exchange, in parts: each part is a parcel with its own route."""

    def own_parts(self, rank: int) -> list[int]:
        """The parts whose rows a rank owns."""

    def needed_parts(self, rank: int) -> Iterator[int]:
        """The parts of other ranks that a rank needs."""

    def owner(self, part: int) -> int:
        """The rank that owns a part."""

    def parcel(self, part: int) -> Parcel:
        """The parcel that holds the rows of a part."""

    def packing(self, part: int, origin: int = 0) -> Packing:
        """How the owner packs a part; ``origin`` is the row of the sequence at its local row 0."""

    def distance(self, owner: int, rank: int) -> int:
        """The hop at which a rank receives the parts of an owner."""

    def receivers(self, part: int) -> Iterator[int]:
        """The ranks that need a part, in order of distance."""

    def previous_holder(self, rank: int, part: int) -> int:
        """The rank that holds the parcel before ``rank``: the previous receiver on the route, or the owner."""

    def next_receiver(self, rank: int, part: int) -> int | None:
        """The rank that receives the parcel after ``rank``, or None at the end of the route."""


@dataclass(frozen=True)
class SharedSegment:
    """One segment of one branch, cut by borders between ranks. Rows are positions in the whole sequence."""

    number: int  # of the branch
    branch: SegmentBranch
    start: int  # of the segment; before its first part if the document starts inside the segment
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

    def distance(self, owner: int, rank: int) -> int:
        """The number of steps from ``owner`` to ``rank`` along the ring of participants."""
        return (self._place[rank] - self._place[owner]) % len(self.participants)

    def own_parts(self, rank: int) -> list[int]:
        return self.parts_of.get(rank, [])

    def needed_parts(self, rank: int) -> Iterator[int]:
        for key_part, part in enumerate(self.parts):
            if part.rank != rank and self.needs_parcel(rank, key_part):
                yield key_part

    def owner(self, part: int) -> int:
        return self.parts[part].rank

    def lanes(self, i: int, origin: int = 0) -> list[Lane]:
        """For each KV head, the selected rows of a part, relative to ``origin``."""
        part = self.parts[i]
        return SegmentRun(part.start, part.stop - part.start, 1, part.start - self.start).lanes(self.branch, origin)

    def parcel(self, part: int) -> Parcel:
        rows = sum(lane.rows for lane in self.lanes(part))
        return Parcel(self.number, self.parts[part].start, self.parts[part].rank, rows)

    def packing(self, part: int, origin: int = 0) -> Packing:
        return make_packing(self.parcel(part), self.lanes(part, origin))

    def part_sees(self, query_part: int, key_part: int) -> bool:
        """Whether any query of one part sees any key of the other."""
        if self.causal and key_part > query_part:
            return False
        shortest = min(self.parts[i].stop - self.parts[i].start for i in (query_part, key_part))
        if shortest >= self.branch.rate:
            return True  # every head selects rows in both
        return bool(self._heads_in(query_part) & self._heads_in(key_part))

    def _heads_in(self, i: int) -> int:
        """The KV heads that select rows in a part, as a bit mask."""
        if i not in self._found_heads:
            part = self.parts[i]
            rows, phase = part.stop - part.start, part.start - self.start
            rate, offsets = self.branch.rate, self.branch.offsets
            held = (1 << head for head, offset in enumerate(offsets) if (offset - phase) % rate < rows)
            self._found_heads[i] = sum(held)
        return self._found_heads[i]

    @cached_property
    def _found_heads(self) -> dict[int, int]:
        return {}

    def needs_parcel(self, rank: int, key_part: int) -> bool:
        """Whether a participant needs the parcel of a part."""
        return any(self.part_sees(i, key_part) for i in self.parts_of[rank])

    def receivers(self, part: int) -> Iterator[int]:
        owner = self._place[self.parts[part].rank]
        for step in range(1, len(self.participants)):
            rank = self.participants[(owner + step) % len(self.participants)]
            if self.needs_parcel(rank, part):
                yield rank

    def previous_holder(self, rank: int, part: int) -> int:
        owner, place = self.parts[part].rank, self._place[rank]
        while True:
            place = (place - 1) % len(self.participants)
            candidate = self.participants[place]
            if candidate == owner or self.needs_parcel(candidate, part):
                return candidate
            if place == len(self.participants) - 1 and self.causal and self._latest_after(owner) <= part:
                return owner  # no rank between the owner and the end of the ring holds a later part

    def next_receiver(self, rank: int, part: int) -> int | None:
        owner, place = self.parts[part].rank, self._place[rank]
        while True:
            place = (place + 1) % len(self.participants)
            candidate = self.participants[place]
            if candidate == owner:
                return None
            if self.needs_parcel(candidate, part):
                return candidate
            if place == 0 and self.causal and self._latest_before(owner) <= part:
                return None  # no rank between the start of the ring and the owner holds a later part

    # Without these two, finding the start or end of causal routes would take time quadratic in the size of the ring.

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
        return Parcel(self.number, strip.start, strip.rank, (strip.stop - strip.start) * self.heads)

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


def packing_from_sequence(
    parcel: Parcel, pattern: Pattern, documents: Documents, layout: Layout, kv_heads: int
) -> Packing:
    """How to fill a parcel from the whole sequence: as its owner does, but with rows of the sequence, not of the rank.

    >>> from ringspan.geometry import Dilated
    >>> ring = Layout("contiguous", 16, ring_size=2)
    >>> pattern, parcel = Dilated((16,), (4,)), Parcel(branch=0, start=8, owner=1, rows=2)
    >>> ((rows, places),) = packing_from_sequence(parcel, pattern, Documents((16,)), ring, 1).combs
    >>> rows.lane(0), places.lane(0)
    ((8, 12), (0, 1))
    """
    start, stop = next((a, b) for a, b in documents.spans() if a <= parcel.start < b)
    branch = pattern.branches(stop - start, kv_heads)[parcel.branch]
    if isinstance(branch, WindowBranch):
        return make_packing(parcel, [Lane(parcel.start, parcel.rows // kv_heads, 1)] * kv_heads)
    phase = (parcel.start - start + branch.shift) % branch.segment_length
    segment_start = parcel.start - phase
    part = next(layout.rank_spans(parcel.start, min(segment_start + branch.segment_length, stop)))
    return SharedSegment(parcel.branch, branch, segment_start, (part,), causal=False).packing(0)
