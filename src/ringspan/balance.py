"""The balanced layout: packed documents assigned to ranks by their rows and (query, key) pairs. Pure integers.

Short documents stay whole on one rank, long ones are split over a few. Every rank computes the same assignment from the
same lengths, without communication.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from heapq import nsmallest
from itertools import pairwise
from math import ceil, lcm

from ringspan.geometry import Full, Pattern, SegmentBranch, WindowBranch

# The largest part of a rank's rows or work that one piece of a document may have. Smaller parts balance better and send
# more, so the first that balances is taken.
_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.125, 0.09, 0.06, 0.04, 0.03, 0.02, 0.01)
_ROUNDS = 4  # of moving the cuts of all split documents
_MORE_SPLITS = 2  # for each rank, see `_Assignment.level`
_BALANCED = 1.02  # work of the busiest rank over the mean
_BUNDLE = 1 / 16  # of a rank's rows or work: adjacent short documents up to this size stay together, in one span
_SAME_WORK = 1.05  # of the late half of a document over the early half; then splitting needs no zigzag


@dataclass(frozen=True, slots=True)
class Balanced:
    """The layout ``"balanced"`` with options: packed documents assigned to ranks so that work and rows are balanced.

    Args:
        pattern: the pattern whose work is balanced; in a model with several, the one with the most work.
        causal: whether attention under this pattern is causal.
        slack: how many more rows than the mean a rank may hold, as a fraction of the mean. Rounding may add one row.

    >>> from ringspan.layout import Layout
    >>> [[(s.start, s.stop) for s in Layout(Balanced(), 16, 2, (8, 4, 4)).spans(rank)] for rank in range(2)]
    [[(0, 2), (6, 12)], [(2, 6), (12, 16)]]
    """

    pattern: Pattern = Full()
    causal: bool = True
    slack: float = 0.05

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern):
            raise TypeError(f"pattern={self.pattern!r}: must be a pattern such as Full(), Window(...) or Dilated(...)")
        if not isinstance(self.causal, bool):
            raise TypeError(f"causal={self.causal!r}: must be True or False")
        if not isinstance(self.slack, (int, float)) or not 0.01 <= self.slack <= 1:
            raise ValueError(f"slack={self.slack!r}: must be from 0.01 to 1, a fraction of the mean rows of a rank")

    def __str__(self) -> str:
        if self == Balanced():
            return "balanced"
        return f"balanced ({self.pattern.text}, {'causal' if self.causal else 'not causal'}, slack {self.slack})"


def work_before(pattern: Pattern, causal: bool, rows: int, stop: int) -> int:
    """The pairs of the queries ``0 .. stop - 1`` of a document of ``rows`` rows, in closed form.

    Counted per branch over one head for each offset, times a factor that is the same for all lengths: heads of
    different offsets may select a row more or less.

    >>> work_before(Full(), True, 4, 4), work_before(Full(), False, 4, 3)
    (10, 12)
    """
    return work_function(pattern, causal, rows)(stop)


@lru_cache(maxsize=1024)
def work_function(pattern: Pattern, causal: bool, rows: int) -> Callable[[int], int]:
    """`work_before` of a document, as a function of ``stop``: what is the same for all rows is computed once."""
    branches = pattern.branches(rows)
    # The number of heads over which the offsets of the branches repeat.
    unit = lcm(*(branch.rate for branch in branches if isinstance(branch, SegmentBranch)))
    parts = [
        _window_work(branch.up_to_own_row() if causal else branch, rows, unit)
        if isinstance(branch, WindowBranch)
        else _segments_work(branch, causal, rows, unit // branch.rate)
        for branch in branches
    ]
    return parts[0] if len(parts) == 1 else lambda stop: sum(part(stop) for part in parts)


def _window_work(window: WindowBranch, rows: int, unit: int) -> Callable[[int], int]:
    left, right, rate = window.left, window.right, window.rate
    ahead = _steps(rows, right, rate)
    return lambda stop: unit * (stop + _steps(stop, left, rate) + ahead - _steps(rows - stop, right, rate))


def _segments_work(branch: SegmentBranch, causal: bool, rows: int, factor: int) -> Callable[[int], int]:
    length, rate = branch.segment_length, branch.rate
    first = min(length - branch.shift, rows)
    if causal and rate == 1 and first == rows:  # one segment: what balancing evaluates most
        return lambda stop: factor * (stop * (stop + 1) // 2)
    of_first, of_each = (_segment_work(each, each, rate, causal) for each in (first, length))

    def work(stop: int) -> int:
        if stop <= first:
            return factor * _segment_work(first, stop, rate, causal)
        whole, rest = divmod(stop - first, length)
        last = min(length, rows - first - whole * length)
        return factor * (of_first + whole * of_each + _segment_work(last, rest, rate, causal))

    return work


def _segment_work(rows: int, stop: int, rate: int, causal: bool) -> int:
    """The pairs of the first ``stop`` queries of a segment, over all offsets."""
    turns, rest = divmod(stop, rate)
    if causal:
        return rate * turns * (turns + 1) // 2 + rest * (turns + 1)
    return turns * rows + rest * (rows // rate) + min(rest, rows % rate)


def _steps(stop: int, most: int, rate: int) -> int:
    """The sum of min(p, most) // rate over p = 0 .. stop - 1."""
    rising = min(stop, most + 1)
    turns, rest = divmod(rising, rate)
    return rate * turns * (turns - 1) // 2 + rest * turns + (stop - rising) * (most // rate)


