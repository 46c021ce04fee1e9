"""The keys that one query sees, as ranges of rows: for single rows, at any length of the sequence."""

from __future__ import annotations

from ringspan.geometry.documents import Documents
from ringspan.geometry.pattern import Pattern, WindowBranch


def keys_seen(
    pattern: Pattern, documents: Documents, row: int, *, kv_head: int, kv_heads: int, causal: bool
) -> list[range]:
    """The keys that a row attends to in each branch that selects it, as row ranges; keys of two branches appear twice.

    Straight from the definition (docs/semantics.md), in pure integers. The cost is that of the branches, at any length.

    >>> from ringspan.geometry import Dilated
    >>> keys_seen(Dilated((4, 8), (1, 2)), Documents((16,)), 5, kv_head=1, kv_heads=2, causal=True)
    [range(4, 6), range(1, 6, 2)]
    """
    start, stop = next((a, b) for a, b in documents.spans() if a <= row < b)
    found = []
    for branch in pattern.branches(stop - start, kv_heads):
        if isinstance(branch, WindowBranch):
            back = min(branch.left, row - start) // branch.rate
            ahead = 0 if causal else min(branch.right, stop - 1 - row) // branch.rate
            found.append(range(row - back * branch.rate, row + ahead * branch.rate + 1, branch.rate))
            continue
        w, r, shift, offset = branch.segment_length, branch.rate, branch.shift, branch.offsets[kv_head]
        x = row - start + shift
        if x % w % r != offset:
            continue
        first = x - x % w + offset
        if first < shift:  # the document starts inside the segment
            first += -(-(shift - first) // r) * r
        last = min(x - x % w + w, stop - start + shift, x + 1 if causal else stop - start + shift)
        found.append(range(start + first - shift, start + last - shift, r))
    return found
