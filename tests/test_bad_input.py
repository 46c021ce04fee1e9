"""Bad input raises an error that states the value, the rule and the way out."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ringspan as rs

GOOD = dict(
    q=torch.randn(1, 10, 4, 8), k=torch.randn(1, 10, 2, 8), v=torch.randn(1, 10, 2, 8), pattern=rs.Dilated((4,), (1,))
)

CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(q=[1.0]), TypeError, "q is a list: must be a torch.Tensor"),
    (dict(k=None), TypeError, "k is a NoneType: must be a torch.Tensor"),
    (dict(q=torch.randn(10, 4, 8)), ValueError, "q has shape (10, 4, 8): must be (batch, seq, heads, head_dim)"),
    (dict(v=torch.randn(1, 10, 1, 8)), ValueError, "k has shape (1, 10, 2, 8), v has (1, 10, 1, 8)"),
    (dict(q=torch.randn(1, 11, 4, 8)), ValueError, "seq must be equal"),
    (dict(q=torch.randn(2, 10, 4, 8)), ValueError, "batch must be equal"),
    (dict(q=torch.randn(1, 10, 4, 16)), ValueError, "head_dim must be equal"),
    (dict(q=torch.randn(1, 10, 5, 8)), ValueError, "q has 5 heads, k and v have 2: the KV heads must divide"),
    (dict(q=torch.randn(1, 10, 0, 8)), ValueError, "head_dim must be at least 1"),
    (dict(k=torch.randn(1, 10, 2, 8).double()), ValueError, "k is torch.float64, but q is torch.float32"),
    (dict(v=torch.randn(1, 10, 2, 8, device="meta")), ValueError, "v is on meta, but q is on cpu"),
    (dict(pattern=(4, 1)), TypeError, "pattern=(4, 1): must be Full(), Window(left), Dilated("),
    (dict(pattern=rs.Dilated((4,), (2,)).for_heads(3, 4)), ValueError, "leaves room for 1 KV heads"),
    (dict(lengths=(4, 5)), ValueError, "lengths add up to 9, but the sequence has 10 rows"),
    (dict(lengths=(11, -1)), ValueError, "lengths[1]=-1"),
    (dict(lengths=(5.0, 5.0)), TypeError, "lengths[0]=5.0: must be an int"),
    (dict(lengths=10), TypeError, "lengths=10: must be a sequence of ints or an int64 tensor"),
    (dict(lengths=torch.tensor([10], dtype=torch.int32)), ValueError, "lengths is torch.int32"),
    (dict(lengths=torch.tensor([[10]])), ValueError, "of shape (1, 1): must be int64, one number per document"),
    (dict(cu_seqlens=(0, 4, 9)), ValueError, "cu_seqlens ends with 9, but the sequence has 10 rows"),
    (dict(cu_seqlens=(1, 10)), ValueError, "cu_seqlens begins with 1: must begin with 0"),
    (dict(cu_seqlens=()), ValueError, "cu_seqlens begins with nothing"),
    (dict(cu_seqlens=(0, 7, 5, 10)), ValueError, "cu_seqlens[2]=5 after 7: offsets must not decrease"),
    (dict(cu_seqlens=(0, 10.0)), TypeError, "cu_seqlens[1]=10.0: must be an int"),
    (dict(cu_seqlens=10), TypeError, "cu_seqlens=10: must be offsets"),
    (dict(cu_seqlens=torch.tensor([0.0, 10.0])), ValueError, "cu_seqlens is torch.float32"),
    (dict(cu_seqlens=torch.tensor([[0, 10]])), ValueError, "of shape (1, 2): must be int32 or int64"),
    (dict(cu_seqlens=torch.tensor([0, 9], dtype=torch.int32)), ValueError, "cu_seqlens ends with 9"),
    (dict(cu_seqlens=(0, 10), lengths=(10,)), ValueError, "both lengths and cu_seqlens"),
    (dict(kernel="fast"), ValueError, "kernel='fast': must be one of"),
    (dict(kernel="cuda_flash"), ValueError, "kernel 'cuda_flash': device=cpu: this kernel runs on cuda"),
    (dict(kernel=rs.kernels.get("reference")), TypeError, "kernel is a Kernel: must be the name of a kernel"),
    (dict(ring="r"), TypeError, "ring is a str: must be a Ring or a SimulatedRing"),
    (dict(ring=rs.Ring), TypeError, "ring is a type: must be a Ring or a SimulatedRing"),
    (dict(seq_len=10.0), TypeError, "seq_len=10.0: must be an int"),
    (dict(seq_len=11), ValueError, "seq_len=11, but q has 10 rows"),
    (dict(causal=1), TypeError, "causal=1: must be True or False"),
    (dict(scale="big"), TypeError, "scale='big': must be a number"),
    (dict(scale=float("nan")), ValueError, "scale=nan: must be finite"),
    (dict(softcap=0.0), ValueError, "softcap=0.0: must be positive"),
    (dict(softcap=1e-50), ValueError, "softcap=1e-50: must be positive in torch.float32"),
    (dict(sinks=[0.0] * 4), TypeError, "sinks is a list: must be a torch.Tensor"),
    (dict(sinks=torch.zeros(5)), ValueError, "sinks has shape (5,), q has (1, 10, 4, 8)"),
    (dict(sinks=torch.zeros(4, dtype=torch.int64)), ValueError, "sinks is torch.int64: must be floating-point"),
    (dict(scale=1e39), ValueError, "scale=1e+39: must be finite in torch.float32, the dtype of the scores"),
]


@pytest.mark.parametrize(("change", "error", "words"), CASES, ids=[words[:40] for _, _, words in CASES])
def test_message(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments: dict[str, Any] = {**GOOD, **change}
    with pytest.raises(error) as caught:
        rs.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert words in str(caught.value)


def test_transposed_tensors_are_warned_of_at_the_callers_line() -> None:
    x = torch.randn(1, 8, 100, 16)  # (batch, heads, seq, head_dim)
    with pytest.warns(UserWarning, match=r"100 heads and a sequence of 8 rows.*q\.transpose\(1, 2\)") as found:
        rs.attention(x, x, x, pattern=rs.Full())  # the warning points here
    line = Path(__file__).read_text().splitlines()[found[0].lineno - 1]
    assert found[0].filename == __file__
    assert line.endswith("the warning points here")


def test_a_layer_and_a_simulated_ring_warn_of_transposed_tensors_at_the_callers_line() -> None:
    x = torch.randn(1, 9, 100, 16)
    layer = rs.nn.DilatedAttention(segment_lengths=[4], dilation_rates=[1], ring=rs.SimulatedRing(2))
    with pytest.warns(UserWarning, match="100 heads and a sequence of 9 rows") as found:
        layer(x, x, x)
    assert found[0].filename == __file__


def test_a_stated_length_silences_the_warning() -> None:
    x = torch.randn(1, 7, 100, 16)
    rs.attention(x, x, x, pattern=rs.Full(), seq_len=7)


def test_integers_are_refused() -> None:
    x = torch.ones(1, 10, 2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="attention needs floating-point numbers"):
        rs.attention(x, x, x, pattern=rs.Full())


def test_float8_is_refused_with_the_kernels_that_exist() -> None:
    x = torch.ones(1, 10, 2, 8).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"dtype=torch.float8_e4m3fn: this kernel takes torch.float64, torch.float32"):
        rs.attention(x, x, x, pattern=rs.Full())