@dataclass(frozen=True, slots=True)
class _Item:
    """Rows that stay on one rank: pieces (start, stop) of one document, or adjacent documents."""

    pieces: tuple[tuple[int, int], ...]
    rows: int
    work: int
    is_document: bool = True  # or a piece of one


def assign_rows(rule: Balanced, lengths: tuple[int, ...], ring_size: int) -> tuple[tuple[int, int, int], ...]:
    """(rank, start, stop) of runs of rows, in order; neighbours are on different ranks.

    >>> assign_rows(Balanced(), (8, 4, 4), 2)
    ((0, 0, 2), (1, 2, 6), (0, 6, 12), (1, 12, 16))
    """
    documents = _Documents(rule, lengths, ring_size)
    tried: list[_Assignment] = []
    for share in _SHARES:
        tried.append(_Assignment(documents, share))
        tried[-1].level()
        if tried[-1].excess() == (0, 0.0):
            break
    best = min(tried, key=_Assignment.excess)
    runs: list[tuple[int, int, int]] = []
    for start, stop, rank in sorted(best.pieces()):
        if runs and runs[-1][0] == rank:
            runs[-1] = (rank, runs[-1][1], stop)
        else:
            runs.append((rank, start, stop))
    return tuple(runs)


class _Documents:
    """Packed documents, their work, and how they are split over some ranks."""

    def __init__(self, rule: Balanced, lengths: tuple[int, ...], ring_size: int) -> None:
        self.lengths, self.ring_size = lengths, ring_size
        self.function: Callable[[int], Callable[[int], int]] = cache(partial(work_function, rule.pattern, rule.causal))
        self.work: Callable[[int], int] = cache(lambda rows: self.function(rows)(rows))
        self.mean_rows = sum(lengths) / ring_size
        self.mean_work = sum(map(self.work, lengths)) / ring_size
        self.most_rows = ceil(self.mean_rows * (1 + rule.slack))

    def size(self, rows: int, work: int) -> float:
        """The larger of the fractions of a rank's rows and of its work."""
        return max(rows / self.mean_rows, work / self.mean_work)

    def groups(self, share: float) -> Iterator[list[_Item]]:
        """The items of each document, for distinct ranks. Short documents that are adjacent share an item."""
        start, bundle = 0, _Item((), 0, 0)
        for rows in self.lengths:
            stop, work = start + rows, self.work(rows)
            ranks = min(ceil(self.size(rows, work) / share), self.ring_size, rows)
            if ranks > 1:
                yield self._split(start, rows, ranks)
            elif (
                bundle.rows
                and bundle.pieces[0][1] == start
                and self.size(bundle.rows + rows, bundle.work + work) <= _BUNDLE
            ):
                bundle = _Item(((bundle.pieces[0][0], stop),), bundle.rows + rows, bundle.work + work, False)
            else:
                if bundle.rows:
                    yield [bundle]
                bundle = _Item(((start, stop),), rows, work)
            start = stop
        if bundle.rows:
            yield [bundle]

    def _split(self, start: int, rows: int, ranks: int) -> list[_Item]:
        """A document in equal parts: consecutive rows for each rank, or zigzag."""
        borders = [rows * i // (2 * ranks) for i in range(2 * ranks + 1)]
        pairs = list(pairwise(borders))
        if self.zigzag(rows):
            return [self._item(start, rows, pairs[i], pairs[-1 - i]) for i in range(ranks)]
        return [self._item(start, rows, (borders[2 * i], borders[2 * i + 2])) for i in range(ranks)]

    def zigzag(self, rows: int) -> bool:
        """Whether early rows have so much less work than late ones that consecutive rows would not be balanced."""
        early = self.function(rows)(rows // 2)
        return self.work(rows) - early > early * _SAME_WORK

    def _item(self, start: int, rows: int, *pieces: tuple[int, int]) -> _Item:
        """Pieces of the document that starts at ``start``."""
        before = self.function(rows)
        work = sum(before(stop) - before(first) for first, stop in pieces)
        held = tuple((start + first, start + stop) for first, stop in pieces if first < stop)
        return _Item(held, sum(stop - first for first, stop in pieces), work)

    def split_unevenly(self, items: list[_Item], rows_wanted: list[int], work_wanted: list[int]) -> list[_Item]:
        """The document of these items, split so that each has about the wanted rows and work.

        Zigzag takes rows from both ends: of those at the front, which see few keys, as many as the wanted work allows.
        """
        start = min(piece[0] for item in items for piece in item.pieces)
        rows = sum(item.rows for item in items)
        work, zigzag = self.function(rows), self.zigzag(rows)
        first, last, found = 0, rows, dict[int, _Item]()
        mean = sum(work_wanted) / rows
        order = list(range(len(items)))
        if zigzag:  # what differs most from the mean needs the ends of the document
            order.sort(key=lambda i: -abs(work_wanted[i] - mean * rows_wanted[i]))
        for i in order[:-1]:
            if zigzag:
                front, back = _take(work, first, last, rows_wanted[i], work_wanted[i])
            else:
                reached = work(first) + work_wanted[i]
                front, back = bisect_left(range(last - first), reached, key=lambda x: work(first + x)), 0
            found[i] = self._item(start, rows, (first, first + front), (last - back, last))
            first, last = first + front, last - back
        found[order[-1]] = self._item(start, rows, (first, last))
        return [found[i] for i in range(len(items))]


def _take(work: Callable[[int], int], first: int, last: int, rows: int, wanted: int) -> tuple[int, int]:
    """How many rows to take from the front and from the back of ``first .. last - 1`` for the wanted rows and work."""

    wanted += work(first) - work(last)

    def missing(back: int, rows: int) -> int:
        return wanted - (work(first + rows - back) - work(last - back))

    rows = min(rows, last - first)
    if missing(rows, rows) > 0:  # even at the back, so few rows have too little work
        rows = bisect_left(range(last - first), 0, rows, key=lambda x: -missing(x, x))
    elif missing(0, rows) < 0:
        rows = max(0, bisect_left(range(rows), 1, key=lambda x: -missing(0, x)) - 1)
    back = bisect_left(range(rows), 0, key=lambda x: -missing(x, rows))
    return rows - back, back


class _Assignment:
    """The rank of each item, and the rows and work of each rank.

    The largest items come first. Each goes where it adds least to the sum of the squares of all loads: to ranks with
    few rows if it has many rows, and to ranks with little work if it has much.
    """

    def __init__(self, documents: _Documents, share: float) -> None:
        self.documents = documents
        ranks, limit = range(documents.ring_size), documents.most_rows
        self.rows, self.work = [0 for _ in ranks], [0 for _ in ranks]
        self.placed: list[list[tuple[int, _Item]]] = []
        sized = [(max(documents.size(x.rows, x.work) for x in group), group) for group in documents.groups(share)]
        for _, group in sorted(sized, key=lambda one: -one[0]):
            most = max(item.rows for item in group)
            a, b = most / documents.mean_rows**2, max(item.work for item in group) / documents.mean_work**2
            room = [rank for rank in ranks if self.rows[rank] + most <= limit]
            if len(room) < len(group):
                room = nsmallest(len(group), ranks, key=self.rows.__getitem__)
            chosen = nsmallest(len(group), room, key=lambda rank: a * self.rows[rank] + b * self.work[rank])
            self.placed.append(list(zip(sorted(chosen), group, strict=True)))
            self._add(self.placed[-1], 1)

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(start, stop, rank) of all pieces."""
        for group in self.placed:
            for rank, item in group:
                yield from ((start, stop, rank) for start, stop in item.pieces)

    def excess(self) -> tuple[int, float]:
        """By how much the fullest and the busiest rank exceed what they may have."""
        busiest = max(self.work) / self.documents.mean_work
        return max(0, max(self.rows) - self.documents.most_rows), busiest if busiest > _BALANCED else 0.0

    def level(self) -> None:
        """Move the cuts of split documents so that ranks have equal rows and work; then split more documents.

        A document is split, or gets one more rank, to move load from the most loaded rank to the least loaded one.
        """
        split = [i for i, group in enumerate(self.placed) if len(group) > 1]
        for i in split * _ROUNDS:
            if self.excess() == (0, 0.0):
                return
            self._level(i, self.placed[i])
        for _ in range(_MORE_SPLITS * self.documents.ring_size):
            load = self.rows if self.excess()[0] else self.work
            most, least = (pick(range(len(load)), key=load.__getitem__) for pick in (max, min))
            movable = [
                (self.documents.size(item.rows, item.work), i)
                for i, group in enumerate(self.placed)
                for rank, item in group
                if rank == most and item.is_document and all(rank != least for rank, _ in group)
            ]
            if self.excess() == (0, 0.0) or not movable:
                return
            i = max(movable)[1]
            if not self._level(i, sorted([*self.placed[i], (least, _Item((), 0, 0))], key=lambda one: one[0])):
                return

    def _level(self, i: int, group: list[tuple[int, _Item]]) -> bool:
        """Split the document of group ``i`` over the ranks of ``group`` to make their loads equal, if that helps."""
        ranks, items = [rank for rank, _ in group], [item for _, item in group]
        before = self._busiest(ranks)
        if before <= (self.documents.most_rows, int(_BALANCED * self.documents.mean_work)):
            return False
        self._add(self.placed[i], -1)
        wanted = [
            _fill([load[rank] for rank in ranks], total)
            for load, total in ((self.rows, sum(x.rows for x in items)), (self.work, sum(x.work for x in items)))
        ]
        moved = list(zip(ranks, self.documents.split_unevenly(items, *wanted), strict=True))
        self._add(moved, 1)
        if self._busiest(ranks) < before:
            self.placed[i] = moved
            return True
        self._add(moved, -1)
        self._add(self.placed[i], 1)
        return False

    def _busiest(self, ranks: list[int]) -> tuple[int, int]:
        return (
            max(self.documents.most_rows, *(self.rows[rank] for rank in ranks)),
            max(self.work[rank] for rank in ranks),
        )

    def _add(self, group: list[tuple[int, _Item]], sign: int) -> None:
        for rank, item in group:
            self.rows[rank] += sign * item.rows
            self.work[rank] += sign * item.work


def _fill(loads: list[int], total: int) -> list[int]:
    """Split ``total`` so that the loads become as equal as possible.

    >>> _fill([1, 5, 2], 5)
    [3, 0, 2]
    """
    level, filled = 0, 0
    for count, (load, above) in enumerate(pairwise([*sorted(loads), max(loads) + total + 1]), start=1):
        level = load
        if filled + count * (above - load) >= total:
            level += (total - filled) // count
            break
        filled += count * (above - load)
    shares = [max(0, level - load) for load in loads]
    lowest = min(range(len(loads)), key=loads.__getitem__)
    shares[lowest] += total - sum(shares)
    return shares
