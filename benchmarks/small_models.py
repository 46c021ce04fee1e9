"""Small versions of Transformers models, and the comparison of ringspan's attention with eager attention in each.

Sizes and inputs are chosen by the names of configuration fields and arguments; no model has code of its own.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AttentionInterface, PreTrainedModel
from transformers.models.auto import modeling_auto

from ringspan.integrations.transformers import register
from ringspan.integrations.transformers_masks import MaskDescription

Verdict = Literal["equal", "refused", "not used", "different", "not built"]
TOKENS, PADDED, WINDOW, VOCABULARY = 24, 7, 8, 99
SOFT_CAP = 2.0  # low enough to change scores
LARGEST = 100_000_000  # parameters
# By the names of configuration fields. Smaller values are kept.
WIDTHS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "model_dim", "hidden_dim"), 64),
    **dict.fromkeys(("encoder_hidden_dim", "decoder_hidden_size", "encoder_hidden_size", "d_embed"), 64),
    **dict.fromkeys(("embedding_size", "projection_dim", "word_embed_proj_dim", "rnn_hidden_size"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "attention_heads", "num_attention_heads_per_layer"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
}
HEAD_WIDTHS: dict[str, int] = {
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
}
COUNTS: dict[str, int] = {
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), 96),
    **dict.fromkeys(("ffn_hidden_size", "mlp_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "depth", "num_mtp_layers", "n_encoder_layers"), 2),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_selected_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
    "max_window_layers": 1,
    **dict.fromkeys(("vocab_size", "text_vocab_size", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 128),
    **dict.fromkeys(("max_seq_len", "max_sequence_length", "seq_length"), 128),
}
IMAGES: dict[str, int] = {**dict.fromkeys(("image_size", "img_size"), 32), "patch_size": 8}
WIDE_HEADS = {**WIDTHS, **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim"), 512)}
# Smallest first: some models constrain how their sizes relate.
SIZES: tuple[dict[str, int], ...] = (
    {**COUNTS, **WIDTHS, **HEAD_WIDTHS, **IMAGES},
    {**COUNTS, **WIDTHS, **HEAD_WIDTHS, **IMAGES, "num_key_value_heads": 4, "head_dim": 8},
    {**COUNTS, **WIDTHS, **IMAGES},
    {**COUNTS, **WIDE_HEADS},
    {**COUNTS, **IMAGES},
    COUNTS,
)
# Fields with the reach of local attention, which is set shorter than the text.
WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention")
EXTRAS = {"s_aux": "sinks", "softcap": "soft cap"}  # by the arguments of attention
TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM")


@dataclass(frozen=True)
class ModelComparison:
    """The verdict on one model class, with its reason."""

    kind: str
    model: str
    verdict: Verdict
    reason: str


def model_classes(kind: str) -> list[str]:
    """The language models of a type, for each of its tasks; the base model if it has none."""
    tables = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS]
    found = [name for table in tables for name in _names(table, kind)]
    return list(dict.fromkeys(found)) or _names(modeling_auto.MODEL_MAPPING_NAMES, kind)[:1]


@contextmanager
def _kept_in(errors: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        errors.append(error)


def _names(table: dict[str, Any], kind: str) -> list[str]:
    found = table.get(kind, ())
    return [found] if isinstance(found, str) else list(found)


def compare(kind: str, model_class: str, **changes: Any) -> ModelComparison:
    """Eager attention against ringspan's, as the model is configured: same weights, same inputs, fp32."""

    def found(verdict: Verdict, reason: str) -> ModelComparison:
        return ModelComparison(kind, model_class, verdict, reason)

    errors: list[Exception] = []
    for sizes in SIZES:
        with _kept_in(errors):  # a model may reject its sizes or inputs in any way
            config = partial(_small_config, kind, model_class, sizes, changes)
            eager = _model(config, model_class, "eager")
            inputs = _fitting_inputs(eager)
            break
    else:
        return found("not built", _sentence(errors[0]))
    seen = _register_observed()
    try:
        ours = _model(config, model_class, "ringspan")
    except Exception as error:
        return found("refused", _sentence(error))
    ours.load_state_dict(eager.state_dict())
    difference = 0.0
    for name, batch in _batches(inputs).items():
        try:
            wanted = _outputs(eager, batch)
        except Exception:  # the model takes no mask
            continue
        try:
            difference = max(difference, _difference(wanted, _outputs(ours, batch), batch))
        except Exception as error:
            return found("refused", _sentence(error))
        if not difference <= _allowed(wanted):
            return found("different", f"{name}: by {difference:.1e}")
    if not seen:
        return found("not used", "never calls ringspan")
    return found("equal", f"within {difference:.0e}: {', '.join(sorted(seen))}")


