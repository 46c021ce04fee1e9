"""A LongNet encoder with weights, inputs and outputs that torchscale's own code produced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import ringspan as rs
from ringspan.integrations.torchscale import TorchscaleConfig, TorchscaleEncoder

DATA = Path(__file__).parent.parent / "data"
GOLDEN = DATA / "torchscale_longnet_encoder.safetensors"
OTHER_SETTINGS = DATA / "torchscale_settings.safetensors"  # the same weights and inputs, one output for each case


@pytest.fixture(scope="module")
def golden() -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(GOLDEN, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        settings = {name: json.loads(value) for name, value in file.metadata().items()}
    settings.pop("normalize_before")  # not a setting: torchscale ignores unknown names
    return tensors, settings


@pytest.fixture(scope="module")
def encoder(golden: tuple[dict[str, Tensor], dict[str, Any]]) -> TorchscaleEncoder:
    return TorchscaleEncoder.load(*golden, prefix="model.")


def test_the_first_layers_attention_is_torchscales(golden: Any, encoder: TorchscaleEncoder) -> None:
    tensors, _ = golden
    found = encoder.layers[0].self_attn(tensors["input"], {})  # type: ignore[operator, union-attr]
    torch.testing.assert_close(found, tensors["layer0_self_attn_out"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("ring", [None, rs.SimulatedRing(3)], ids=["alone", "ring"])
def test_the_encoder_gives_what_torchscale_gave(golden: Any, encoder: TorchscaleEncoder, ring: Any) -> None:
    tensors, _ = golden
    # torchscale rounds its activations to fp32, also in an fp64 model: two layers of them, normalised at the end.
    rounding = 2 * 2 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(encoder(tensors["input"], ring=ring), tensors["encoder_out"], rtol=0, atol=rounding)


def test_every_setting_that_is_honoured_gives_what_torchscale_gave(golden: Any) -> None:
    """Outputs of torchscale's own code at commit 4d1e0e8, with a dense attention in the place of its CUDA kernel."""
    tensors, settings = golden
    weights = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
    seen: set[str] = set()
    with safe_open(OTHER_SETTINGS, "pt") as file:
        weights |= {name: file.get_tensor(name) for name in ("layernorm_embedding.weight", "layernorm_embedding.bias")}
        for case, changes in file.metadata().items():
            changed = {**settings, **json.loads(changes)}
            wanted = file.get_tensor(case).double()
            encoder = TorchscaleEncoder(TorchscaleConfig.of(changed))
            held = {name: x for name, x in weights.items() if name in encoder.state_dict()}
            found = TorchscaleEncoder.load(held, changed)(tensors["input"][:1])
            # Two layers, whose activations torchscale rounds to fp32.
            rounding = 2 * 2 * torch.finfo(torch.float32).eps * wanted.abs().max().item()
            torch.testing.assert_close(found, wanted, rtol=0, atol=rounding, msg=lambda text: f"{changes}: {text}")  # noqa: B023
            seen |= json.loads(changes).keys()
    assert seen == {
        *("subln", "encoder_normalize_before", "normalize_output", "no_scale_embedding", "layernorm_embedding"),
        *("activation_fn", "layernorm_eps"),
    }


HARMLESS = {
    "moe_top1_expert": True,
    "moe_expert_count": 8,
    "moe_gating_use_fp32": False,
    "moe_eval_capacity_token_fraction": 0.5,
    "moe_second_expert_policy": "all",
    "moe_normalize_gate_prob_before_dropping": True,
    "xpos_scale_base": 256,
    "bert_init": True,
    "share_encoder_input_output_embed": True,
    "max_source_positions": 10,
    "img_size": 1024,
    "patch_size": 8,
    "in_chans": 1,
    "checkpoint_activations": True,
    "fsdp": True,
    "ddp_rank": 3,
    "seq_parallel": True,
    "block_shift": True,
    "vocab_size": 64010,  # with no_output_layer, which the golden settings have
    "no_output_layer": False,  # without a vocabulary
}


@pytest.mark.parametrize("name", HARMLESS)
def test_settings_without_an_effect_are_accepted(golden: Any, name: str) -> None:
    _, settings = golden
    assert TorchscaleConfig.of({**settings, name: HARMLESS[name]}) == TorchscaleConfig.of(settings)


