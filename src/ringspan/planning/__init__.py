"""What is to be computed and what must travel: tiles and parcels, from patterns, layouts and plain integers.

Knows no tensor, no device and no process group.
"""

from ringspan.planning.cost import RankMemory, RingPlan, TensorSizes
from ringspan.planning.parcels import Message, Packing, Parcel
from ringspan.planning.rank import Hop, RankPlan, plan_rank
from ringspan.planning.reach import Reach, find_reach
from ringspan.planning.routes import ByNode, Routing, check_routing, packing_from_sequence
from ringspan.planning.tiles import Tile

__all__ = [
    "ByNode",
    "Hop",
    "Message",
    "Packing",
    "Parcel",
    "RankMemory",
    "RankPlan",
    "Reach",
    "RingPlan",
    "Routing",
    "TensorSizes",
    "Tile",
    "check_routing",
    "find_reach",
    "packing_from_sequence",
    "plan_rank",
]
