"""Which rows see which: patterns, documents and combs, in pure integers.

Nothing in this package uses tensors, devices or process groups.
"""

from ringspan.geometry.comb import Comb, Lane, SegmentRun, group_heads, segment_runs
from ringspan.geometry.documents import Documents, as_int
from ringspan.geometry.pattern import (
    Branch,
    Dilated,
    Full,
    HeadOffsets,
    Pattern,
    parse_pattern,
    unselected_row,
    unselected_warning,
)

__all__ = [
    "Branch",
    "Comb",
    "Dilated",
    "Documents",
    "Full",
    "HeadOffsets",
    "Lane",
    "Pattern",
    "SegmentRun",
    "as_int",
    "group_heads",
    "parse_pattern",
    "segment_runs",
    "unselected_row",
    "unselected_warning",
]
