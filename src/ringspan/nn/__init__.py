"""Modules: dilated attention as torch.nn layers."""

from ringspan.nn.dilated import DilatedAttention
from ringspan.nn.multihead import MultiheadDilatedAttention

__all__ = ["DilatedAttention", "MultiheadDilatedAttention"]