def _register_observed() -> set[str]:
    """Register ringspan's attention, as configured. The returned set collects what models ask of it."""
    register()
    seen: set[str] = set()
    attention = AttentionInterface()["ringspan"]

    def observed(*args: Any, **options: Any) -> Any:
        masks = [x.pattern.text for x in (*args, *options.values()) if isinstance(x, MaskDescription)]
        seen.update(masks or ["full"])
        seen.update(text for name, text in EXTRAS.items() if options.get(name) is not None)
        return attention(*args, **options)

    AttentionInterface.register("ringspan", observed)
    return seen


def _fitting_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """The first candidate inputs that a model accepts."""
    errors: list[Exception] = []
    for inputs in _candidate_inputs(model):
        with _kept_in(errors):
            _outputs(model, inputs)
            return inputs
    raise errors[0] if errors else ValueError("no known input fits its forward method")


def _model(config: Callable[[], Any], model_class: str, attention: str) -> PreTrainedModel:
    cls = getattr(transformers, model_class)
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in cls._from_config(config()).parameters())
    if parameters > LARGEST:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters with small sizes")
    torch.manual_seed(0)
    model: PreTrainedModel = cls._from_config(config(), attn_implementation=attention).eval()
    _randomize(model)
    return model


def _randomize(model: nn.Module) -> None:
    """Randomize all weights, including those initialized to zero, large enough for attention to matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            if weight.dim() < 2:
                weight.add_(noise, alpha=0.05)
            else:
                weight.copy_(noise / weight[0].numel() ** 0.5)


def _small_config(kind: str, model_class: str, sizes: dict[str, int], changes: dict[str, Any]) -> Any:
    cls = CONFIG_MAPPING[kind]
    config = cls(**{**_small_settings(cls(), sizes), **changes})
    wanted = getattr(transformers, model_class).config_class
    return config if isinstance(config, wanted) else config.get_text_config()


def _small_settings(default: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Arguments for a small version of a configuration and of its sub-configurations."""
    given = default.to_dict()
    numbers = {name: x for name, x in given.items() if isinstance(x, (int, float)) and not isinstance(x, bool)}
    settings: dict[str, Any] = {name: sizes[name] for name, x in numbers.items() if x > sizes.get(name, x)}
    if given.get("num_experts_per_tok", 0) is None:
        settings["num_experts_per_tok"] = 2
    settings |= {name: type(x)(0) for name, x in numbers.items() if name.endswith("dropout")}
    settings |= {name: min(x, VOCABULARY - 1) for name, x in numbers.items() if name.endswith("token_id")}
    settings |= {name: WINDOW for name in WINDOWS if name in given}
    settings |= {name: SOFT_CAP for name in ("attn_logit_softcapping",) if name in numbers}
    settings |= {name: True for name in ("use_sliding_window",) if name in given}
    layers = numbers.get("num_hidden_layers")
    for name, value in given.items():  # layer types: each kind once
        if isinstance(value, list) and len(value) == layers and isinstance(value[0], str):
            kinds = list(dict.fromkeys(value))
            if kinds == ["full_attention"] and "use_sliding_window" in given:  # it is off by default
                kinds = ["sliding_attention", "full_attention"]
            settings[name] = kinds * (2 if len(kinds) == 1 else 1)
            settings["num_hidden_layers"] = len(settings[name])
    for name in getattr(default, "sub_configs", None) or {}:
        part = getattr(default, name, None)
        if part is not None:
            settings[name] = {**_small_settings(part, sizes), "model_type": part.model_type}
    return settings


