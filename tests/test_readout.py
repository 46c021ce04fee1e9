"""Weights of single queries equal those of the dense definition: on one device and on simulated rings."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringspan as rs
from ringspan import readout
from ringspan.oracle import dense_attention
from tests.exactness import inputs, random_sinks
from tests.strategies import examples, held_heads, lengths, patterns, scales, sinks, softcaps

pytestmark = pytest.mark.filterwarnings("ignore:.*selects row")
GRIDS = [rs.Hilbert, rs.RowMajor, rs.Snake, rs.Morton]


def dense_weights(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """All weights, (batch, heads, n, n): the output of the definition if the value of key t is the t-th unit vector."""
    batch, n, kv_heads, _ = k.shape
    units = torch.eye(n, dtype=k.dtype)[None, :, None].expand(batch, n, kv_heads, n)
    return dense_attention(q, k, units, **options)[0].transpose(1, 2)


def assert_equals_oracle(
    q: Tensor, k: Tensor, rows: list[int], ring: rs.SimulatedRing | None = None, **options: Any
) -> None:
    """The weights of these rows within 1e-12 of the definition, with an lse and without, and their sums."""
    wanted = dense_weights(q, k, **options)[:, :, rows]
    logits = options.pop("sinks", None)
    own = logits if logits is None or logits.dim() == 1 else logits[:, rows]
    found = rs.attention_weights(q[:, rows], k, rows=rows, ring=ring, sinks=own, **options)
    _, lse = rs.attention(q, k, k, return_lse=True, sinks=logits, **options)
    assert not found.requires_grad
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    given_lse = rs.attention_weights(q[:, rows], k, rows=rows, lse=lse[:, :, rows], ring=ring, **options)
    torch.testing.assert_close(given_lse, wanted, rtol=0, atol=1e-12)
    lse = lse.detach()[:, :, rows]
    share = torch.zeros_like(lse)
    if own is not None:
        share = ((own.detach()[:, None] if own.dim() == 1 else own.detach().transpose(1, 2)) - lse).exp()
    total = torch.where(lse == -torch.inf, 0.0, 1 - share)
    torch.testing.assert_close(found.sum(-1), total, rtol=0, atol=1e-12)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Tensors, options, and a few rows, some of them twice."""
    sizes = draw(lengths().filter(sum))
    kv_heads, group, batch = draw(st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(1, 2)))
    q, k, _ = inputs(batch, sum(sizes), kv_heads, group, 4)
    return dict(
        q=q,
        k=k,
        rows=draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=4)),
        pattern=draw(held_heads(draw(patterns()), kv_heads)),
        causal=draw(st.booleans()),
        lengths=sizes,
        scale=draw(scales()),
        softcap=draw(softcaps()),
        sinks=draw(sinks(q)),
    )


@examples(100)
@given(cases())
def test_random_cases_equal_the_oracle(case: dict[str, Any]) -> None:
    assert_equals_oracle(**case)


@examples(100)
@given(cases(), st.integers(1, 4), st.sampled_from(["contiguous", "zigzag"]))
def test_simulated_rings_equal_the_oracle(case: dict[str, Any], size: int, layout: rs.LayoutName) -> None:
    assert_equals_oracle(**case, ring=rs.SimulatedRing(size, layout))


@examples(100)
@given(st.data())
def test_orders_equal_the_oracle(data: st.DataObject) -> None:
    size, layout = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(["contiguous", "zigzag"]))
    fold, last = data.draw(st.tuples(st.integers(1, 6), st.integers(0, 3)))
    n = fold * data.draw(st.integers(1, 3)) * (size if layout == "contiguous" else 2 * size)
    n += last if size == 1 else 0  # the last fold may be shorter
    cut = fold * data.draw(st.integers(0, n // fold))
    q, k, _ = inputs(1, n, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)), 4)
    pattern, causal = data.draw(patterns()), data.draw(st.booleans())
    options: dict[str, Any] = dict(
        rows=data.draw(st.lists(st.integers(0, n - 1), max_size=4)),
        order=data.draw(st.sampled_from(GRIDS)).folded(fold),
        pattern=pattern,
        causal=causal,
        lengths=(cut, n - cut),
        ring=rs.SimulatedRing(size, layout),
    )
    if causal and any(isinstance(part, rs.Window) for part in pattern.parts):
        with pytest.raises(ValueError, match="window along the curve"):
            assert_equals_oracle(q, k, **options)
    else:
        assert_equals_oracle(q, k, **options)


