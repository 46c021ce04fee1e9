"""What a parcel holds, found from its name alone: so that its rows can be fetched by somebody who is not its owner.

The owner packs from its own rows; whoever can read the whole sequence, as streaming does, packs the same from that.
"""

from __future__ import annotations

from ringspan.geometry import Documents, Pattern
from ringspan.layout import Layout
from ringspan.planning.parcels import Packing, Parcel, packing
from ringspan.planning.shared import SharedSegment


def packing_from_sequence(
    parcel: Parcel, pattern: Pattern, documents: Documents, layout: Layout, kv_heads: int
) -> Packing:
    """How a parcel is filled from rows of the whole sequence: as its owner fills it, with rows counted from the start.

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
    part = next(layout.parts(parcel.start, min(segment_start + branch.segment_length, stop)))
    offsets = pattern.offsets(branch.rate, kv_heads)
    alone = SharedSegment(parcel.branch, branch.rate, offsets, segment_start, (part,), causal=False)
    return packing(parcel, alone.lanes(0))
