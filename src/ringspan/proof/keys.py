"""Which keys a query sees, as progressions, straight from the definition (docs/semantics.md). Pure integers.

Shares no code with the planner: no combs, no tiles, no shards. Costs no more than there are branches, at any length.
"""

from __future__ import annotations

from ringspan.geometry import Documents, Pattern


def keys_seen(
    pattern: Pattern, documents: Documents, row: int, *, kv_head: int, kv_heads: int, causal: bool
) -> list[range]:
    """The keys that a row sees in each branch that selects it, as rows of the sequence; one seen twice is listed twice.

    >>> from ringspan.geometry import Dilated
    >>> keys_seen(Dilated((4, 8), (1, 2)), Documents((16,)), 5, kv_head=1, kv_heads=2, causal=True)
    [range(4, 6), range(1, 6, 2)]
    """
    start, stop = next((a, b) for a, b in documents.spans() if a <= row < b)
    found = []
    for branch in pattern.branches(stop - start):
        w, r, shift = branch.segment_length, branch.rate, branch.shift
        offset = pattern.offsets(r, kv_heads)[kv_head]
        x = row - start + shift
        if x % w % r != offset:
            continue
        first = x - x % w + offset
        if first < shift:  # the document begins in the middle of the segment
            first += -(-(shift - first) // r) * r
        last = min(x - x % w + w, stop - start + shift, x + 1 if causal else stop - start + shift)
        found.append(range(start + first - shift, start + last - shift, r))
    return found
