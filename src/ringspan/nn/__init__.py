"""Layers: attention under any pattern, dropout, rotary embeddings on a grid, and the cross-entropy over a ring."""

from ringspan.nn.attention import Attention, DilatedAttention, MultiheadAttention, MultiheadDilatedAttention
from ringspan.nn.cross_entropy import ring_cross_entropy
from ringspan.nn.dropout import DropoutKey, drop_path, row_dropout
from ringspan.nn.rotary import GridRotary

__all__ = [
    "Attention",
    "DilatedAttention",
    "DropoutKey",
    "GridRotary",
    "MultiheadAttention",
    "MultiheadDilatedAttention",
    "drop_path",
    "ring_cross_entropy",
    "row_dropout",
]
