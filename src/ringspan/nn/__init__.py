"""Layers: dilated attention, rotary embeddings on a grid, and the cross-entropy over a ring."""

from ringspan.nn.attention import DilatedAttention, MultiheadDilatedAttention
from ringspan.nn.cross_entropy import ring_cross_entropy
from ringspan.nn.rotary import GridRotary

__all__ = ["DilatedAttention", "GridRotary", "MultiheadDilatedAttention", "ring_cross_entropy"]
