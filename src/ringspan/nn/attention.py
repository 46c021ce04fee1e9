"""Dilated attention as a module without weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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


class MultiheadDilatedAttention(nn.Module):
    """Projections around dilated attention, with a layer norm before the output projection (MAGNETO, LongNet).

    Keyword names, parameter names and initialisation are those of ``dilated-attention-pytorch``, so that its
    users change an import; `DilatedAttention` says where the meaning differs.

    Args:
        embed_dim: width of the layer, a multiple of ``num_heads``.
        num_heads: query heads.
        dilation_rates, segment_lengths: one of each for every branch.
        dropout: must be 0.
        bias: whether the projections have one.
        layer_norm, layer_norm_eps: the norm before the output projection.
        gamma_init: gain of the value and output projections; MAGNETO makes it depend on the model's depth.
        kv_heads: heads of keys and values, a divisor of ``num_heads``; ``num_heads`` by default.
        head_offsets, shift, kernel, ring: as in `DilatedAttention`. Over a `Ring` the weights are replicated, and the
            gradients of each rank are those of its own rows: sum them over the ring (an all-reduce; FSDP and DDP
            average, so multiply the loss by the number of ranks there).

    >>> import torch, ringspan as rs
    >>> layer = rs.nn.MultiheadDilatedAttention(64, 4, segment_lengths=[64, 256], dilation_rates=[1, 4])
    >>> x = torch.randn(2, 1000, 64)
    >>> y, _ = layer(x, x, x, is_causal=True)
    >>> y.shape
    torch.Size([2, 1000, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dilation_rates: Sequence[int],
        segment_lengths: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kv_heads: int | None = None,
        head_offsets: HeadOffsets = "interleaved",
        shift: int = 0,
        kernel: str | None = None,
        ring: Ring | SimulatedRing | None = None,
    ) -> None:
        super().__init__()
        no_dropout("dropout", dropout)
        kv_heads = num_heads if kv_heads is None else kv_heads
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads={num_heads}: must divide embed_dim={embed_dim}")
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(f"kv_heads={kv_heads}: must divide num_heads={num_heads}")
        self.num_heads, self.kv_heads, self.gamma_init = num_heads, kv_heads, gamma_init
        kv_dim = embed_dim // num_heads * kv_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(embed_dim, kv_dim, bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(embed_dim, kv_dim, bias, device=device, dtype=dtype)
        self.attention = DilatedAttention(
            segment_lengths, dilation_rates, head_offsets=head_offsets, shift=shift, kernel=kernel, ring=ring
        )
        self.norm = nn.LayerNorm(embed_dim, layer_norm_eps, device=device, dtype=dtype) if layer_norm else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """MAGNETO's initialisation: Xavier, with gain ``gamma_init`` where values flow; biases are 0."""
        gains = {self.q_proj: 1.0, self.k_proj: 1.0, self.v_proj: self.gamma_init, self.out_proj: self.gamma_init}
        for proj, gain in gains.items():
            nn.init.xavier_normal_(proj.weight, gain=gain)
            if proj.bias is not None:
                nn.init.zeros_(proj.bias)
        if self.norm is not None:
            self.norm.reset_parameters()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> tuple[Tensor, None]:
        """Output (batch, seq, embed_dim), and None in place of the attention weights, which never exist."""
        q = self.q_proj(query).unflatten(-1, (self.num_heads, -1))
        k = self.k_proj(key).unflatten(-1, (self.kv_heads, -1))
        v = self.v_proj(value).unflatten(-1, (self.kv_heads, -1))
        x = self.attention(q, k, v, is_causal=is_causal).flatten(-2)
        if self.norm is not None:
            x = self.norm(x)
        return self.out_proj(x), None
