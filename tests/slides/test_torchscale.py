"""A LongNet encoder with weights, inputs and outputs that torchscale's own code produced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

import ringspan as rs
from ringspan.integrations.torchscale import TorchscaleConfig, TorchscaleEncoder, padded_keys
from tests.counting import CountingMode
from tests.strategies import examples

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


RATES = ["dropout", "drop_path_rate", "attention_dropout", "activation_dropout"]


@pytest.mark.parametrize("name", RATES)
def test_dropout_is_ignored_in_evaluation(golden: Any, name: str) -> None:
    tensors, settings = golden
    encoder = TorchscaleEncoder.load(tensors, {**settings, name: 0.1}, prefix="model.")
    assert not encoder.training
    x = tensors["input"]
    wanted = TorchscaleEncoder.load(tensors, settings, prefix="model.")(x)
    assert torch.equal(encoder(x), wanted)
    assert torch.equal(encoder(x, dropout_key=rs.nn.DropoutKey(0)), wanted)


@pytest.mark.parametrize("name", [name for name in RATES if name != "attention_dropout"])
def test_each_dropout_needs_a_key_in_training_and_changes_the_result(golden: Any, name: str) -> None:
    tensors, settings = golden
    encoder = TorchscaleEncoder.load(tensors, {**settings, name: 0.5}, prefix="model.").train()
    x = tensors["input"]
    with pytest.raises(ValueError, match=rf"{name}=0\.5: .* dropout_key=rs\.nn\.DropoutKey\(seed, step\)"):
        encoder(x)
    found = [encoder(x, dropout_key=rs.nn.DropoutKey(0, step)) for step in range(8)]
    assert torch.equal(found[0], encoder(x, dropout_key=rs.nn.DropoutKey(0, 0)))
    assert not any(torch.equal(found[0], other) for other in found[1:4])
    assert not torch.equal(found[0], encoder.eval()(x))


def test_attention_dropout_is_refused_in_training(golden: Any) -> None:
    tensors, settings = golden
    encoder = TorchscaleEncoder.load(tensors, {**settings, "attention_dropout": 0.1}, prefix="model.").train()
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1: .* call eval\(\)"):
        encoder(tensors["input"], dropout_key=rs.nn.DropoutKey(0))


def dense_training_layer(layer: Any, x: Tensor, rates: dict[str, float], key: rs.nn.DropoutKey, depth: int) -> Tensor:
    """A layer as torchscale's code applies it: dropout, stochastic depth and residual connection, in this order."""
    positions = torch.arange(x.shape[1])

    def drop(y: Tensor, rate: float, place: int) -> Tensor:
        return rs.nn.row_dropout(y, rate, key=key.at(place, depth), positions=positions)

    y = drop(layer.self_attn(layer.self_attn_layer_norm(x), {}), rates["dropout"], 1)
    x = x + rs.nn.drop_path(y, rates["drop_path_rate"], key=key.at(4, depth))
    hidden = torch.nn.functional.gelu(layer.ffn.fc1(layer.final_layer_norm(x)))
    hidden = layer.ffn.ffn_layernorm(drop(hidden, rates["activation_dropout"], 2))
    y = drop(layer.ffn.fc2(hidden), rates["dropout"], 3)
    return x + rs.nn.drop_path(y, rates["drop_path_rate"], key=key.at(5, depth))


def test_numbers_are_dropped_where_torchscale_drops_them(golden: Any) -> None:
    tensors, settings = golden
    rates = dict(dropout=0.3, drop_path_rate=0.4, activation_dropout=0.2)
    encoder = TorchscaleEncoder.load(tensors, {**settings, **rates}, prefix="model.").train()
    x, key = tensors["input"], rs.nn.DropoutKey(3, 4)
    wanted = rs.nn.row_dropout(x, 0.3, key=key.at(0), positions=torch.arange(x.shape[1]))
    for depth, layer in enumerate(encoder.layers):
        share = depth / (len(encoder.layers) - 1)  # stochastic depth grows from 0 in the first layer
        wanted = dense_training_layer(layer, wanted, {**rates, "drop_path_rate": 0.4 * share}, key, depth)
    assert encoder.layer_norm is not None
    found = encoder(x, dropout_key=key)
    torch.testing.assert_close(found, encoder.layer_norm(wanted), rtol=0, atol=1e-12)


