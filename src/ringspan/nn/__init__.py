"""Modules: dilated attention as torch.nn layers, rotary positions on a grid, and the loss over a ring."""

from ringspan.nn.cross_entropy import ring_cross_entropy
from ringspan.nn.dilated import DilatedAttention
from ringspan.nn.grid_rotary import GridRotary
from ringspan.nn.multihead import MultiheadDilatedAttention

__all__ = ["DilatedAttention", "GridRotary", "MultiheadDilatedAttention", "ring_cross_entropy"]
