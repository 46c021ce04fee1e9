"""Routes: which ranks exchange parcels because a border between ranks cuts a segment, and who sends to whom.

The *parts* of a shared segment are its rows on each rank; the ranks that own them are its *participants*. The rows of a
part form a parcel, which is sent only to participants with a query that sees it. A participant receives it at the hop
that is its cyclic distance from the owner among the participants, so each rank receives about one shard per hop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from ringspan.geometry import Documents, Lane, Pattern, SegmentRun, as_int
from ringspan.layout import Layout, RankSpan
from ringspan.planning.parcels import Packing, Parcel, make_packing


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


@dataclass(frozen=True)
class SharedSegment:
    """One segment of one branch, cut by borders between ranks. Rows are positions in the whole sequence."""

    branch: int
    rate: int
    offsets: tuple[int, ...]
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

    def lanes(self, i: int, origin: int = 0) -> list[Lane]:
        """For each KV head, the selected rows of a part, relative to ``origin``."""
        part = self.parts[i]
        phase = part.start - self.start
        return SegmentRun(part.start, part.stop - part.start, 1, phase).lanes(self.rate, self.offsets, origin)

    def parcel(self, i: int) -> Parcel:
        part = self.parts[i]
        return Parcel(self.branch, part.start, part.rank, sum(lane.rows for lane in self.lanes(i)))

    def part_sees(self, query_part: int, key_part: int) -> bool:
        """Whether any query of one part sees any key of the other."""
        if self.causal and key_part > query_part:
            return False
        shortest = min(self.parts[i].stop - self.parts[i].start for i in (query_part, key_part))
        if shortest >= self.rate:
            return True  # every head selects rows in both
        return bool(self._heads_in(query_part) & self._heads_in(key_part))

    def _heads_in(self, i: int) -> int:
        """The KV heads that select rows in a part, as a bit mask."""
        if i not in self._found_heads:
            part = self.parts[i]
            rows, phase = part.stop - part.start, part.start - self.start
            held = (1 << head for head, offset in enumerate(self.offsets) if (offset - phase) % self.rate < rows)
            self._found_heads[i] = sum(held)
        return self._found_heads[i]

    @cached_property
    def _found_heads(self) -> dict[int, int]:
        return {}

    def needs_parcel(self, rank: int, key_part: int) -> bool:
        """Whether a participant needs the parcel of a part."""
        return any(self.part_sees(i, key_part) for i in self.parts_of[rank])

    def receivers(self, key_part: int) -> Iterator[int]:
        """The participants that need the parcel of a part, in order of their distance from its owner."""
        owner = self._place[self.parts[key_part].rank]
        for step in range(1, len(self.participants)):
            rank = self.participants[(owner + step) % len(self.participants)]
            if self.needs_parcel(rank, key_part):
                yield rank

    def previous_holder(self, rank: int, key_part: int) -> int:
        """The rank that holds the parcel before ``rank``: the previous receiver on the route, or the owner."""
        owner, place = self.parts[key_part].rank, self._place[rank]
        while True:
            place = (place - 1) % len(self.participants)
            candidate = self.participants[place]
            if candidate == owner or self.needs_parcel(candidate, key_part):
                return candidate
            if place == len(self.participants) - 1 and self.causal and self._latest_after(owner) <= key_part:
                return owner  # no rank between the owner and the end of the ring holds a later part

    def next_receiver(self, rank: int, key_part: int) -> int | None:
        """The rank that receives the parcel after ``rank``, or None at the end of the route."""
        owner, place = self.parts[key_part].rank, self._place[rank]
        while True:
            place = (place + 1) % len(self.participants)
            candidate = self.participants[place]
            if candidate == owner:
                return None
            if self.needs_parcel(candidate, key_part):
                return candidate
            if place == 0 and self.causal and self._latest_before(owner) <= key_part:
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
    branch = pattern.branches(stop - start)[parcel.branch]
    phase = (parcel.start - start + branch.shift) % branch.segment_length
    segment_start = parcel.start - phase
    part = next(layout.rank_spans(parcel.start, min(segment_start + branch.segment_length, stop)))
    offsets = pattern.offsets(branch.rate, kv_heads)
    alone = SharedSegment(parcel.branch, branch.rate, offsets, segment_start, (part,), causal=False)
    return make_packing(parcel, alone.lanes(0))
