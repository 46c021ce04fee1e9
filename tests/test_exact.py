"""rs.attention against the dense oracle: output, lse and all gradients, over everything the definition allows."""

import warnings
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringspan as rs
from ringspan import engine
from ringspan.oracle import dense_attention, multiplicity
from tests.exactness import assert_equals_oracle, inputs
from tests.strategies import examples, held_heads, lengths, patterns, scales, sinks, softcaps, tile_costs

pytestmark = pytest.mark.filterwarnings("ignore:.*selects row")


@examples(250)
@given(st.data())
def test_equals_the_oracle(data: st.DataObject) -> None:
    sizes = data.draw(lengths())
    kv_heads, group, batch = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)))
    pattern = data.draw(patterns().flatmap(lambda p: held_heads(p, kv_heads)))
    q, k, v = inputs(batch, sum(sizes), kv_heads, group, data.draw(st.sampled_from([1, 3, 8])))
    assert_equals_oracle(
        q,
        k,
        v,
        pattern=pattern,
        causal=data.draw(st.booleans()),
        scale=data.draw(scales()),
        softcap=data.draw(softcaps()),
        sinks=data.draw(sinks(q)),
        lengths=None if len(sizes) == 1 else sizes,
        kernel=data.draw(st.sampled_from([None, "reference"])),
        optimize=data.draw(tile_costs()) or "none",
    )


@examples(60)
@given(st.data())
def test_equals_the_oracle_when_calls_are_tiny(data: st.DataObject) -> None:
    """With next to no workspace, every tile is cut along segments, heads and rows: the same results."""
    n, kv_heads, group = data.draw(st.tuples(st.integers(65, 200), st.integers(1, 3), st.integers(1, 3)))
    q, k, v = inputs(data.draw(st.integers(1, 2)), n, kv_heads, group, 2)
    with mock.patch.object(engine, "WORKSPACE_BYTES", 4096):
        optimize = data.draw(tile_costs()) or "none"
        assert_equals_oracle(q, k, v, pattern=data.draw(patterns()), causal=data.draw(st.booleans()), optimize=optimize)


