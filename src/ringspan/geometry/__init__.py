"""Which rows see which: patterns, documents and combs, in pure integers.

Nothing in this folder knows a tensor, a device or a process group.
"""

from ringspan.geometry.comb import Comb, Lane, group_heads
from ringspan.geometry.documents import Documents
from ringspan.geometry.integers import as_int
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
from ringspan.geometry.segments import Piece, pieces

__all__ = [
    "Branch",
    "Comb",
    "Dilated",
    "Documents",
    "Full",
    "HeadOffsets",
    "Lane",
    "Pattern",
    "Piece",
    "as_int",
    "group_heads",
    "parse_pattern",
    "pieces",
    "unselected_row",
    "unselected_warning",
]
