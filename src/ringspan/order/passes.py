"""How attention runs with an order: in passes, each with some branches of the pattern and a permutation of the rows.

The engine does not know about orders: it gets rows that are already permuted, so tiles stay combs and triangles. The
results of passes merge exactly. The passes depend only on pattern, order and causality, so all ranks agree on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import overload

import torch
from torch import Tensor

from ringspan.geometry import Dilated, Documents, Full, Pattern, PatternSum, SegmentBranch, Window
from ringspan.layout import Layout
from ringspan.order.base import Order, places_of, rows_and_places, select_rows
from ringspan.order.orders import FoldedOrder


@dataclass(frozen=True)
class Arrangement:
    """The permutation of a rank's rows during a pass: ``rows[i]`` is the row at place i, ``places`` is the inverse."""

    rows: Tensor
    places: Tensor

    @overload
    def arrange(self, x: Tensor, dim: int) -> Tensor: ...
    @overload
    def arrange(self, x: Tensor | None, dim: int) -> Tensor | None: ...
    def arrange(self, x: Tensor | None, dim: int) -> Tensor | None:
        return None if x is None else select_rows(x, dim, self.rows)

    def restore(self, x: Tensor, dim: int) -> Tensor:
        return select_rows(x, dim, self.places)


@dataclass(frozen=True)
class Pass:
    """Branches that are computed together. ``order`` is None if the rows are not permuted."""

    pattern: Pattern
    order: Order | None
    causal: bool

    def arrangement(self, documents: Documents, layout: Layout, rank: int, device: torch.device) -> Arrangement | None:
        """The permutation of the rank's rows, or None."""
        return None if self.order is None else _arrangement(self, documents, layout, rank, device)


def passes(pattern: Pattern, order: Order | None, causal: bool) -> tuple[Pass, ...]:
    """The passes of a call: one, unless the call is causal and reordered. Then each affected branch gets its own.

    Without causality, all branches see the rows along the curve. With it, a query sees the keys that its branch selects
    along the curve and that are not later in the sequence. Each branch therefore needs the rows of each selected set in
    sequence order, so that its tiles are triangles again. A window along the curve has no such sets: it is refused.

    >>> from ringspan import Dilated, Hilbert
    >>> [one.pattern.segment_lengths for one in passes(Dilated((8, 64, 96), (1, 1, 2)), Hilbert.folded(32), True)]
    [(64,), (8,), (96,)]
    """
    if order is None:
        return (Pass(pattern, None, causal),)
    branches = _single_branches(pattern)
    untouched = [one for one in branches if _is_untouched(one, order.period)]
    moved = [one for one in branches if one not in untouched]
    if not moved:
        return (Pass(pattern, None, causal),)
    if not causal:
        return (Pass(pattern, order, causal),)
    for one in moved:
        if isinstance(one, Window):
            raise ValueError(
                f"pattern {one.text} with order={order!r} and causal=True: a window along the curve is not a window of "
                "the sequence, so causality would cut it row by row. Omit order= or the window, or set causal=False"
            )
    together = [] if not untouched else [Pass(_sum(untouched), None, causal)]
    return (*together, *(Pass(one, order, causal) for one in moved))


def shares_pairs(found: Sequence[Pass]) -> bool:
    """Whether the branches of a call may be planned together, so that shared pairs are computed once.

    Not with several passes: rows have another order in each, so a plan of the whole call counts branch by branch.
    """
    return len(found) == 1


def check_causality(order: Order, causal: bool) -> None:
    """Raise unless a causal call can have this order."""
    if causal and not isinstance(order, FoldedOrder):
        raise ValueError(
            f"order={order!r} with causal=True: the order puts later rows before earlier ones. For causality along the "
            "curve, reorder the data once, before the model and the split, and call attention without order=. For a "
            "sequence without a grid, use Hilbert.folded(segment_length)"
        )


def _single_branches(pattern: Pattern) -> list[Pattern]:
    """Patterns with one branch each, whose sum is the pattern."""
    found: list[Pattern] = []
    for part in pattern.parts:
        if isinstance(part, Dilated):
            pairs = zip(part.segment_lengths, part.dilation_rates, strict=True)
            found += [replace(part, segment_lengths=(w,), dilation_rates=(r,)) for w, r in pairs]
        else:
            found.append(part)
    return found


def _sum(patterns: list[Pattern]) -> Pattern:
    return patterns[0] if len(patterns) == 1 else PatternSum(tuple(patterns))


def _is_untouched(pattern: Pattern, period: int) -> bool:
    """Whether a pattern of one branch selects the same sets in any order that moves rows only within periods."""
    if isinstance(pattern, Dilated):
        (length,), (rate,) = pattern.segment_lengths, pattern.dilation_rates
        return rate == 1 and length % period == 0 and pattern.shift % length % period == 0
    return isinstance(pattern, Full)  # all rows are the same set in any order


def check_fits(order: Order, documents: Documents, layout: Layout, *, moves: bool = True) -> None:
    """Raise unless each rank can permute its rows locally, which needs borders between ranks at multiples of a period.

    With ``moves=False`` the order moves no rows, and borders may be anywhere.
    """
    for start, stop in documents.spans():
        if start == stop:
            continue
        order.check_length(stop - start)
        for part in list(layout.rank_spans(start, stop))[1:]:
            if moves and (part.start - start) % order.period:
                raise ValueError(
                    f"{order} moves rows across row {part.start}, where rank {part.rank} of {layout.ring_size} starts "
                    f"(layout {layout.name!r}): order the data once, before the model and before the split, and call "
                    "attention without order="
                )


@lru_cache(maxsize=64)
def _arrangement(one: Pass, documents: Documents, layout: Layout, rank: int, device: torch.device) -> Arrangement:
    assert one.order is not None
    ranges = [torch.empty(0, dtype=torch.int64, device=device)]
    for span in layout.spans(rank):
        for start, stop in documents.spans():
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last:
                rows, _ = rows_and_places(one.order, last - first, device)
                if one.causal:
                    (branch,) = one.pattern.branches(stop - start)
                    assert isinstance(branch, SegmentBranch)
                    rows = _sorted_in_sets(rows, first - start, branch)
                ranges.append(rows + (span.local + first - span.start))
    rows = torch.cat(ranges)
    return Arrangement(rows, places_of(rows))


def _sorted_in_sets(rows: Tensor, first: int, branch: SegmentBranch) -> Tensor:
    """Sort each selected set of a branch among rows along a curve, whose first one has position ``first``.

    Handles all offsets at once: the sets of all heads together are all rows.

    >>> _sorted_in_sets(torch.tensor([3, 1, 2, 0]), 0, SegmentBranch(4, 2)).tolist()
    [2, 0, 3, 1]
    """
    place = torch.arange(first, first + len(rows), device=rows.device) + branch.shift
    sets = place // branch.segment_length * branch.rate + place % branch.segment_length % branch.rate
    by_row = rows.argsort()
    found = torch.empty_like(rows)
    found[sets.argsort(stable=True)] = rows[by_row[sets[by_row].argsort(stable=True)]]
    return found
