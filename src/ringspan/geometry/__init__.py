"""Which rows see which: patterns, documents and combs, in pure integers.

Nothing in this package uses tensors, devices or process groups.
"""

from ringspan.geometry.band import BandPart, Mask, band
from ringspan.geometry.comb import Comb, Lane, SegmentRun, group_heads, segment_runs
from ringspan.geometry.documents import Documents, as_int, as_positions
from ringspan.geometry.keys import keys_seen
from ringspan.geometry.pattern import (
    Branch,
    Dilated,
    Full,
    HeadOffsets,
    Pattern,
    PatternSum,
    SegmentBranch,
    Window,
    WindowBranch,
    check_pattern,
    parse_pattern,
    unselected_row,
    unselected_warning,
)

__all__ = [
    "BandPart",
    "Branch",
    "Comb",
    "Dilated",
    "Documents",
    "Full",
    "HeadOffsets",
    "Lane",
    "Mask",
    "Pattern",
    "PatternSum",
    "SegmentBranch",
    "SegmentRun",
    "Window",
    "WindowBranch",
    "as_int",
    "as_positions",
    "band",
    "check_pattern",
    "group_heads",
    "keys_seen",
    "parse_pattern",
    "segment_runs",
    "unselected_row",
    "unselected_warning",
]
