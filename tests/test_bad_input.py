"""Bad input is answered with the value, the rule and the way out."""

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
    (dict(q=torch.randn(10, 4, 8)), ValueError, "q has shape (10, 4, 8): must be (batch, seq, heads, dim)"),
    (dict(v=torch.randn(1, 10, 1, 8)), ValueError, "k has shape (1, 10, 2, 8), v has (1, 10, 1, 8)"),
    (dict(q=torch.randn(1, 11, 4, 8)), ValueError, "seq must be equal"),
    (dict(q=torch.randn(2, 10, 4, 8)), ValueError, "batch must be equal"),
    (dict(q=torch.randn(1, 10, 4, 16)), ValueError, "dim must be equal"),
    (dict(q=torch.randn(1, 10, 5, 8)), ValueError, "q has 5 heads, k and v have 2: the number of KV heads must divide"),
    (dict(q=torch.randn(1, 10, 0, 8)), ValueError, "heads and dim must be at least 1"),
    (dict(k=torch.randn(1, 10, 2, 8).double()), ValueError, "k is torch.float64, but q is torch.float32"),
    (dict(v=torch.randn(1, 10, 2, 8, device="meta")), ValueError, "v is on meta, but q is on cpu"),
    (dict(pattern=(4, 1)), TypeError, "pattern=(4, 1): must be Dilated(segment_lengths, dilation_rates) or Full()"),
    (dict(pattern=rs.Dilated((4,), (2,)).for_heads(3, 4)), ValueError, "leaves room for 1 KV heads"),
    (dict(lengths=(4, 5)), ValueError, "lengths add up to 9, but the sequence has 10 rows"),
    (dict(lengths=(11, -1)), ValueError, "lengths[1]=-1"),
    (dict(lengths=(5.0, 5.0)), TypeError, "lengths[0]=5.0: must be an int"),
    (dict(lengths=10), TypeError, "lengths=10: must be a sequence of ints or an int64 tensor"),
    (dict(lengths=torch.tensor([10], dtype=torch.int32)), ValueError, "lengths is torch.int32"),
    (dict(lengths=torch.tensor([[10]])), ValueError, "of shape (1, 1): must be int64, one number a document"),
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
    (dict(scale=1e39), ValueError, "scale=1e+39: must be finite in torch.float32, the dtype of the scores"),
]


@pytest.mark.parametrize(("change", "error", "words"), CASES, ids=[words[:40] for _, _, words in CASES])
def test_answer(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments: dict[str, Any] = {**GOOD, **change}
    with pytest.raises(error) as caught:
        rs.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert words in str(caught.value)


def test_heads_in_the_place_of_rows_are_warned_of() -> None:
    x = torch.randn(1, 8, 100, 16)  # (batch, heads, seq, dim)
    with pytest.warns(UserWarning, match=r"100 heads over a sequence of 8 rows.*pass x.transpose\(1, 2\)"):
        rs.attention(x, x, x, pattern=rs.Full())


def test_integers_are_refused() -> None:
    x = torch.ones(1, 10, 2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="attention needs floating-point numbers"):
        rs.attention(x, x, x, pattern=rs.Full())


def test_float8_is_refused_with_the_kernels_that_exist() -> None:
    x = torch.ones(1, 10, 2, 8).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"dtype=torch.float8_e4m3fn: this kernel takes torch.float64, torch.float32"):
        rs.attention(x, x, x, pattern=rs.Full())
