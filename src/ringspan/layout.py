"""Layouts: which rank of a ring holds which rows. Pure integers.

The sequence is cut into parts of nearly equal length: one per rank (``"contiguous"``), or two (``"zigzag"``: rank i of
k holds parts i and 2k-1-i, one early and one late, which balances causal work). ``"balanced"`` assigns packed documents
to ranks by their work (`ringspan.balance`); a single document is laid out as in zigzag.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from ringspan.balance import Balanced, assign_rows
from ringspan.geometry import Documents, Pattern, as_int

LayoutName = Literal["contiguous", "zigzag", "balanced"]
AnyLayout = LayoutName | Balanced


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``start .. stop - 1`` of the sequence, stored on a rank from its local row ``local`` on."""

    start: int
    stop: int
    local: int


@dataclass(frozen=True, slots=True)
class RankSpan:
    """Rows ``start .. stop - 1`` of the sequence, all on one rank."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How ``rows`` rows are distributed over ``ring_size`` ranks. Shards may be uneven, and a rank may hold no rows.

    ``lengths`` are those of packed documents, if there are any. Only the balanced layout depends on them.

    >>> [Layout("zigzag", 10, 2).spans(rank) for rank in range(2)]
    [(Span(start=0, stop=2, local=0), Span(start=7, stop=10, local=2)), (Span(start=2, stop=7, local=0),)]
    """

    name: AnyLayout
    rows: int
    ring_size: int
    lengths: tuple[int, ...] = ()  # emptied where they make no difference, so that equal layouts are equal

    def __post_init__(self) -> None:
        check_layout_name(self.name)
        for name in ("rows", "ring_size"):
            object.__setattr__(self, name, as_int(name, getattr(self, name)))
        if self.ring_size < 1:
            raise ValueError(f"ring_size={self.ring_size}: a ring has at least 1 rank")
        if self.rows < 0:
            raise ValueError(f"rows={self.rows}: a sequence has at least 0 rows")
        if isinstance(self.name, Balanced) and self.name == Balanced():
            object.__setattr__(self, "name", "balanced")
        if self.lengths:
            held = _not_empty(self.lengths, self.rows)
            matters = len(held) > 1 and self.ring_size > 1 and self.name not in ("contiguous", "zigzag")
            object.__setattr__(self, "lengths", held if matters else ())

    @property
    def _table(self) -> _Table | None:
        """The spans, if no formula gives them."""
        if not self.lengths:
            return None
        rule = self.name if isinstance(self.name, Balanced) else Balanced()
        return _balanced_table(rule, self.lengths, self.ring_size)

    @property
    def _cuts(self) -> int:
        return self.ring_size if self.name == "contiguous" else 2 * self.ring_size

    def _border(self, i: int) -> int:
        return self.rows * i // self._cuts

    def _owner(self, i: int) -> int:
        return i if self.name == "contiguous" else min(i, self._cuts - 1 - i)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The rank's rows, in the order in which it stores them."""
        if not 0 <= rank < self.ring_size:
            raise ValueError(f"rank={rank}: must be in 0 .. {self.ring_size - 1}")
        table = self._table
        if table is not None:
            return table.spans[rank]
        spans: list[Span] = []
        local = 0
        for i in dict.fromkeys((rank,) if self.name == "contiguous" else (rank, self._cuts - 1 - rank)):
            start, stop = self._border(i), self._border(i + 1)
            if start == stop:
                continue
            if spans and spans[-1].stop == start:
                spans[-1] = Span(spans[-1].start, stop, spans[-1].local)
            else:
                spans.append(Span(start, stop, local))
            local += stop - start
        return tuple(spans)

    def rows_of(self, rank: int) -> int:
        """The number of rows that the rank holds."""
        spans = self.spans(rank)
        return spans[-1].local + spans[-1].stop - spans[-1].start if spans else 0

    def local_row(self, rank: int, row: int) -> int | None:
        """Where the rank stores a row of the sequence; None if another rank holds it.

        >>> Layout("zigzag", 10, 2).local_row(0, 8), Layout("zigzag", 10, 2).local_row(1, 8)
        (3, None)
        """
        spans = self.spans(rank)
        i = bisect_right(spans, row, key=lambda span: span.start) - 1
        return row - spans[i].start + spans[i].local if i >= 0 and row < spans[i].stop else None

    def check_positions(self, name: str, positions: tuple[int, ...]) -> None:
        """Raise unless all positions are in the sequence."""
        for i, position in enumerate(positions):
            if not 0 <= position < self.rows:
                raise ValueError(f"{name}[{i}]={position}: the sequence has {self.rows} rows; positions count from 0")

    def rank_spans(self, start: int, stop: int) -> Iterator[RankSpan]:
        """Split rows ``start .. stop - 1`` by rank, in order. Takes time proportional to the number of spans."""
        table = self._table
        if table is not None:
            yield from table.rank_spans(start, stop)
            return
        held: RankSpan | None = None
        while start < stop:
            i = ((start + 1) * self._cuts - 1) // self.rows
            end = min(stop, self._border(i + 1))
            if held is not None and held.rank == self._owner(i):
                held = RankSpan(held.rank, held.start, end)
            else:
                if held is not None:
                    yield held
                held = RankSpan(self._owner(i), start, end)
            start = end
        if held is not None:
            yield held


