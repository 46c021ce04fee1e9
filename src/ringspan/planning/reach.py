"""Reach: the longest distance between a query and its keys, and which segments cross ranks."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ringspan.geometry import Branch, Documents, Pattern
from ringspan.layout import Layout, RankSpan


@dataclass(frozen=True, slots=True)
class Reach:
    """``longest_segment`` bounds the distance between a query and the keys it sees, in a document of ``tokens`` rows.

    ``crossing`` are the segment lengths of the branches that send rows between ranks; if empty, the ring sends nothing.
    """

    tokens: int
    ring_size: int
    longest_segment: int
    crossing: tuple[int, ...]

    def __str__(self) -> str:
        seen = (
            f"all {self.tokens:,} tokens"
            if self.longest_segment == self.tokens
            else f"at most {self.longest_segment:,} of {self.tokens:,} tokens, the longest segment"
        )
        if self.ring_size > 1 and not self.crossing:
            return f"No segment crosses ranks, so nothing is sent; a token reaches {seen}."
        if self.ring_size > 1:
            return f"A token reaches {seen}; segments of {', '.join(f'{w:,}' for w in self.crossing)} cross ranks."
        return f"A token reaches {seen}."


def find_reach(pattern: Pattern, documents: Documents, layout: Layout, kv_heads: int) -> Reach:
    """The reach of a pattern on a ring. Exact for the layout; takes one step per border between ranks.

    >>> from ringspan.geometry import Dilated
    >>> print(find_reach(Dilated((4, 8), (1, 2)), Documents((32,)), Layout("contiguous", 32, 4), kv_heads=2))
    No segment crosses ranks, so nothing is sent; a token reaches at most 8 of 32 tokens, the longest segment.
    >>> print(find_reach(Dilated((4, 8), (1, 2)), Documents((32,)), Layout("zigzag", 32, 4), kv_heads=2))
    A token reaches at most 8 of 32 tokens, the longest segment; segments of 8 cross ranks.
    """
    tokens = max(documents.lengths, default=0)
    parts = list(layout.rank_spans(0, layout.rows))
    lengths = [min(branch.segment_length, tokens) for branch in pattern.branches(tokens)]
    crossing = [w for i, w in enumerate(lengths) if _crosses(i, pattern, documents, parts, kv_heads)]
    return Reach(tokens, layout.ring_size, max(lengths), tuple(dict.fromkeys(crossing)))


def _crosses(i: int, pattern: Pattern, documents: Documents, parts: list[RankSpan], kv_heads: int) -> bool:
    """Whether two selected rows of one segment and head are on different ranks, in branch ``i``.

    If so, two adjacent selected rows are on different ranks, with a border between them.
    """
    borders = [part.start for part in parts]
    spans = list(documents.spans())
    firsts = [start for start, _ in spans]
    for border in borders[1:]:
        start, stop = spans[bisect_right(firsts, border) - 1]
        branch = pattern.branches(stop - start)[i]
        for offset in set(pattern.offsets(branch.rate, kv_heads)):
            pair = _around(border, branch, offset, start, stop)
            if pair and len({parts[bisect_right(borders, row) - 1].rank for row in pair}) == 2:
                return True
    return False


def _around(border: int, branch: Branch, offset: int, start: int, stop: int) -> tuple[int, int] | None:
    """The last selected row before a border and the first one after it, or None if they are in different segments."""
    phase = (border - start + branch.shift) % branch.segment_length
    segment = border - phase
    after = border + (offset - phase) % branch.rate
    before = after - branch.rate
    inside = before >= max(segment, start) and after < min(segment + branch.segment_length, stop)
    return (before, after) if inside else None
