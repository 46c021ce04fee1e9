"""What each rank computes and sends: tiles and parcels, from a pattern, a layout and plain integers.

Uses no tensors, devices or process groups.
"""

from ringspan.planning.cost import RankMemory, Reach, RingPlan, TensorSizes, find_reach
from ringspan.planning.nesting import CPU_COSTS, Optimize, TileCosts, costs_for, parse_costs
from ringspan.planning.rank import Hop, RankPlan, plan_rank
from ringspan.planning.routes import ByNode, Routing, check_routing
from ringspan.planning.shared_segments import packing_from_sequence
from ringspan.planning.tiles import Message, Packing, Parcel, Tile, parcel_lanes

__all__ = [
    "CPU_COSTS",
    "ByNode",
    "Hop",
    "Message",
    "Optimize",
    "Packing",
    "Parcel",
    "RankMemory",
    "RankPlan",
    "Reach",
    "RingPlan",
    "Routing",
    "TensorSizes",
    "Tile",
    "TileCosts",
    "check_routing",
    "costs_for",
    "find_reach",
    "packing_from_sequence",
    "parcel_lanes",
    "parse_costs",
    "plan_rank",
]
