"""ringspan: exact dilated (LongNet) attention over sequences that no single device can hold.

>>> import torch, ringspan as rs
>>> q, k, v = torch.randn(3, 1, 4096, 8, 64).unbind()
>>> out = rs.attention(q, k, v, pattern=rs.Dilated((1024, 4096), (1, 4)), causal=True)
"""

from ringspan import kernels, nn
from ringspan.api import attention
from ringspan.geometry import Dilated, Full, Pattern
from ringspan.prices import best_layout, plan
from ringspan.ring import Ring, RingError, SimulatedRing

__version__ = "0.1.0"

__all__ = [
    "Dilated",
    "Full",
    "Pattern",
    "Ring",
    "RingError",
    "SimulatedRing",
    "__version__",
    "attention",
    "best_layout",
    "kernels",
    "nn",
    "plan",
]