def test_recomputed_layers_drop_the_same_numbers_and_attend_once(golden: Any) -> None:
    tensors, settings = golden
    rates = dict(dropout=0.3, drop_path_rate=0.4, activation_dropout=0.2)
    encoder = TorchscaleEncoder.load(tensors, {**settings, **rates}, prefix="model.", padding="torchscale").train()
    x, found = tensors["input"], []
    for recompute in (False, True):
        encoder.checkpoint_layers(recompute)
        encoder.zero_grad()
        with CountingMode() as mode:
            out = encoder(x, dropout_key=rs.nn.DropoutKey(5))
            (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        assert mode.calls == {"ringspan::attention": 2, "ringspan::attention_backward": 2}
        found.append([out, *(weight.grad for weight in encoder.parameters())])
    for have, want in zip(*found, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


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
        ({"dropout": 1.0}, "dropout=1.0: must be at least 0 and less than 1"),
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


@st.composite
def padded_cases(draw: st.DrawFn) -> tuple[rs.Dilated, int, int]:
    """Segments and rates that divide neither each other nor the length; heads that the rates do not divide."""
    branches = draw(st.integers(1, 4))
    numbers = lambda high: st.lists(st.integers(1, high), min_size=branches, max_size=branches)  # noqa: E731
    pattern = rs.Dilated(tuple(draw(numbers(30))), tuple(draw(numbers(9))), head_offsets="blocked")
    return pattern, draw(st.integers(1, 9)), draw(st.integers(1, 50))


def padded_segments(x: Tensor, segment_length: int, rate: int) -> Tensor:
    """What torchscale attends to in a branch, (segments, heads, keys, ..): rows and heads padded with zeros."""
    rows, heads, *rest = x.shape
    segment = min(segment_length, rows)
    segments = -(-rows // segment)
    x = torch.cat([x, x.new_zeros(segments * segment - rows, heads, *rest)]).unflatten(0, (segments, segment))
    x = torch.cat([x, x.new_zeros(segments, -segment % rate, heads, *rest)], 1)
    x = torch.cat([x, x.new_zeros(segments, x.shape[1], -heads % rate, *rest)], 2)
    blocks = x.unflatten(1, (-1, rate)).unflatten(3, (rate, -1))  # segments, keys, row of a block, block of heads, ..
    diagonal = torch.stack([blocks[:, :, i, i] for i in range(rate)], 2)  # block i of the heads starts at row i
    return diagonal.flatten(2, 3)[:, :, :heads].transpose(1, 2)


def torchscale_attention(q: Tensor, k: Tensor, v: Tensor, pattern: rs.Dilated) -> Tensor:
    """Dense softmax over padded tensors, (rows, heads, head_dim), mixed by denominators, as torchscale does."""
    numbers = torch.arange(len(q) * q.shape[1]).view(q.shape[:2])
    total, denominator = torch.zeros_like(q), torch.zeros(q.shape[:2], dtype=q.dtype)
    for branch in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        qs, ks, vs = (padded_segments(x, *branch) for x in (q, k, v))
        weights = (qs @ ks.mT * q.shape[-1] ** -0.5).exp()
        places = padded_segments(numbers + 1, *branch) - 1  # -1: padding
        real = places >= 0
        total.view(-1, q.shape[-1]).index_add_(0, places[real], (weights @ vs)[real])
        denominator.view(-1).index_add_(0, places[real], weights.sum(-1)[real])
    return torch.where(denominator[..., None] > 0, total / denominator[..., None], 0.0)


@examples(200)
@given(padded_cases())
def test_padded_keys_are_those_of_padded_tensors(case: tuple[rs.Dilated, int, int]) -> None:
    pattern, heads, rows = case
    numbers = torch.arange(rows * heads).view(rows, heads)
    wanted = torch.zeros(rows * heads, dtype=torch.int64)
    for branch in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        places = padded_segments(numbers + 1, *branch) - 1
        padding = (places < 0).sum(-1, keepdim=True).expand_as(places)
        wanted.index_add_(0, places[places >= 0], padding[places >= 0])
    found = padded_keys(pattern, heads, torch.arange(rows), torch.full((rows,), rows))
    assert torch.equal(found, wanted.view(rows, heads))
    assert not found[0].any()  # so a CLS row in front never attends to padding


@pytest.mark.filterwarnings("ignore:.*selects row")
@examples(50)
@given(padded_cases(), st.integers(0, 20), st.sampled_from([None, 2, 3]))
def test_padding_gives_the_attention_of_padded_tensors(
    case: tuple[rs.Dilated, int, int], others: int, ring_size: int | None
) -> None:
    """Alone, packed after another document, and over a ring."""
    pattern, heads, rows = case
    config = TorchscaleConfig(4 * heads, 1, heads, 8, pattern, padding="torchscale")
    encoder = TorchscaleEncoder(config).double()
    lengths = (others, rows)
    x = torch.randn(1, others + rows, 4 * heads, dtype=torch.float64)
    ring = None if ring_size is None else rs.SimulatedRing(ring_size)
    attention: Any = encoder.layers[0].self_attn  # type: ignore[union-attr]
    options = encoder._rows(x, ring, None, lengths, None, None).attention
    q, k, v = attention.project(x)
    found = rs.attention(q, k, v, pattern=pattern, **options)[0, others:]
    wanted = torchscale_attention(*(y[0, others:] for y in (q, k, v)), pattern)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_a_batch_is_padded_like_each_of_its_sequences(golden: Any) -> None:
    tensors, settings = golden
    encoder = TorchscaleEncoder.load(tensors, settings, prefix="model.", padding="torchscale")
    x = tensors["input"][:, :83]
    together, alone = encoder(x), torch.cat([encoder(each[None]) for each in x])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    definition = TorchscaleEncoder.load(tensors, settings, prefix="model.")
    assert (together - definition(x)).abs().max() > 1e-3
    whole = tensors["input"]  # a multiple of all segments, so nothing is padded
    assert torch.equal(encoder(whole), definition(whole))


def test_other_paddings_are_refused(golden: Any) -> None:
    _, settings = golden
    with pytest.raises(ValueError, match="padding='zeros': must be 'none' or 'torchscale'"):
        TorchscaleConfig.of(settings, "zeros")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="padding='torchscale', shift=4"):
        TorchscaleConfig(8, 1, 2, 8, rs.Dilated((8,), (1,), shift=4), padding="torchscale")


def test_queries_and_keys_give_the_weights_of_a_layer(golden: Any) -> None:
    tensors, settings = golden
    encoder = TorchscaleEncoder.load(tensors, settings, prefix="model.", padding="torchscale")
    x = tensors["input"][:, :83]
    states = encoder(x, readout=lambda state: state)
    for i, layer in enumerate(encoder.layers):
        q, k, options = encoder.queries_and_keys(x, i)
        normed = layer.self_attn_layer_norm(states[i])  # type: ignore[operator, union-attr]
        _, _, v = layer.self_attn.project(normed)  # type: ignore[operator, union-attr]
        attended = layer.self_attn.inner_attn_ln(rs.attention(q, k, v, **options).flatten(-2))  # type: ignore[operator, union-attr]
        found = layer.self_attn.out_proj(attended)  # type: ignore[operator, union-attr]
        wanted = layer.self_attn(normed, encoder._rows(x, None, None, None, None, None).attention)  # type: ignore[operator, union-attr]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"layer=2: must be in 0 \.\. 1"):
        encoder.queries_and_keys(x, 2)
