"""Topology: which ranks share a node, and what of a plan's traffic crosses from one node to another. Pure integers.

Links inside a node are many times as fast as those between nodes. `ByNode` is a way to pass parcels that knows it; here
its effect is counted, beside that of the ways that do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringspan.planning.price import RingPlan
from ringspan.planning.shared import node_of


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that all ranks together send in one pass: inside nodes, and from node to node.

    ``parcels_across`` are bytes of parcels between nodes, ``gradients_across`` those of their gradients, which travel
    as the parcels do, and home from the end of the route.
    """

    inside: int
    parcels_across: int
    gradients_across: int

    @property
    def across(self) -> int:
        return self.parcels_across + self.gradients_across


def traffic(plan: RingPlan, ranks_per_node: int, *, backward: bool = False) -> Traffic:
    """What a forward pass or, if asked for, a backward pass sends inside nodes and between them.

    >>> from ringspan.geometry import Documents, Full
    >>> from ringspan.layout import Layout
    >>> from ringspan.planning import ByNode, Sizes
    >>> def across(passing):
    ...     ring = RingPlan(Full(), Documents((64,)), Layout("contiguous", 64, 8), False, passing, Sizes(1, 1, 1, 8))
    ...     return traffic(ring, ranks_per_node=4).across
    >>> across("direct"), across("relay"), across(ByNode(4))
    (16384, 7168, 4096)
    """
    inside, parcels_across, gradients_across = 0, 0, 0
    for rank in range(plan.layout.ring_size):
        here = node_of(rank, ranks_per_node)
        for hop in plan.rank(rank).hops:
            moves = [(message.peer, message.parcel.rows * plan.sizes.parcel_row_bytes, False) for message in hop.sends]
            if backward:
                row_bytes = plan.sizes.gradient_row_bytes
                moves += [(m.peer, m.parcel.rows * row_bytes, True) for m in hop.gradients_out]
            for peer, size, is_gradient in moves:
                if node_of(peer, ranks_per_node) == here:
                    inside += size
                elif is_gradient:
                    gradients_across += size
                else:
                    parcels_across += size
    return Traffic(inside, parcels_across, gradients_across)
