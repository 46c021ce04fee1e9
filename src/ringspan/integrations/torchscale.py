"""LongNet encoders of torchscale, such as the slide encoders of computational pathology: their weights, our attention.

Modules carry torchscale's names, so that its state dicts load as they are. torchscale itself is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

import ringspan as rs

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}
_NEEDED = (
    *("encoder_embed_dim", "encoder_layers", "encoder_attention_heads", "encoder_ffn_embed_dim"),
    *("segment_length", "dilated_ratio"),
)
# Settings of torchscale that change what is computed, and that we do not have; each must be off.
_REFUSED = ("deepnorm", "multiway", "xpos_rel_pos", "rel_pos_buckets", "max_rel_pos", "moe_freq")


@dataclass(frozen=True)
class TorchscaleConfig:
    """The shape of a torchscale LongNet encoder."""

    width: int
    layers: int
    heads: int
    mlp_width: int
    pattern: rs.Dilated
    norm_eps: float = 1e-5
    sub_norms: bool = True
    norm_first: bool = True
    activation: str = "gelu"

    @staticmethod
    def of(settings: Mapping[str, Any]) -> TorchscaleConfig:
        """From torchscale's own names, as in its ``EncoderConfig``; lists may be text, as it writes them.

        >>> config = TorchscaleConfig.of({"encoder_embed_dim": 64, "encoder_attention_heads": 4, "encoder_layers": 2,
        ...     "encoder_ffn_embed_dim": 128, "segment_length": "[16, 64]", "dilated_ratio": "[1, 4]"})
        >>> config.pattern.segment_lengths, config.pattern.head_offsets
        ((16, 64), 'blocked')
        """
        missing = [name for name in _NEEDED if name not in settings]
        if missing:
            raise ValueError(f"settings lack {', '.join(missing)}: give torchscale's own, as in its EncoderConfig")
        for name in _REFUSED:
            if settings.get(name):
                raise ValueError(f"{name}={settings[name]}: not supported; only encoders without it can be loaded")
        activation = str(settings.get("activation_fn", "gelu"))
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation_fn={activation!r}: must be one of {', '.join(_ACTIVATIONS)}")
        lengths, rates = (_numbers(settings[name]) for name in ("segment_length", "dilated_ratio"))
        return TorchscaleConfig(
            width=int(settings["encoder_embed_dim"]),
            layers=int(settings["encoder_layers"]),
            heads=int(settings["encoder_attention_heads"]),
            mlp_width=int(settings["encoder_ffn_embed_dim"]),
            pattern=rs.Dilated(lengths, rates, head_offsets="blocked"),
            norm_eps=float(settings.get("layernorm_eps", 1e-5)),
            sub_norms=bool(settings.get("subln", True)),
            norm_first=bool(settings.get("normalize_before", True)),
            activation=activation,
        )


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in (json.loads(value) if isinstance(value, str) else value))


class TorchscaleEncoder(nn.Module):
    """A LongNet encoder with torchscale's weights and names: embeddings in, embeddings out, (batch, rows, width).

    Over a `Ring`, rows are this rank's, and ``seq_len`` is the length of the whole sequence.
    """

    def __init__(self, config: TorchscaleConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.layer_norm = nn.LayerNorm(config.width, config.norm_eps) if config.norm_first else None

    @staticmethod
    def load(weights: Mapping[str, Tensor], settings: Mapping[str, Any], prefix: str = "") -> TorchscaleEncoder:
        """An encoder from a torchscale state dict (of names that begin with ``prefix``) and its settings."""
        encoder = TorchscaleEncoder(TorchscaleConfig.of(settings))
        chosen = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
        if not chosen:
            raise ValueError(
                f"prefix={prefix!r}: no weight begins with it; names are like {next(iter(weights), None)!r}"
            )
        encoder = encoder.to(next(iter(chosen.values())).dtype)
        encoder.load_state_dict(chosen)
        return encoder

    def forward(
        self, x: Tensor, *, ring: rs.Ring | rs.SimulatedRing | None = None, seq_len: int | None = None
    ) -> Tensor:
        for layer in self.layers:
            x = layer(x, ring, seq_len)
        return x if self.layer_norm is None else self.layer_norm(x)


class _Layer(nn.Module):
    def __init__(self, config: TorchscaleConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.self_attn = _Attention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.ffn = _FeedForward(config)
        self.final_layer_norm = nn.LayerNorm(config.width, config.norm_eps)

    def forward(self, x: Tensor, ring: Any, seq_len: int | None) -> Tensor:
        if self.norm_first:
            x = x + self.self_attn(self.self_attn_layer_norm(x), ring, seq_len)
            return x + self.ffn(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self.self_attn(x, ring, seq_len))
        return self.final_layer_norm(x + self.ffn(x))


class _Attention(nn.Module):
    def __init__(self, config: TorchscaleConfig) -> None:
        super().__init__()
        self.heads, self.pattern = config.heads, config.pattern
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(config.width, config.width) for _ in range(4))
        self.inner_attn_ln = nn.LayerNorm(config.width, config.norm_eps) if config.sub_norms else nn.Identity()

    def forward(self, x: Tensor, ring: Any, seq_len: int | None) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)) for project in (self.q_proj, self.k_proj, self.v_proj))
        seen = rs.attention(q, k, v, pattern=self.pattern, ring=ring, seq_len=seq_len)
        return self.out_proj(self.inner_attn_ln(seen.flatten(-2)))


class _FeedForward(nn.Module):
    def __init__(self, config: TorchscaleConfig) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[config.activation]
        self.fc1, self.fc2 = nn.Linear(config.width, config.mlp_width), nn.Linear(config.mlp_width, config.width)
        self.ffn_layernorm = nn.LayerNorm(config.mlp_width, config.norm_eps) if config.sub_norms else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        wide = hidden.float() if hidden.dtype.itemsize < 4 else hidden
        hidden = self.activation(wide).type_as(hidden)
        return self.fc2(self.ffn_layernorm(hidden))
