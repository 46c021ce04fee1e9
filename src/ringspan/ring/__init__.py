"""Rings: who moves the parcels, over a process group or inside one process."""

from ringspan.ring.errors import RingError
from ringspan.ring.group import Ring
from ringspan.ring.mail import Counters
from ringspan.ring.simulated import SimulatedRing

__all__ = ["Counters", "Ring", "RingError", "SimulatedRing"]
