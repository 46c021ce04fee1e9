"""How many (query, key) pairs a branch sees in each cell of a matrix: exact counts, at any length, in pure integers."""

from __future__ import annotations

from collections.abc import Sequence

from ringspan.geometry.comb import SegmentRun, segment_runs
from ringspan.geometry.pattern import Branch, SegmentBranch, WindowBranch

Rows = tuple[int, int]  # start .. stop - 1, as positions in the document


def pairs_in_cells(
    branch: Branch, queries: Sequence[Rows], keys: Sequence[Rows], heads: Sequence[int], *, causal: bool = False
) -> list[list[int]]:
    """The pairs that a branch sees in each cell, (ranges of queries) x (ranges of keys), summed over some KV heads.

    A range of queries and one of keys must be equal or have no row in common.

    >>> pairs_in_cells(SegmentBranch(4, 1), [(0, 4), (4, 6)], [(0, 4), (4, 6)], [0], causal=True)
    [[10, 0], [0, 3]]
    """
    if isinstance(branch, WindowBranch):
        window = branch.up_to_own_row() if causal else branch
        return [[len(heads) * _pairs_in_window(rows, columns, window) for columns in keys] for rows in queries]
    counts = []
    ends_of = {cell: _ends(cell, branch, heads) for cell in {*queries, *keys}}
    for cell in queries:
        start, stop = cell
        line, (first, last) = [], ends_of[cell]
        for other in keys:
            if other == cell:
                line.append(_pairs_in_square(cell, branch, heads, causal))
            elif other[1] <= start:  # they share at most the segment that holds the first row of the later range
                shared = _segment(start, branch) == _segment(other[1] - 1, branch)
                line.append(sum(a * b for a, b in zip(first, ends_of[other][1], strict=True)) if shared else 0)
            else:
                shared = not causal and _segment(other[0], branch) == _segment(stop - 1, branch)
                line.append(sum(a * b for a, b in zip(last, ends_of[other][0], strict=True)) if shared else 0)
        counts.append(line)
    return counts


def _pairs_in_square(rows: Rows, branch: SegmentBranch, heads: Sequence[int], causal: bool) -> int:
    """The pairs among rows."""
    total = 0
    for run in segment_runs(*rows, branch):
        selected = _selected(run, branch, heads)
        total += run.segments * sum(m * (m + 1) // 2 if causal else m * m for m in selected)
    return total


def _pairs_in_window(queries: Rows, keys: Rows, window: WindowBranch) -> int:
    """The pairs of a window: the number of those whose rows differ by x is a trapezoid over x, the sum of four ramps.

    >>> _pairs_in_window((0, 2**30), (0, 2**30), WindowBranch(2**20, 0)) == 2**20 * 2**30 + 2**30 - 2**19 * (2**20 + 1)
    True
    """
    (a, b), (c, d) = queries, keys
    if b - 1 - c < -window.right or a - (d - 1) > window.left:
        return 0
    return sum(sign * _ramp(start, window) for start, sign in ((a - d, 1), (a - c, -1), (b - d, -1), (b - c, 1)))


def _ramp(start: int, window: WindowBranch) -> int:
    """The sum of max(0, x - start) over the distances x from a query back to its keys."""
    least = max(-window.right, start + 1 + (-start - 1) % window.rate)
    if least > window.left:
        return 0
    count = (window.left - least) // window.rate + 1
    return count * (least + window.left - 2 * start) // 2


def _segment(row: int, branch: SegmentBranch) -> int:
    return (row + branch.shift) // branch.segment_length


def _ends(rows: Rows, branch: SegmentBranch, heads: Sequence[int]) -> tuple[list[int], list[int]]:
    """Selected rows, for each KV head: in the segment of the first of these rows, and in that of the last."""
    found = list(segment_runs(*rows, branch))
    return _selected(found[0], branch, heads), _selected(found[-1], branch, heads)


def _selected(run: SegmentRun, branch: SegmentBranch, heads: Sequence[int]) -> list[int]:
    """The number of rows that each KV head selects in one segment of a run."""
    lanes = run.lanes(branch)
    return [lanes[head].rows for head in heads]
