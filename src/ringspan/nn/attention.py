"""Attention as modules: `Attention` without weights, `MultiheadAttention` with projections, and both for `Dilated`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringspan.api import attention
from ringspan.geometry import Dilated, HeadOffsets, Pattern, check_pattern
from ringspan.ring import Ring, SimulatedRing
from ringspan.validation import Lengths


class Attention(nn.Module):
    """Attention under a pattern, over q, k and v of shape (batch, seq, heads, head_dim).

    Args:
        pattern: `Full()`, `Window(...)`, `Dilated(...)`, or a sum.
        scale, softcap, kernel, ring: as in `ringspan.attention`. Over a `Ring`, q, k and v are this rank's rows.

    >>> import torch, ringspan as rs
    >>> layer = rs.nn.Attention(pattern=rs.Window(63) + rs.Dilated((256,), (4,)))
    >>> q, k, v = torch.randn(3, 2, 1000, 4, 16).unbind()
    >>> layer(q, k, v, is_causal=True).shape
    torch.Size([2, 1000, 4, 16])
    """

    def __init__(
        self,
        *,
        pattern: Pattern,
        scale: float | None = None,
        softcap: float | None = None,
        kernel: str | None = None,
        ring: Ring | SimulatedRing | None = None,
    ) -> None:
        super().__init__()
        check_pattern(pattern, kv_heads=1)  # the heads of k and v are checked in every call
        self.pattern = pattern
        self.scale = scale
        self.softcap = softcap
        self.kernel = kernel
        self.ring = ring

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        *,
        seq_len: int | None = None,
        lengths: Lengths | None = None,
        cu_seqlens: Lengths | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Output of the shape of ``query``. The keyword arguments are those of `ringspan.attention`."""
        return attention(
            query,
            key,
            value,
            pattern=self.pattern,
            causal=is_causal,
            scale=self.scale,
            softcap=self.softcap,
            sinks=sinks,
            lengths=lengths,
            cu_seqlens=cu_seqlens,
            kernel=self.kernel,
            ring=self.ring,
            seq_len=seq_len,
        )

    def extra_repr(self) -> str:
        return f"{self.pattern}, scale={self.scale}, softcap={self.softcap}, kernel={self.kernel}, ring={self.ring}"


class MultiheadAttention(nn.Module):
    """Projections around `Attention`.

    Args:
        embed_dim: width of the layer, a multiple of ``num_heads``.
        num_heads: number of query heads.
        pattern, scale, softcap, kernel, ring: as in `Attention`. Over a `Ring` the weights are replicated, and each
            rank computes the gradients of its own rows: sum them over the ring with an all-reduce. FSDP and DDP average
            instead, so multiply the loss by the number of ranks there.
        sinks: adds the parameter ``sinks`` (num_heads,): for each head, a learned logit that joins the softmax but has
            no value. It starts at 0, so a new layer divides by 1 plus the sum of the exponentials.
        kv_heads: number of heads of keys and values, a divisor of ``num_heads``; ``num_heads`` by default.
        bias: whether the projections have a bias.
        layer_norm, layer_norm_eps: a layer norm before the output projection, as in MAGNETO and LongNet.
        gamma_init: gain of the value and output projections. MAGNETO derives it from the depth of the model.

    >>> import torch, ringspan as rs
    >>> layer = rs.nn.MultiheadAttention(64, 4, pattern=rs.Window(127), sinks=True, kv_heads=2)
    >>> x = torch.randn(2, 1000, 64)
    >>> y, _ = layer(x, x, x, is_causal=True)
    >>> y.shape
    torch.Size([2, 1000, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        pattern: Pattern,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        kernel: str | None = None,
        ring: Ring | SimulatedRing | None = None,
        kv_heads: int | None = None,
        bias: bool = True,
        layer_norm: bool = False,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads={num_heads}: must divide embed_dim={embed_dim}")
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(f"kv_heads={kv_heads}: must divide num_heads={num_heads}")
        check_pattern(pattern, kv_heads)
        self.num_heads, self.kv_heads, self.gamma_init = num_heads, kv_heads, gamma_init
        kv_dim = embed_dim // num_heads * kv_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(embed_dim, kv_dim, bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(embed_dim, kv_dim, bias, device=device, dtype=dtype)
        self.attention = Attention(pattern=pattern, scale=scale, softcap=softcap, kernel=kernel, ring=ring)
        self.sinks = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype)) if sinks else None
        self.norm = nn.LayerNorm(embed_dim, layer_norm_eps, device=device, dtype=dtype) if layer_norm else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """MAGNETO's: Xavier, with gain ``gamma_init`` for value and output projections. Biases and sinks are 0."""
        gains = {self.q_proj: 1.0, self.k_proj: 1.0, self.v_proj: self.gamma_init, self.out_proj: self.gamma_init}
        for proj, gain in gains.items():
            nn.init.xavier_normal_(proj.weight, gain=gain)
            if proj.bias is not None:
                nn.init.zeros_(proj.bias)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        if self.norm is not None:
            self.norm.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        *,
        seq_len: int | None = None,
        lengths: Lengths | None = None,
        cu_seqlens: Lengths | None = None,
        **masks: Any,
    ) -> tuple[Tensor, None]:
        """Output (batch, seq, embed_dim), and None in place of the attention weights, which are never materialised.

        ``seq_len``, ``lengths`` and ``cu_seqlens`` are those of `ringspan.attention`. The masks of
        `torch.nn.MultiheadAttention` are refused.
        """
        _refuse_masks(masks)
        q = self.q_proj(query).unflatten(-1, (self.num_heads, -1))
        k = self.k_proj(key).unflatten(-1, (self.kv_heads, -1))
        v = self.v_proj(value).unflatten(-1, (self.kv_heads, -1))
        documents: dict[str, Any] = dict(seq_len=seq_len, lengths=lengths, cu_seqlens=cu_seqlens)
        x = self.attention(q, k, v, is_causal, sinks=self.sinks, **documents).flatten(-2)
        if self.norm is not None:
            x = self.norm(x)
        return self.out_proj(x), None