def test_grids_points_and_packed_grids() -> None:
    q, k, _ = inputs(2, 30, 2, 2, 4)
    pattern = rs.Window(3, right=2) + rs.Dilated((7, 16), (1, 2))
    rows = [0, 29, 14, 15]
    assert_equals_oracle(q, k, rows, pattern=pattern, order=rs.Hilbert.from_points(torch.rand(30, 2)))
    assert_equals_oracle(q, k, rows, pattern=pattern, order=rs.Hilbert((5, 6)))
    ring = rs.SimulatedRing(2, "contiguous")
    assert_equals_oracle(q, k, rows, pattern=pattern, order=rs.Hilbert((3, 5)), lengths=(15, 0, 15), ring=ring)


def test_a_key_of_two_branches_has_twice_the_weight() -> None:
    """The worked example of docs/semantics.md, with equal scores."""
    q, k = torch.ones(1, 1, 2, 4), torch.ones(1, 16, 2, 4)
    weights = rs.attention_weights(q, k, rows=[5], pattern=rs.Dilated((4, 8), (1, 2)))
    counts = {t: round(w * 8) for t, w in enumerate(weights[0, 1, 0].tolist()) if w}
    assert counts == {1: 1, 3: 1, 4: 1, 5: 2, 6: 1, 7: 2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_computed_in_fp32(dtype: torch.dtype) -> None:
    q, k, _ = (x.detach() for x in inputs(1, 50, 2, 2, 16, dtype=dtype))
    options: dict[str, Any] = dict(rows=[3, 40], pattern=rs.Dilated((16, 50), (1, 2)), causal=True)
    found = rs.attention_weights(q[:, [3, 40]], k, **options)
    assert found.dtype == torch.float32
    assert torch.equal(found, rs.attention_weights(q[:, [3, 40]].float(), k.float(), **options))
    if dtype == torch.bfloat16:
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(found, rs.attention_weights(q[:, [3, 40]].float(), k.float(), **options))


def test_long_sequences_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = inputs(1, 77, 2, 1, 4)
    monkeypatch.setattr(readout, "_BYTES_AT_A_TIME", 10 * 2 * 4 * 8)
    assert_equals_oracle(q, k, [0, 76], pattern=rs.Full(), softcap=2.0)


def test_large_scores_do_not_overflow() -> None:
    for scale in (1e4, -1e4):
        weights = rs.attention_weights(
            torch.ones(1, 1, 1, 4), torch.ones(1, 9, 1, 4), rows=[8], pattern=rs.Full(), scale=scale
        )
        torch.testing.assert_close(weights, torch.full((1, 1, 1, 9), 1 / 9))
        ring = rs.SimulatedRing(3)
        pattern = rs.Window(0)  # two of the three ranks hold no key that the query sees
        weights = rs.attention_weights(
            torch.ones(1, 1, 1, 4), torch.ones(1, 9, 1, 4), rows=[8], pattern=pattern, scale=scale, ring=ring
        )
        assert weights.flatten().tolist() == [0.0] * 8 + [1.0]


def test_keys_that_are_not_seen_do_not_matter() -> None:
    q, k, _ = (x.detach() for x in inputs(1, 20, 1, 1, 4))
    wanted = rs.attention_weights(q[:, [9]], k, rows=[9], pattern=rs.Window(2))
    k[:, :7], k[:, 10:] = torch.nan, torch.inf
    assert torch.equal(rs.attention_weights(q[:, [9]], k, rows=[9], pattern=rs.Window(2)), wanted)


def test_rows_may_be_a_tensor_or_none_at_all() -> None:
    q, k, _ = inputs(1, 20, 2, 1, 4)
    rows = torch.tensor([19, 0])
    found = rs.attention_weights(q[:, rows], k, rows=rows, pattern=rs.Full(), causal=True)
    assert torch.equal(found, rs.attention_weights(q[:, [19, 0]], k, rows=(19, 0), pattern=rs.Full(), causal=True))
    assert rs.attention_weights(q[:, :0], k, rows=(), pattern=rs.Full()).shape == (1, 2, 0, 20)


Q, K, LSE = torch.randn(1, 2, 4, 8), torch.randn(1, 10, 2, 8), torch.randn(1, 4, 2)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(rows=(0, 10)), ValueError, "rows[1]=10: the sequence has 10 rows; positions count from 0"),
        (dict(rows=(-1, 0)), ValueError, "rows[0]=-1: the sequence has 10 rows"),
        (dict(rows=(0, 1.0)), TypeError, "rows[1]=1.0: must be an int"),
        (dict(rows=torch.tensor([0.0, 1.0])), TypeError, "must be an int"),
        (dict(rows=0), TypeError, "rows=0: must be positions in the sequence"),
        (dict(rows=(0,)), ValueError, "q has 2 rows, but rows= names 1: pass their queries only, q[:, rows]"),
        (dict(q=Q[..., :4]), ValueError, "head_dim must be equal"),
        (dict(q=Q[:, :, :3]), ValueError, "the KV heads must divide"),
        (dict(q=Q.expand(3, 2, 4, 8)), ValueError, "batch must be equal"),
        (dict(q=Q.double()), ValueError, "k is torch.float32, but q is torch.float64"),
        (dict(k=[1.0]), TypeError, "k is a list"),
        (dict(pattern=7), TypeError, "pattern=7: must be Full()"),
        (dict(causal=1), TypeError, "causal=1: must be True or False"),
        (dict(order=rs.Hilbert((2, 5)), causal=True), ValueError, "with causal=True"),
        (dict(order=rs.Hilbert((2, 4))), ValueError, "10 rows, but Hilbert"),
        (dict(order=rs.Hilbert((2, 5)), ring=rs.SimulatedRing(2)), ValueError, "order the data once"),
        (dict(ring="r"), TypeError, "ring is a str"),
        (dict(seq_len=11), ValueError, "seq_len=11, but k has 10 rows"),
        (dict(seq_len=11, ring=rs.SimulatedRing(2)), rs.RingError, "seq_len=11, but the tensors have 10 rows"),
        (dict(lengths=(4, 5)), ValueError, "lengths add up to 9"),
        (dict(lengths=(10,), cu_seqlens=(0, 10)), ValueError, "both lengths and cu_seqlens"),
        (dict(softcap=-1.0), ValueError, "softcap=-1.0: must be positive"),
        (dict(scale="big"), TypeError, "scale='big'"),
        (dict(sinks=torch.zeros(1, 10, 4)), ValueError, "sinks has shape (1, 10, 4)"),
        (dict(lse=[0.0]), TypeError, "lse is a list"),
        (dict(lse=torch.zeros(1, 4, 10)), ValueError, "lse has shape (1, 4, 10), but q has 2 rows and 4 heads"),
        (dict(lse=LSE.to("meta")), ValueError, "lse is on meta"),
        (dict(lse=LSE, sinks=torch.zeros(4)), ValueError, "both lse and sinks are given"),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "k": K, "rows": (0, 9), "pattern": rs.Dilated((4,), (1,)), **change}
    with pytest.raises(error) as caught:
        rs.attention_weights(arguments.pop("q"), arguments.pop("k"), **arguments)
    assert words in str(caught.value)


def test_sinks_of_a_row_take_their_share() -> None:
    q, k, _ = inputs(2, 12, 2, 1, 4)
    assert_equals_oracle(q, k, [0, 5], pattern=rs.Dilated((8,), (4,)), sinks=random_sinks((2, 12, 2)))
    weights = rs.attention_weights(q[:, :1], k, rows=[0], pattern=rs.Full(), sinks=torch.full((2,), 1e3))
    assert not weights.any(), "the sink takes everything"