@lru_cache(maxsize=64)
def _not_empty(lengths: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """The lengths of all documents with rows. Raises unless they add up to ``rows``."""
    documents = Documents(lengths)
    documents.check_rows(rows)
    return tuple(filter(None, documents.lengths))


@dataclass(frozen=True, slots=True)
class _Table:
    """The spans of a layout that no formula gives: by rank, and in the order of the sequence."""

    spans: tuple[tuple[Span, ...], ...]
    parts: tuple[RankSpan, ...]
    starts: tuple[int, ...]

    def rank_spans(self, start: int, stop: int) -> Iterator[RankSpan]:
        i = bisect_right(self.starts, start) - 1
        while start < stop:
            part = self.parts[i]
            yield RankSpan(part.rank, start, min(stop, part.stop))
            start, i = part.stop, i + 1


@lru_cache(maxsize=64)
def _balanced_table(rule: Balanced, lengths: tuple[int, ...], ring_size: int) -> _Table:
    parts = tuple(RankSpan(*run) for run in assign_rows(rule, lengths, ring_size))
    spans: list[list[Span]] = [[] for _ in range(ring_size)]
    rows = [0] * ring_size
    for part in parts:
        spans[part.rank].append(Span(part.start, part.stop, rows[part.rank]))
        rows[part.rank] += part.stop - part.start
    return _Table(tuple(map(tuple, spans)), parts, tuple(part.start for part in parts))


def layouts_to_compare(pattern: Pattern, causal: bool, lengths: tuple[int, ...] | None) -> tuple[AnyLayout, ...]:
    """The layouts that differ, the simplest first: balanced only for several documents.

    >>> from ringspan.geometry import Full
    >>> layouts_to_compare(Full(), True, (2, 2)), layouts_to_compare(Full(), True, None)
    (('contiguous', 'zigzag', 'balanced'), ('contiguous', 'zigzag'))
    """
    balanced = Balanced(pattern, causal)
    last: tuple[AnyLayout, ...] = ("balanced" if balanced == Balanced() else balanced,)
    return ("contiguous", "zigzag", *(last if sum(map(bool, lengths or ())) > 1 else ()))


def check_layout_name(name: object) -> None:
    """Raise unless ``name`` is a layout."""
    if not isinstance(name, Balanced) and name not in get_args(LayoutName):
        raise ValueError(f"layout={name!r}: must be {' or '.join(map(repr, get_args(LayoutName)))}")