class DilatedAttention(Attention):
    """`Attention` under `Dilated`, with the name and the arguments of ``dilated-attention-pytorch``.

    The semantics are those of the LongNet paper: every head uses every branch, and branches mix by their softmax
    denominators (docs/semantics.md). That package gives each branch its own heads and normalises by a sum.

    Args:
        segment_lengths, dilation_rates: one of each per branch.
        head_offsets, shift: as in `ringspan.Dilated`.
        attention_dropout: must be 0 (see `no_dropout`).
        options: the other arguments of `Attention`.

    >>> import torch, ringspan as rs
    >>> layer = rs.nn.DilatedAttention(segment_lengths=[64, 256], dilation_rates=[1, 4])
    >>> q, k, v = torch.randn(3, 2, 1000, 4, 16).unbind()
    >>> layer(q, k, v, is_causal=True).shape
    torch.Size([2, 1000, 4, 16])
    """

    def __init__(
        self,
        *,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        head_offsets: HeadOffsets = "interleaved",
        shift: int = 0,
        attention_dropout: float = 0.0,
        **options: Any,
    ) -> None:
        no_dropout("attention_dropout", attention_dropout)
        pattern = Dilated(tuple(segment_lengths), tuple(dilation_rates), head_offsets, shift)
        super().__init__(pattern=pattern, **options)


class MultiheadDilatedAttention(MultiheadAttention):
    """`MultiheadAttention` under `Dilated`, with a layer norm before the output projection (MAGNETO, LongNet).

    Keyword names, parameter names and initialisation follow ``dilated-attention-pytorch``. `DilatedAttention` states
    where the semantics differ.

    Args:
        embed_dim, num_heads: as in `MultiheadAttention`.
        segment_lengths, dilation_rates, head_offsets, shift: as in `DilatedAttention`.
        dropout: must be 0.
        layer_norm: whether there is a norm before the output projection.
        options: the other arguments of `MultiheadAttention`.

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
        *,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        head_offsets: HeadOffsets = "interleaved",
        shift: int = 0,
        dropout: float = 0.0,
        layer_norm: bool = True,
        **options: Any,
    ) -> None:
        no_dropout("dropout", dropout)
        pattern = Dilated(tuple(segment_lengths), tuple(dilation_rates), head_offsets, shift)
        super().__init__(embed_dim, num_heads, pattern=pattern, layer_norm=layer_norm, **options)


def no_dropout(name: str, rate: float) -> None:
    """Raise if ``rate`` is not 0: the random mask would depend on how the work is split into tiles."""
    if rate:
        raise ValueError(
            f"{name}={rate}: dropout on attention weights is not supported, because its random mask would depend on "
            "tiles and devices, and results would differ between ring sizes. Use 0, and torch.nn.Dropout on the "
            "layer's output"
        )


_WAYS_OUT = {
    "attn_mask": "the pattern decides what is seen; pass is_causal=True for causality",
    "key_padding_mask": "pack the sequences into one row and pass lengths= or cu_seqlens=",
    "need_weights": "attention weights are never materialised; use rs.attention_weights for the rows you want to see",
    "average_attn_weights": "attention weights are never materialised; leave it out",
}


def _refuse_masks(arguments: dict[str, Any]) -> None:
    """Accept arguments of `torch.nn.MultiheadAttention` that change nothing; refuse the others by name."""
    for name, value in arguments.items():
        if name not in _WAYS_OUT:
            raise TypeError(f"{name}: not an argument of this layer; pass seq_len, lengths or cu_seqlens")
        if value is not None and value is not False and name != "average_attn_weights":
            found = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name}={found}: not supported: {_WAYS_OUT[name]}")
