"""Rings: who moves the parcels, over a process group or inside one process."""

from ringspan.ring.ring import Ring
from ringspan.ring.simulated import SimulatedRing
from ringspan.ring.transport import Counters, RingError

__all__ = ["Counters", "Ring", "RingError", "SimulatedRing"]
