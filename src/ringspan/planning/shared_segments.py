"""Segments that a border between ranks cuts: which ranks exchange which of their rows.

The *parts* of a shared segment are its rows on each rank; the ranks that own them are its *participants*. The rows of a
part form a parcel, which is sent only to participants with a query that sees it. A participant receives it at the hop
that is its cyclic distance from the owner among the participants, so each rank receives about one shard per hop.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ringspan.geometry import Documents, Lane, Pattern
from ringspan.layout import Layout, RankSpan
from ringspan.planning.chain import Chain, RowClass, Rows
from ringspan.planning.nesting import TileCosts, group_branches
from ringspan.planning.tiles import Packing, Parcel, make_packing, parcel_lanes


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
        rows = sum(self.chain.selected(RowClass(level), *rows) for rows, level in self.pieces(part))
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
