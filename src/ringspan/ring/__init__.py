"""Rings: the ranks that share a sequence, over a process group (`Ring`) or simulated in one process."""

from ringspan.ring.ring import Ring
from ringspan.ring.simulated import SimulatedRing
from ringspan.ring.trace import Trace
from ringspan.ring.transport import Counters, RingError

__all__ = ["Counters", "Ring", "RingError", "SimulatedRing", "Trace"]
