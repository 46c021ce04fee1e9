"""The functions and classes that `import ringspan as rs` offers; importing it registers the operators."""

from ringspan.api import attention
from ringspan.geometry import Dilated, Full, Pattern
from ringspan.prices import best_layout, plan
from ringspan.ring import Ring, RingError, SimulatedRing

__all__ = [
    "Dilated",
    "Full",
    "Pattern",
    "Ring",
    "RingError",
    "SimulatedRing",
    "attention",
    "best_layout",
    "plan",
]