@pytest.mark.parametrize("n", [1, 2, 63, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_longer_segments_than_the_sequence(n: int, causal: bool) -> None:
    q, k, v = inputs(1, n, 2, 2, 8)
    assert_equals_oracle(q, k, v, pattern=rs.Dilated((2048, 4096), (1, 4)), causal=causal)
    out = rs.attention(q, k, v, pattern=rs.Dilated((4096,), (1,)), causal=causal)
    assert torch.equal(out, rs.attention(q, k, v, pattern=rs.Full(), causal=causal))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "pattern", [rs.Full(), rs.Dilated((3, 6, 24), (1, 2, 5)), rs.Window(5, 3)], ids=["full", "dilated", "window"]
)
@pytest.mark.parametrize("causal", [False, True])
def test_nan_is_visible_in_every_row_that_sees_it(pattern: rs.Pattern, causal: bool, dtype: torch.dtype) -> None:
    """Also where a tile has fewer keys than a vector register has lanes."""
    n, row = 24, 7
    for name in "qkv":
        tensors = dict(zip("qkv", (x.detach() for x in inputs(1, n, 2, 1, 8, dtype)), strict=True))
        sees = multiplicity(pattern, n, 2, causal=causal)[:, :, row] > 0
        if name == "q":
            sees = torch.zeros_like(sees).index_fill(1, torch.tensor(row), True)
        tensors[name][0, row, :, 3] = torch.nan
        for ring in (None, rs.SimulatedRing(3)):
            out, lse = rs.attention(**tensors, pattern=pattern, causal=causal, return_lse=True, ring=ring)
            assert out.isnan().any(-1)[0].T[sees].all()
            assert name == "v" or lse.isnan()[0][sees].all()


def test_rows_that_see_nothing() -> None:
    q, k, v = inputs(1, 10, 2, 1, 4)
    pattern = rs.Dilated((10,), (2,))
    out, lse = rs.attention(q, k, v, pattern=pattern, return_lse=True)
    assert torch.equal(out[:, 1::2, 0], torch.zeros(1, 5, 4, dtype=torch.float64))
    assert (lse[:, 0, 1::2] == -torch.inf).all()
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    for grad in (dq, dk, dv):
        assert grad.isfinite().all()
        assert torch.equal(grad[:, 1::2, 0], torch.zeros(1, 5, 4, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(0, 5, 2, 4), (1, 0, 2, 4)])
def test_nothing_in_nothing_out(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    out, lse = rs.attention(q, k, v, pattern=rs.Dilated((4,), (1,)), return_lse=True)
    assert out.shape == shape
    assert lse.shape == (shape[0], 2, shape[1])
    (out.sum() + lse.sum()).backward()
    assert q.grad is not None
    assert q.grad.shape == shape


@pytest.mark.parametrize("layout", ["fused projection", "heads before rows", "expanded", "last stride"])
def test_inputs_of_any_stride(layout: str) -> None:
    if layout == "fused projection":
        q, k, v = torch.randn(2, 50, 3, 4, 8, dtype=torch.float64).unbind(2)
    elif layout == "heads before rows":
        q, k, v = torch.randn(3, 2, 4, 50, 8, dtype=torch.float64).transpose(2, 3).unbind()
    elif layout == "expanded":
        q, k, v = torch.randn(3, 1, 50, 1, 8, dtype=torch.float64).expand(3, 2, 50, 4, 8).unbind()
    else:
        q, k, v = torch.randn(3, 2, 50, 8, 4, dtype=torch.float64).transpose(3, 4).unbind()
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    assert_equals_oracle(q, k, v, pattern=rs.Dilated((16, 48), (1, 3)), causal=True)


@pytest.mark.parametrize(
    "needed", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_gradients_only_for_inputs_that_need_them(needed: tuple[bool, bool, bool]) -> None:
    tensors = inputs(1, 40, 2, 2, 8)
    out = rs.attention(*tensors, pattern=rs.Dilated((8, 32), (1, 2)))
    wanted = torch.autograd.grad(out.square().sum(), tensors)
    chosen = [x.detach().requires_grad_(need) for x, need in zip(tensors, needed, strict=True)]
    made: list[tuple[int, ...]] = []
    zeros = torch.Tensor.new_zeros
    spy = lambda x, shape, **kwargs: made.append(tuple(shape)) or zeros(x, shape, **kwargs)  # noqa: E731
    out = rs.attention(*chosen, pattern=rs.Dilated((8, 32), (1, 2)))
    with mock.patch.object(torch.Tensor, "new_zeros", spy):
        out.square().sum().backward()
    assert len(made) == sum(needed)
    for x, need, right in zip(chosen, needed, wanted, strict=True):
        assert (x.grad is not None) == need
        if x.grad is not None:
            torch.testing.assert_close(x.grad, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["cpu_flash", "reference"])
def test_16_bits_are_at_most_twice_as_wrong_as_dense_softmax_in_16_bits(
    dtype: torch.dtype, causal: bool, kernel: str
) -> None:
    pattern = rs.Dilated((64, 256, 512), (1, 2, 4))
    exact_inputs = [x.detach().requires_grad_() for x in inputs(2, 700, 2, 2, 32, dtype=dtype)]
    wide_inputs = [x.detach().double().requires_grad_() for x in exact_inputs]

    def everything(result: tuple[Tensor, Tensor], tensors: list[Tensor]) -> list[Tensor]:
        out, _ = result
        return [x.double() for x in (out, *torch.autograd.grad((out.float() * weights).sum(), tensors))]

    weights = torch.randn(2, 700, 4, 32)
    options = dict(pattern=pattern, causal=causal)
    right = everything(dense_attention(*wide_inputs, **options), wide_inputs)  # type: ignore[arg-type]
    dense = everything(dense_attention(*exact_inputs, **options), exact_inputs)  # type: ignore[arg-type]
    ours = everything(
        rs.attention(*exact_inputs, return_lse=True, kernel=kernel, **options),  # type: ignore[call-overload]
        exact_inputs,
    )
    for a, b, r in zip(ours, dense, right, strict=True):
        assert (a - r).abs().max() <= 2 * (b - r).abs().max()
        assert (a - r).norm() <= 2 * (b - r).norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_results(dtype: torch.dtype) -> None:
    q, k, v = inputs(1, 30, 2, 1, 8, dtype=dtype)
    out, lse = rs.attention(q, k, v, pattern=rs.Dilated((8,), (1,)), return_lse=True)
    (out.sum() + lse.sum()).backward()
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert [x.grad.dtype for x in (q, k, v) if x.grad is not None] == [dtype] * 3


def test_the_warning_about_unselected_rows() -> None:
    q, k, v = (x.detach() for x in inputs(1, 33, 1, 1, 4))
    with pytest.warns(UserWarning, match="selects row 1 of KV head 0"):
        rs.attention(q, k, v, pattern=rs.Dilated((31,), (7,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rs.attention(q, k, v, pattern=rs.Dilated((31,), (7,)))  # said once


@pytest.mark.parametrize("kernel", ["cpu_flash", "reference"])
def test_autocast_reaches_the_inputs_and_nothing_else(kernel: str) -> None:
    tensors = [x.detach().float().requires_grad_() for x in inputs(1, 40, 2, 1, 8)]
    low = [x.detach().bfloat16().requires_grad_() for x in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rs.attention(*tensors, pattern=rs.Full(), kernel=kernel, return_lse=True)
    wanted = rs.attention(*low, pattern=rs.Full(), kernel=kernel, return_lse=True)
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)


def test_autocast_casts_as_torch_does() -> None:
    q, k, v = (x.float() for x in inputs(1, 20, 1, 1, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rs.attention(q, k.bfloat16(), v, pattern=rs.Full()).dtype == torch.bfloat16
        assert rs.attention(q.double(), k.double(), v.double(), pattern=rs.Full()).dtype == torch.float64
