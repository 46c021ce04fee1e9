"""Windows that reach across a border between ranks: which ranks exchange which of their rows.

These rows, near the borders of a document's spans, are the *halo*. The parts of a shared window are strips of the halo,
each cut so that every rank needs all of it or nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from ringspan.geometry import Lane, WindowBranch, band
from ringspan.layout import Layout, RankSpan
from ringspan.planning.tiles import Packing, Parcel, make_packing

_MOST_SPANS_COMPARED = 64  # windows that reach farther use plain distances as hops


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
