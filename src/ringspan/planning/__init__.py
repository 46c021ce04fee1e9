"""What each rank computes and sends: tiles and parcels, from a pattern, a layout and plain integers.

Uses no tensors, devices or process groups.
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