def _candidate_inputs(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Inputs that a model may accept, the most likely first."""
    generator = torch.Generator().manual_seed(1)
    names = set(inspect.signature(model.forward).parameters)
    ids = torch.randint(10, VOCABULARY - 10, (3, TOKENS), generator=generator)
    size = 32
    for config in (model.config, getattr(model.config, "vision_config", None)):
        value = getattr(config, "image_size", None)
        size = value if isinstance(value, int) else value[0] if isinstance(value, (list, tuple)) else size
    channels = getattr(model.config, "num_channels", 3)
    mels = getattr(model.config, "num_mel_bins", 80)
    patch, frames = getattr(model.config, "patch_size", 8), getattr(model.config, "temporal_patch_size", 1)
    patches = channels * frames * patch**2 if isinstance(patch, int) else 1

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    known = {
        "input_ids": [ids],
        "pixel_values": [noise(3, channels, size, size), noise(3, 8, channels, size, size), noise(32, patches)],
        "input_values": [noise(3, 4000), noise(3, 128, 128)],
        "input_features": [noise(3, mels, 256), noise(3, 256, mels)],
        "inputs_embeds": [noise(3, TOKENS, 64)],
        "decoder_input_ids": [ids],
        "hidden_states": [noise(32, patches)],
        **{name: [torch.tensor([[1, 4, 4]] * 2)] for name in ("grid_thw", "image_grid_thw")},
    }
    usual = [("input_ids",), ("input_ids", "decoder_input_ids"), ("pixel_values",), ("input_ids", "pixel_values")]
    usual += [("input_values",), ("input_features",), ("input_features", "decoder_input_ids"), ("inputs_embeds",)]
    usual += [("hidden_states", "grid_thw"), ("pixel_values", "image_grid_thw"), ("pixel_values", "grid_thw")]
    usual += [("input_values", "decoder_input_ids"), ("pixel_values", "decoder_input_ids")]
    for group in usual:
        if set(group) <= names:
            for values in itertools.product(*(known[name] for name in group)):
                yield dict(zip(group, values, strict=True))


def _batches(inputs: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The inputs, the inputs with the last token changed, and padded inputs on either side."""
    found = {"plain": inputs}
    if "input_ids" in inputs:
        changed = inputs["input_ids"].clone()
        changed[:, -1] += 1
        found["last token changed"] = {**inputs, "input_ids": changed}
        mask = torch.ones_like(changed)
        mask[1, -PADDED:] = 0
        mask[2, :PADDED] = 0
        found["padded"] = {**inputs, "attention_mask": mask}
    return found


def _outputs(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[Tensor]:
    names = inspect.signature(model.forward).parameters
    more = {"use_cache": False} if "use_cache" in names else {}
    torch.manual_seed(0)  # a few models sample even in eval mode
    with torch.no_grad():
        out = model(**inputs, **more)
    return [x for x in _tensors(out) if x.is_floating_point() and x.numel()]


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, dict):
        for part in out.values():
            yield from _tensors(part)
    elif isinstance(out, (list, tuple)):
        for part in out:
            yield from _tensors(part)


def _difference(wanted: list[Tensor], found: list[Tensor], batch: dict[str, Tensor]) -> float:
    """The largest difference relative to the largest value, without padding rows."""
    mask = batch.get("attention_mask")
    difference = 0.0
    for mine, theirs in zip(found, wanted, strict=True):
        if mask is not None:
            if mine.shape[:2] != mask.shape:
                continue
            mine, theirs = mine[mask.bool()], theirs[mask.bool()]  # noqa: PLW2901
        absolute = (mine - theirs).abs().nan_to_num(nan=torch.inf).max().item()
        difference = max(difference, absolute / max(1.0, theirs.abs().nan_to_num().max().item()))
    return difference


def _allowed(outputs: list[Tensor]) -> float:
    """Many models round to fp32 in norms and rotary embeddings, whatever the dtype of their weights."""
    return 100 * torch.finfo(torch.float32).eps


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    known = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    return known if len(known) <= 200 else known[:197] + "..."
