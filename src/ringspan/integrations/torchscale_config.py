"""`TorchscaleConfig`: sizes and options of a torchscale LongNet encoder, from the settings that torchscale takes."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor
from torch.nn import functional as F

import ringspan as rs

Padding = Literal["none", "torchscale"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "swish": F.silu}

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
DROPOUTS = ("dropout", "drop_path_rate", "activation_dropout", "attention_dropout")  # no effect in evaluation mode
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
_KNOWN = (*_NEEDED, *_SWITCHES, *_NUMBERS, *_OTHERS_HONOURED, *DROPOUTS, *_ONLY, *_NO_EFFECT)


@dataclass(frozen=True)
class TorchscaleConfig:
    """Sizes and options of a torchscale LongNet encoder.

    ``padding="torchscale"`` gives torchscale's own numbers at any length: torchscale pads sequences to whole segments,
    and segments to multiples of their rate, with zero keys and values that take part in the softmax. They are counted
    here, not computed. ``"none"`` is the definition, without such keys.
    """

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
    dropout: float = 0.0
    drop_path_rate: float = 0.0  # of the last layer; grows linearly from 0 in the first
    activation_dropout: float = 0.0
    attention_dropout: float = 0.0  # refused in training mode
    padding: Padding = "none"

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "mlp_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"width={self.width}, heads={self.heads}: heads must divide width")
        for name in DROPOUTS:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 0 and less than 1")
        if self.padding not in get_args(Padding):
            raise ValueError(f"padding={self.padding!r}: must be {' or '.join(map(repr, get_args(Padding)))}")
        if self.padding == "torchscale" and self.pattern.shift:
            raise ValueError(f"padding='torchscale', shift={self.pattern.shift}: torchscale does not shift segments")

    @staticmethod
    def of(settings: Mapping[str, Any], padding: Padding = "none") -> TorchscaleConfig:
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
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation_fn={activation!r}: must be one of {', '.join(ACTIVATIONS)}")
        lengths, rates = (_whole_numbers(name, settings[name]) for name in ("segment_length", "dilated_ratio"))
        norm_first = switches["encoder_normalize_before"] or switches["subln"]  # torchscale's sub-LayerNorm implies it
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
            padding=padding,
            **{name: _number(name, settings.get(name, 0.0)) for name in DROPOUTS},
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
