"""Dilated attention as a module without weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ringspan.api import attention
from ringspan.geometry import Dilated, HeadOffsets
from ringspan.ring import Ring, SimulatedRing


class DilatedAttention(nn.Module):
    """LongNet's dilated attention over q, k and v of shape (batch, seq, heads, dim).

    Keyword names are those of ``dilated-attention-pytorch``. The meaning is LongNet's: every head goes
    through every branch, and branches mix by their softmax denominators (docs/semantics.md); that package
    gives each branch heads of its own and normalises by a sum.

    Args:
        segment_lengths, dilation_rates: one of each for every branch.
        softmax_scale: factor of the scores; dim ** -0.5 by default.
        attention_dropout: must be 0 (`no_dropout` says why).
        head_offsets, shift: as in `ringspan.Dilated`.
        kernel, ring: as in `ringspan.attention`. Over a `Ring`, q, k and v are this rank's rows.

    >>> import torch, ringspan as rs
    >>> layer = rs.nn.DilatedAttention([64, 256], [1, 4])
    >>> q, k, v = torch.randn(3, 2, 1000, 4, 16).unbind()
    >>> layer(q, k, v, is_causal=True).shape
    torch.Size([2, 1000, 4, 16])
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
        head_offsets: HeadOffsets = "interleaved",
        shift: int = 0,
        kernel: str | None = None,
        ring: Ring | SimulatedRing | None = None,
    ) -> None:
        super().__init__()
        no_dropout("attention_dropout", attention_dropout)
        self.pattern = Dilated(tuple(segment_lengths), tuple(dilation_rates), head_offsets, shift)
        self.softmax_scale = softmax_scale
        self.kernel = kernel
        self.ring = ring

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        """Output of the shape of ``query``."""
        return attention(
            query,
            key,
            value,
            pattern=self.pattern,
            causal=is_causal,
            scale=self.softmax_scale,
            kernel=self.kernel,
            ring=self.ring,
        )

    def extra_repr(self) -> str:
        return f"{self.pattern}, softmax_scale={self.softmax_scale}, kernel={self.kernel}, ring={self.ring}"


def no_dropout(name: str, rate: float) -> None:
    """Refuse dropout on attention weights: exactness would depend on how the work is cut into tiles."""
    if rate:
        raise ValueError(
            f"{name}={rate}: dropout on attention weights is not supported, because its random mask would depend on "
            "tiles and devices, so that no two ways to compute a layer would agree. Use 0, and torch.nn.Dropout on the "
            "layer's output"
        )
