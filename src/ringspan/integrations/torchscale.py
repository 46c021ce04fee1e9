"""`TorchscaleEncoder`: LongNet encoders with torchscale's weights, such as slide encoders in computational pathology.

Modules have torchscale's names, so its state dicts load unchanged. torchscale itself is not needed.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

import ringspan as rs
from ringspan.validation import Lengths, packed_lengths

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "swish": F.silu}

# Every setting of torchscale's EncoderConfig is in one of these groups.
_NEEDED = (
    *("encoder_embed_dim", "encoder_layers", "encoder_attention_heads", "encoder_ffn_embed_dim"),
    *("segment_length", "dilated_ratio"),
)
_SWITCHES = {  # with torchscale's defaults
    "encoder_normalize_before": True,
    "normalize_output": True,
    "subln": True,
    "no_scale_embedding": True,
    "layernorm_embedding": False,
    "no_output_layer": False,
}
_NUMBERS = {"layernorm_eps": 1e-5, "vocab_size": -1}
_OTHERS_HONOURED = ("activation_fn",)
_DROPOUTS = ("dropout", "drop_path_rate", "attention_dropout", "activation_dropout")  # no effect in evaluation mode
_ONLY = {  # settings whose other values are not supported
    "deepnorm": False,
    "multiway": False,
    "xpos_rel_pos": False,
    "rel_pos_buckets": 0,
    "max_rel_pos": 0,
    "moe_freq": 0,
    "use_xmoe": False,
    "flash_attention": True,  # without it torchscale's dilated attention refuses to run, and LongViT is not dilated
}
_NO_EFFECT = (  # on the result of an encoder that has none of the above
    *("moe_top1_expert", "moe_expert_count", "moe_gating_use_fp32", "moe_eval_capacity_token_fraction"),
    *("moe_second_expert_policy", "moe_normalize_gate_prob_before_dropping", "xpos_scale_base"),
    *("bert_init", "share_encoder_input_output_embed", "max_source_positions", "img_size", "patch_size", "in_chans"),
    *("checkpoint_activations", "fsdp", "ddp_rank", "seq_parallel"),
    "block_shift",  # in GigaPath's configurations; no code reads it
)
_KNOWN = (*_NEEDED, *_SWITCHES, *_NUMBERS, *_OTHERS_HONOURED, *_DROPOUTS, *_ONLY, *_NO_EFFECT)


@dataclass(frozen=True)
class TorchscaleConfig:
    """Sizes and options of a torchscale LongNet encoder."""

    width: int
    layers: int
    heads: int
    mlp_width: int
    pattern: rs.Dilated
    norm_eps: float = 1e-5
    sub_norms: bool = True
    norm_first: bool = True
    norm_output: bool = True
    norm_embedding: bool = False
    scale_embedding: bool = False
    activation: str = "gelu"
    dropouts: tuple[str, ...] = ()  # rates other than 0, such as "dropout=0.1"

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "mlp_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"width={self.width}, heads={self.heads}: heads must divide width")

    @staticmethod
    def of(settings: Mapping[str, Any]) -> TorchscaleConfig:
        """Create from the settings of torchscale's ``EncoderConfig``. Lists may be strings, as torchscale writes them.

        Each setting is honoured, has no effect on the result, or is refused by name. Unknown names are refused. Missing
        settings have torchscale's defaults.

        >>> config = TorchscaleConfig.of({"encoder_embed_dim": 64, "encoder_attention_heads": 4, "encoder_layers": 2,
        ...     "encoder_ffn_embed_dim": 128, "segment_length": "[16, 64]", "dilated_ratio": "[1, 4]"})
        >>> config.pattern.segment_lengths, config.pattern.head_offsets
        ((16, 64), 'blocked')
        """
        _check_names(settings)
        switches = {name: _switch(name, settings.get(name, default)) for name, default in _SWITCHES.items()}
        numbers = {name: _number(name, settings.get(name, default)) for name, default in _NUMBERS.items()}
        for name, only in _ONLY.items():
            if settings.get(name, only) != only:
                raise ValueError(
                    f"{name}={settings[name]!r}: not supported; only encoders with {name}={only} can be loaded"
                )
        if numbers["vocab_size"] > 0 and not switches["no_output_layer"]:
            raise ValueError(
                f"no_output_layer=False, vocab_size={settings['vocab_size']}: output layers are not supported; set "
                "no_output_layer=True and apply output_projection to the output of the encoder"
            )
        activation = str(settings.get("activation_fn", "gelu"))
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation_fn={activation!r}: must be one of {', '.join(_ACTIVATIONS)}")
        lengths, rates = (_whole_numbers(name, settings[name]) for name in ("segment_length", "dilated_ratio"))
        norm_first = switches["encoder_normalize_before"] or switches["subln"]  # torchscale's sub-LayerNorm implies it
        dropouts = {name: _number(name, settings.get(name, 0.0)) for name in _DROPOUTS}
        return TorchscaleConfig(
            width=_whole_number("encoder_embed_dim", settings["encoder_embed_dim"]),
            layers=_whole_number("encoder_layers", settings["encoder_layers"]),
            heads=_whole_number("encoder_attention_heads", settings["encoder_attention_heads"]),
            mlp_width=_whole_number("encoder_ffn_embed_dim", settings["encoder_ffn_embed_dim"]),
            pattern=rs.Dilated(lengths, rates, head_offsets="blocked"),
            norm_eps=numbers["layernorm_eps"],
            sub_norms=switches["subln"],
            norm_first=norm_first,
            norm_output=norm_first and switches["normalize_output"],
            norm_embedding=switches["layernorm_embedding"],
            scale_embedding=not switches["no_scale_embedding"],
            activation=activation,
            dropouts=tuple(f"{name}={rate:g}" for name, rate in dropouts.items() if rate),
        )


def _check_names(settings: Mapping[str, Any]) -> None:
    for name in settings:
        if name not in _KNOWN:
            close = difflib.get_close_matches(name, _KNOWN, 1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{name}: not a setting of torchscale's EncoderConfig{meant} Known: {', '.join(_KNOWN)}")
    missing = [name for name in _NEEDED if settings.get(name) in (None, "")]
    if missing:
        raise ValueError(f"missing settings: {', '.join(missing)}; pass those of torchscale's EncoderConfig")


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):  # the string "False" is truthy
        raise ValueError(f"{name}={value!r}: must be True or False")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: must be a finite number")
    return value


def _whole_number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r}: must be a whole number")
    return value


def _whole_numbers(name: str, value: Any) -> tuple[int, ...]:
    try:
        numbers = json.loads(value) if isinstance(value, str) else value
        return tuple(_whole_number(name, number) for number in numbers)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r}: must be a list of whole numbers, such as [1024, 2048]") from None


class TorchscaleEncoder(nn.Module):
    """A LongNet encoder with torchscale's weights and names: embeddings in, embeddings out, (batch, rows, width).

    The input is torchscale's ``token_embeddings``; the encoder scales and normalises them if the settings say so. Over
    a `Ring`, rows are this rank's, and ``seq_len`` is the length of the whole sequence. ``lengths`` and ``cu_seqlens``
    are those of `rs.attention`.
    """

    def __init__(self, config: TorchscaleConfig) -> None:
        super().__init__()
        self.config = config
        self.layernorm_embedding = nn.LayerNorm(config.width, config.norm_eps) if config.norm_embedding else None
        self.layers = nn.ModuleList(_EncoderLayer(config) for _ in range(config.layers))
        self.layer_norm = nn.LayerNorm(config.width, config.norm_eps) if config.norm_output else None

    @staticmethod
    def load(weights: Mapping[str, Tensor], settings: Mapping[str, Any], prefix: str = "") -> TorchscaleEncoder:
        """Create an encoder in evaluation mode from a torchscale state dict and its settings.

        Only names that start with ``prefix`` are used.
        """
        encoder = TorchscaleEncoder(TorchscaleConfig.of(settings))
        chosen = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
        if not chosen:
            raise ValueError(
                f"prefix={prefix!r}: no weight name starts with it; names look like {next(iter(weights), None)!r}"
            )
        dtypes = {x.dtype for x in chosen.values()}
        if len(dtypes) > 1:
            raise ValueError(f"weights are {', '.join(sorted(map(str, dtypes)))}: convert them to one dtype")
        encoder = encoder.to(dtypes.pop())
        encoder.load_state_dict(chosen)
        return encoder.eval()

    def forward(
        self,
        x: Tensor,
        *,
        ring: rs.Ring | rs.SimulatedRing | None = None,
        seq_len: int | None = None,
        lengths: Lengths | None = None,
        cu_seqlens: Lengths | None = None,
    ) -> Tensor:
        options: dict[str, Any] = dict(ring=ring, seq_len=seq_len)
        options["lengths"] = packed_lengths(lengths, cu_seqlens, seq_len if isinstance(ring, rs.Ring) else x.shape[1])
        if self.training and self.config.dropouts:
            raise ValueError(
                f"{', '.join(self.config.dropouts)}: dropout is not supported; call eval(), or set it to 0 to train "
                "without it"
            )
        if self.config.scale_embedding:
            x = x * math.sqrt(self.config.width)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        for layer in self.layers:
            x = layer(x, options)
        return x if self.layer_norm is None else self.layer_norm(x)


class _EncoderLayer(nn.Module):
    def __init__(self, config: TorchscaleConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.self_attn = _EncoderAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.ffn = _EncoderMLP(config)
        self.final_layer_norm = nn.LayerNorm(config.width, config.norm_eps)

    def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        if self.norm_first:
            x = x + self.self_attn(self.self_attn_layer_norm(x), options)
            return x + self.ffn(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self.self_attn(x, options))
        return self.final_layer_norm(x + self.ffn(x))


class _EncoderAttention(nn.Module):
    def __init__(self, config: TorchscaleConfig) -> None:
        super().__init__()
        self.heads, self.pattern = config.heads, config.pattern
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(config.width, config.width) for _ in range(4))
        self.inner_attn_ln = nn.LayerNorm(config.width, config.norm_eps) if config.sub_norms else nn.Identity()

    def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)) for project in (self.q_proj, self.k_proj, self.v_proj))
        out = rs.attention(q, k, v, pattern=self.pattern, **options)
        return self.out_proj(self.inner_attn_ln(out.flatten(-2)))


class _EncoderMLP(nn.Module):
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
