"""`DilatedAttention` and `MultiheadDilatedAttention` against `rs.attention` and the oracle."""

import inspect
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.oracle import dense_attention


@pytest.mark.parametrize("is_causal", [False, True])
def test_module_is_the_function(is_causal: bool) -> None:
    layer = rs.nn.DilatedAttention(
        segment_lengths=[8, 32], dilation_rates=[1, 2], scale=0.3, head_offsets="blocked", shift=3
    )
    q, k, v = torch.randn(3, 2, 50, 4, 8, dtype=torch.float64).unbind()
    pattern = rs.Dilated((8, 32), (1, 2), head_offsets="blocked", shift=3)
    assert torch.equal(layer(q, k, v, is_causal), rs.attention(q, k, v, pattern=pattern, causal=is_causal, scale=0.3))


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_multihead_equals_its_parts(kv_heads: int | None, layer_norm: bool) -> None:
    layer = rs.nn.MultiheadDilatedAttention(
        32,
        4,
        segment_lengths=[8, 32],
        dilation_rates=[1, 2],
        layer_norm=layer_norm,
        kv_heads=kv_heads,
        dtype=torch.float64,
    )
    x, y, z = torch.randn(3, 2, 50, 32, dtype=torch.float64).unbind()
    out, weights = layer(x, y, z, is_causal=True)
    q, k, v = (proj(t).reshape(2, 50, -1, 8) for proj, t in ((layer.q_proj, x), (layer.k_proj, y), (layer.v_proj, z)))
    mixed, _ = dense_attention(q, k, v, pattern=rs.Dilated((8, 32), (1, 2)), causal=True)
    mixed = mixed.reshape(2, 50, 32)
    wanted = layer.out_proj(layer.norm(mixed) if layer.norm is not None else mixed)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    assert weights is None
    parameters = list(layer.parameters())
    found = torch.autograd.grad(out.square().sum(), parameters)
    for a, b in zip(found, torch.autograd.grad(wanted.square().sum(), parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_initialisation_follows_magneto() -> None:
    layer = rs.nn.MultiheadDilatedAttention(256, 8, segment_lengths=[8], dilation_rates=[1], gamma_init=3.0)
    xavier = (2 / (256 + 256)) ** 0.5
    for proj, gain in ((layer.q_proj, 1), (layer.k_proj, 1), (layer.v_proj, 3), (layer.out_proj, 3)):
        assert proj.weight.std().item() == pytest.approx(gain * xavier, rel=0.03)
        assert torch.count_nonzero(proj.bias) == 0


def test_parameter_names_are_those_of_dilated_attention_pytorch() -> None:
    layer = rs.nn.MultiheadDilatedAttention(32, 4, dilation_rates=[1, 2], segment_lengths=[8, 32])
    names = {name for name, _ in layer.named_parameters()}
    projections = {f"{p}_proj.{kind}" for p in ("q", "k", "v", "out") for kind in ("weight", "bias")}
    assert names == projections | {"norm.weight", "norm.bias"}
    assert layer.attention.pattern == rs.Dilated((8, 32), (1, 2))


def test_bad_arguments_raise() -> None:
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        rs.nn.DilatedAttention(segment_lengths=[8], dilation_rates=[1], attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"dropout=0\.1"):
        rs.nn.MultiheadDilatedAttention(32, 4, segment_lengths=[8], dilation_rates=[1], dropout=0.1)
    with pytest.raises(ValueError, match="num_heads=5: must divide embed_dim=32"):
        rs.nn.MultiheadDilatedAttention(32, 5, segment_lengths=[8], dilation_rates=[1])
    with pytest.raises(ValueError, match="kv_heads=3: must divide num_heads=4"):
        rs.nn.MultiheadDilatedAttention(32, 4, segment_lengths=[8], dilation_rates=[1], kv_heads=3)


def test_modules_print_and_copy() -> None:
    import copy

    layer = rs.nn.MultiheadDilatedAttention(32, 4, segment_lengths=[8], dilation_rates=[1])
    assert "segment_lengths=(8,)" in repr(copy.deepcopy(layer))
    ring = rs.SimulatedRing(2)
    spread = rs.nn.MultiheadDilatedAttention(32, 4, segment_lengths=[8], dilation_rates=[1], ring=ring)
    assert copy.deepcopy(spread).attention.ring is ring
    assert "ring=SimulatedRing(2, layout='zigzag', routing='relay')" in repr(spread)


def test_layers_take_the_pattern_by_keyword_in_one_order() -> None:
    names = ["segment_lengths", "dilation_rates", "head_offsets", "shift", "scale", "kernel", "ring"]
    for layer in (rs.nn.DilatedAttention, rs.nn.MultiheadDilatedAttention):
        parameters = inspect.signature(layer.__init__).parameters
        keywords = [name for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
        assert keywords[: len(names)] == names


@pytest.mark.parametrize("ring", [None, rs.SimulatedRing(3)])
@pytest.mark.parametrize(
    "documents", [dict(lengths=(20, 0, 30)), dict(cu_seqlens=(0, 20, 20, 50)), dict(cu_seqlens=torch.tensor([0, 50]))]
)
def test_layers_take_packed_documents_and_the_length(ring: rs.SimulatedRing | None, documents: dict[str, Any]) -> None:
    layer = rs.nn.DilatedAttention(segment_lengths=[8, 32], dilation_rates=[1, 2], ring=ring)
    q, k, v = torch.randn(3, 1, 50, 2, 8, dtype=torch.float64).unbind()
    lengths = documents.get("lengths", (20, 0, 30) if len(documents.get("cu_seqlens", ())) == 4 else (50,))
    wanted, _ = dense_attention(q, k, v, pattern=layer.pattern, causal=True, lengths=lengths)
    found = layer(q, k, v, is_causal=True, seq_len=50, **documents)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    multihead = rs.nn.MultiheadDilatedAttention(
        16, 2, segment_lengths=[8, 32], dilation_rates=[1, 2], ring=ring, dtype=torch.float64
    )
    x = torch.randn(1, 50, 16, dtype=torch.float64)
    by_lengths = multihead(x, x, x, is_causal=True, seq_len=50, lengths=lengths)[0]
    assert torch.equal(multihead(x, x, x, is_causal=True, **documents)[0], by_lengths)


def test_masks_are_refused_with_a_way_out() -> None:
    layer = rs.nn.MultiheadDilatedAttention(32, 4, segment_lengths=[8], dilation_rates=[1])
    x = torch.randn(1, 10, 32)
    with pytest.raises(ValueError, match=r"attn_mask=a Tensor: not supported.*is_causal"):
        layer(x, x, x, attn_mask=torch.ones(10, 10))
    with pytest.raises(ValueError, match=r"key_padding_mask=a Tensor.*lengths="):
        layer(x, x, x, key_padding_mask=torch.ones(1, 10))
    with pytest.raises(ValueError, match="need_weights=True"):
        layer(x, x, x, need_weights=True)
    with pytest.raises(TypeError, match="bias: not an argument"):
        layer(x, x, x, bias=1)
    assert layer(x, x, x, attn_mask=None, need_weights=False)[1] is None