REFUSED = {
    "deepnorm": True,
    "multiway": True,
    "xpos_rel_pos": True,
    "rel_pos_buckets": 32,
    "max_rel_pos": 128,
    "moe_freq": 2,
    "use_xmoe": True,
    "flash_attention": False,
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_we_do_not_compute_are_refused_by_name(golden: Any, name: str) -> None:
    _, settings = golden
    with pytest.raises(ValueError, match=f"{name}={REFUSED[name]}: not supported; only encoders with {name}="):
        TorchscaleConfig.of({**settings, name: REFUSED[name]})


@pytest.mark.parametrize("name", ["dropout", "drop_path_rate", "attention_dropout", "activation_dropout"])
def test_dropout_is_ignored_in_evaluation_and_refused_in_training(golden: Any, name: str) -> None:
    tensors, settings = golden
    encoder = TorchscaleEncoder.load(tensors, {**settings, name: 0.1}, prefix="model.")
    assert not encoder.training
    x = tensors["input"]
    assert torch.equal(encoder(x), TorchscaleEncoder.load(tensors, settings, prefix="model.")(x))
    with pytest.raises(ValueError, match=rf"{name}=0\.1: .* call eval\(\)"):
        encoder.train()(x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalize_before": True}, r"normalize_before: not a setting .*; did you mean encoder_normalize_before\?"),
        ({"speed": 1}, "speed: not a setting of torchscale's EncoderConfig.*Known: encoder_embed_dim, "),
        ({"activation_fn": "tanh"}, "activation_fn='tanh': must be one of gelu, relu, swish"),
        ({"vocab_size": 9, "no_output_layer": False}, "no_output_layer=False, vocab_size=9"),
        ({"subln": "False"}, "subln='False': must be True or False"),
        ({"layernorm_eps": "small"}, "layernorm_eps='small': must be a finite number"),
        ({"segment_length": "[16, "}, r"segment_length='\[16, ': must be a list of whole numbers"),
        ({"segment_length": [16.5, 32, 96]}, r"segment_length=\[16.5, 32, 96\]: must be a list of whole numbers"),
        ({"segment_length": None}, "missing settings: segment_length"),
        ({"dilated_ratio": "[1, 2]"}, "3 segment_lengths but 2 dilation_rates"),
        ({"encoder_attention_heads": 5}, "width=48, heads=5"),
        ({"encoder_layers": 0}, "layers=0: must be at least 1"),
    ],
)
def test_other_wrong_settings_are_refused_by_name(golden: Any, changes: dict[str, Any], message: str) -> None:
    _, settings = golden
    with pytest.raises(ValueError, match=message):
        TorchscaleConfig.of({**settings, **changes})


def test_what_cannot_be_loaded_is_refused(golden: Any) -> None:
    tensors, settings = golden
    with pytest.raises(ValueError, match="missing settings: encoder_layers"):
        TorchscaleConfig.of({name: value for name, value in settings.items() if name != "encoder_layers"})
    with pytest.raises(ValueError, match=r"encoder_layers=2\.5: must be a whole number"):
        TorchscaleConfig.of({**settings, "encoder_layers": 2.5})
    with pytest.raises(ValueError, match=r"prefix='slide\.': no weight name starts with it"):
        TorchscaleEncoder.load(tensors, settings, prefix="slide.")
    with pytest.raises(RuntimeError, match="Missing key"):
        TorchscaleEncoder.load(tensors, {**settings, "encoder_layers": 3}, prefix="model.")
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"layer_norm.weight"'):
        TorchscaleEncoder.load(tensors, {**settings, "normalize_output": False}, prefix="model.")
    mixed = {**tensors, "model.layer_norm.bias": tensors["model.layer_norm.bias"].float()}
    with pytest.raises(ValueError, match=r"weights are torch.float32, torch.float64: convert them to one dtype"):
        TorchscaleEncoder.load(mixed, settings, prefix="model.")


def test_packed_documents_equal_documents_on_their_own(golden: Any, encoder: TorchscaleEncoder) -> None:
    x = golden[0]["input"][:1]
    rows = x.shape[1]
    rounding = 2 * 2 * torch.finfo(torch.float32).eps  # of the activations in two layers
    wanted = torch.cat([encoder(x[:, :20]), encoder(x[:, 20:])], 1)
    for documents in (dict(lengths=(20, rows - 20)), dict(cu_seqlens=(0, 20, rows))):
        torch.testing.assert_close(encoder(x, **documents), wanted, rtol=0, atol=rounding)
