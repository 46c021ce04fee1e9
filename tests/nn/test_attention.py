"""Attention layers under any pattern against the oracle: outputs and all gradients, alone and over simulated rings."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.oracle import dense_attention

PATTERNS = {
    "full": rs.Full(),
    "window": rs.Window(5, right=2),
    "dilated": rs.Dilated((8, 32), (1, 2), shift=3),
    "sum": rs.Window(6) + rs.Dilated((16, 40), (4, 8)),
}
RINGS = [None, rs.SimulatedRing(2), rs.SimulatedRing(3, layout="contiguous")]


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("name", PATTERNS)
def test_attention_equals_the_oracle(name: str, softcap: float | None, ring: rs.SimulatedRing | None) -> None:
    layer = rs.nn.Attention(pattern=PATTERNS[name], scale=0.7, softcap=softcap, ring=ring)
    q = torch.randn(2, 45, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 45, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for sinks in (None, torch.randn(4, dtype=torch.float64, requires_grad=True)):
        for causal in (False, True):
            options: dict[str, Any] = dict(pattern=PATTERNS[name], causal=causal, scale=0.7, softcap=softcap)
            wanted, _ = dense_attention(q, k, v, sinks=sinks, **options)
            found = layer(q, k, v, is_causal=causal, sinks=sinks)
            close(found, wanted)
            inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
            weights = torch.randn_like(wanted)
            expected = torch.autograd.grad((wanted * weights).sum(), inputs)
            for a, b in zip(torch.autograd.grad((found * weights).sum(), inputs), expected, strict=True):
                close(a, b)


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_multihead_equals_the_oracle(name: str, sinks: bool, ring: rs.SimulatedRing | None) -> None:
    layer = rs.nn.MultiheadAttention(
        *(32, 4), pattern=PATTERNS[name], softcap=2.0, sinks=sinks, ring=ring, kv_heads=2, dtype=torch.float64
    )
    assert sum(name == "sinks" for name, _ in layer.named_parameters()) == sinks
    if layer.sinks is not None:
        assert layer.sinks.tolist() == [0.0] * 4
        torch.nn.init.normal_(layer.sinks)
    x = torch.randn(2, 45, 32, dtype=torch.float64, requires_grad=True)
    found, _ = layer(x, x, x, is_causal=True)
    q, k, v = (proj(x).unflatten(-1, (-1, 8)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    mixed, _ = dense_attention(q, k, v, pattern=PATTERNS[name], causal=True, softcap=2.0, sinks=layer.sinks)
    wanted = layer.out_proj(mixed.flatten(-2))
    close(found, wanted)
    inputs = (x, *layer.parameters())
    expected = torch.autograd.grad(wanted.square().sum(), inputs)
    for a, b in zip(torch.autograd.grad(found.square().sum(), inputs), expected, strict=True):
        close(a, b)


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


def test_dilated_layers_take_the_options_of_the_general_ones() -> None:
    options: dict[str, Any] = dict(segment_lengths=[8], dilation_rates=[1], shift=3, softcap=2.0, scale=0.5)
    layer = rs.nn.DilatedAttention(**options)
    assert isinstance(layer, rs.nn.Attention)
    assert (layer.pattern, layer.softcap, layer.scale) == (rs.Dilated((8,), (1,), shift=3), 2.0, 0.5)
    multihead = rs.nn.MultiheadDilatedAttention(32, 4, sinks=True, **options)
    assert isinstance(multihead, rs.nn.MultiheadAttention)
    assert multihead.sinks is not None
    assert (multihead.attention.softcap, multihead.attention.scale) == (2.0, 0.5)


def test_bad_arguments_raise() -> None:
    for pattern in (None, "window 3", (8, 1)):
        with pytest.raises(TypeError, match=r"pattern=.*must be Full\(\)"):
            rs.nn.Attention(pattern=pattern)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"pattern=.*must be Full\(\)"):
            rs.nn.MultiheadAttention(32, 4, pattern=pattern)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leaves room for 2 KV heads"):
        rs.nn.MultiheadAttention(32, 4, pattern=rs.Dilated((8,), (2,)).for_heads(2, 4))
    with pytest.raises(TypeError, match="softmax_scale"):
        rs.nn.DilatedAttention(segment_lengths=[8], dilation_rates=[1], softmax_scale=0.1)
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
    pattern, dilated = ["pattern", "scale", "softcap"], ["segment_lengths", "dilation_rates", "head_offsets", "shift"]
    for layer, names in (
        (rs.nn.Attention, [*pattern, "kernel", "ring"]),
        (rs.nn.MultiheadAttention, [*pattern, "sinks", "kernel", "ring"]),
        (rs.nn.DilatedAttention, dilated),
        (rs.nn.MultiheadDilatedAttention, dilated),
    ):
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
