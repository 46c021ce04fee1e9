"""What is to be computed and what must travel: tiles and parcels, from patterns, layouts and plain integers.

Knows no tensor, no device and no process group.
"""

from ringspan.planning.contents import packing_from_sequence
from ringspan.planning.parcels import Message, Packing, Parcel
from ringspan.planning.price import LayoutAdvice, Memory, RingPlan, Sizes, advise_layout
from ringspan.planning.rank import Hop, RankPlan, plan_rank
from ringspan.planning.shared import ByNode, Passing, check_passing
from ringspan.planning.tiles import Tile

__all__ = [
    "ByNode",
    "Hop",
    "LayoutAdvice",
    "Memory",
    "Message",
    "Packing",
    "Parcel",
    "Passing",
    "RankPlan",
    "RingPlan",
    "Sizes",
    "Tile",
    "advise_layout",
    "check_passing",
    "packing_from_sequence",
    "plan_rank",
]
