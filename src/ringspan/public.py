"""The functions and classes that `import ringspan as rs` offers; importing it registers the operators."""

from ringspan.api import attention
from ringspan.decoding import Cache, attention_prefill, attention_step
from ringspan.geometry import Dilated, Full, Pattern
from ringspan.order import Hilbert, Morton, Order, RowMajor, Snake
from ringspan.planning.api import best_layout, plan
from ringspan.ring import Ring, RingError, SimulatedRing
from ringspan.streaming import stream_attention, stream_backward

__all__ = [
    "Cache",
    "Dilated",
    "Full",
    "Hilbert",
    "Morton",
    "Order",
    "Pattern",
    "Ring",
    "RingError",
    "RowMajor",
    "SimulatedRing",
    "Snake",
    "attention",
    "attention_prefill",
    "attention_step",
    "best_layout",
    "plan",
    "stream_attention",
    "stream_backward",
]
