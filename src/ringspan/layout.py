"""Layouts: which rank of a ring holds which rows. Pure integers.

The sequence is cut into parts of nearly equal length: one per rank (``"contiguous"``), or two (``"zigzag"``: rank i of
k holds parts i and 2k-1-i, one early and one late, which balances causal work).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from ringspan.geometry import as_int

LayoutName = Literal["contiguous", "zigzag"]


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

    >>> [Layout("zigzag", 10, 2).spans(rank) for rank in range(2)]
    [(Span(start=0, stop=2, local=0), Span(start=7, stop=10, local=2)), (Span(start=2, stop=7, local=0),)]
    """

    name: LayoutName
    rows: int
    ring_size: int

    def __post_init__(self) -> None:
        check_layout_name(self.name)
        for name in ("rows", "ring_size"):
            object.__setattr__(self, name, as_int(name, getattr(self, name)))
        if self.ring_size < 1:
            raise ValueError(f"ring_size={self.ring_size}: a ring has at least 1 rank")
        if self.rows < 0:
            raise ValueError(f"rows={self.rows}: a sequence has at least 0 rows")

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
        spans: list[Span] = []
        local = 0
        for i in dict.fromkeys((rank, self._cuts - 1 - rank) if self.name == "zigzag" else (rank,)):
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
        return sum(span.stop - span.start for span in self.spans(rank))

    def check_positions(self, name: str, positions: tuple[int, ...]) -> None:
        """Raise unless all positions are in the sequence."""
        for i, position in enumerate(positions):
            if not 0 <= position < self.rows:
                raise ValueError(f"{name}[{i}]={position}: the sequence has {self.rows} rows; positions count from 0")

    def rank_spans(self, start: int, stop: int) -> Iterator[RankSpan]:
        """Split rows ``start .. stop - 1`` by rank, in order. Takes time proportional to the number of spans."""
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


def check_layout_name(name: object) -> None:
    """Raise unless ``name`` is a layout."""
    if name not in get_args(LayoutName):
        raise ValueError(f"layout={name!r}: must be {' or '.join(map(repr, get_args(LayoutName)))}")
