"""Attention under an order: the definition on one device and on simulated rings, no leaks, and what is refused."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.order import passes
from tests.exactness import assert_equals_oracle, gradients, inputs
from tests.strategies import dilated, examples, lengths, patterns

pytestmark = pytest.mark.filterwarnings("ignore:.*selects row")
GRIDS = [rs.Hilbert, rs.RowMajor, rs.Snake, rs.Morton]


def with_refusal(check: Callable[[], None], pattern: rs.Pattern, causal: bool) -> None:
    """Run the check; causal windows along a curve must be refused instead."""
    if causal and any(isinstance(part, rs.Window) for part in pattern.parts):
        with pytest.raises(ValueError, match="window along the curve"):
            check()
    else:
        check()


@examples(100)
@given(st.data())
def test_folded_orders_equal_the_oracle(data: st.DataObject) -> None:
    sizes = data.draw(lengths(longest=60))
    kv_heads, group, batch = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(1, 2)))
    order = data.draw(st.sampled_from(GRIDS)).folded(data.draw(st.integers(1, 20)))
    q, k, v = inputs(batch, sum(sizes), kv_heads, group, 4)
    pattern, causal = data.draw(patterns()), data.draw(st.booleans())
    with_refusal(
        lambda: assert_equals_oracle(q, k, v, pattern=pattern, causal=causal, lengths=sizes, order=order),
        pattern,
        causal,
    )


@examples(100)
@given(st.data())
def test_folded_orders_equal_the_oracle_on_a_ring(data: st.DataObject) -> None:
    size, layout = data.draw(st.integers(2, 4)), data.draw(st.sampled_from(["contiguous", "zigzag"]))
    fold = data.draw(st.integers(1, 6))
    n = fold * data.draw(st.integers(1, 3)) * (size if layout == "contiguous" else 2 * size)
    cut = fold * data.draw(st.integers(0, n // fold))
    kv_heads, group = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
    q, k, v = inputs(1, n, kv_heads, group, 4)
    options = dict(
        ring=rs.SimulatedRing(size, layout, data.draw(st.sampled_from(["relay", "direct"]))),
        order=rs.Hilbert.folded(fold),
        pattern=data.draw(patterns()),
        causal=data.draw(st.booleans()),
        lengths=(cut, n - cut),
    )
    with_refusal(lambda: assert_equals_oracle(q, k, v, **options), options["pattern"], options["causal"])


@examples(50)
@given(st.data())
def test_grid_orders_are_apply_attention_undo(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    order = data.draw(st.sampled_from(GRIDS))(shape)
    pattern = data.draw(patterns())
    q, k, v = inputs(2, order.period, 2, 2, 4)
    assert_equals_oracle(q, k, v, pattern=pattern, order=order)
    out, lse = rs.attention(q, k, v, pattern=pattern, order=order, return_lse=True)
    moved, moved_lse = rs.attention(*(order.apply(x) for x in (q, k, v)), pattern=pattern, return_lse=True)
    found = (out, lse, *gradients(out, lse, q, k, v))
    moved, moved_lse = order.undo(moved), order.undo(moved_lse, dim=2)
    for x, y in zip(found, (moved, moved_lse, *gradients(moved, moved_lse, q, k, v)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_points_and_packed_grids() -> None:
    points = rs.Hilbert.from_points(torch.rand(30, 2))
    q, k, v = inputs(1, 30, 2, 1, 4)
    assert_equals_oracle(q, k, v, pattern=rs.Dilated((7, 16), (1, 2)), order=points)
    assert_equals_oracle(q, k, v, pattern=rs.Dilated((7,), (2,)), order=rs.Hilbert((3, 5)), lengths=(15, 0, 15))
    # Ranks that hold whole documents can order each of them.
    ring = rs.SimulatedRing(2, "contiguous")
    assert_equals_oracle(q, k, v, pattern=rs.Dilated((7,), (2,)), order=rs.Hilbert((3, 5)), lengths=(15, 15), ring=ring)


@examples(50)
@given(st.data())
def test_no_leak_under_causality(data: st.DataObject) -> None:
    """Change a token: no earlier row moves, and exactly those that may see it do."""
    fold, n = data.draw(st.integers(2, 20)), 48
    order, pattern = rs.Hilbert.folded(fold), data.draw(dilated())
    t = data.draw(st.integers(0, n - 1))
    q, k, v = (x.detach() for x in inputs(1, n, 3, 1, 4))
    before = rs.attention(q, k, v, pattern=pattern, causal=True, order=order)
    k[:, t] += 1
    v[:, t] += 1
    after = rs.attention(q, k, v, pattern=pattern, causal=True, order=order)
    changed = (before != after).any(-1)[0]
    assert not changed[:t].any()
    place = order.undo(torch.arange(n), dim=0)  # of each row, along the curve
    for p in range(n):
        for head in range(3):
            seen = pattern.sees(int(place[p]), int(place[t]), head=head, kv_heads=3) if t <= p else 0
            assert bool(changed[p, head]) == bool(seen)


@pytest.mark.parametrize("causal", [False, True])
def test_an_order_changes_nothing_where_segments_are_multiples_of_the_fold(causal: bool) -> None:
    q, k, v = inputs(1, 100, 2, 1, 4)
    for pattern in (rs.Dilated((16, 48), (1, 1)), rs.Full()):
        plain = rs.attention(q, k, v, pattern=pattern, causal=causal)
        assert torch.equal(plain, rs.attention(q, k, v, pattern=pattern, causal=causal, order=rs.Hilbert.folded(8)))
    pattern = rs.Dilated((16, 48), (1, 2))
    plain = rs.attention(q, k, v, pattern=pattern, causal=causal)
    assert not torch.equal(plain, rs.attention(q, k, v, pattern=pattern, causal=causal, order=rs.Hilbert.folded(8)))


def test_passes_are_as_few_as_can_be() -> None:
    pattern = rs.Dilated((16, 32, 20, 64), (1, 1, 1, 2))
    assert len(passes(pattern, None, True)) == 1
    assert len(passes(pattern, rs.Hilbert.folded(8), False)) == 1
    causal = passes(pattern, rs.Hilbert.folded(8), True)
    assert [(one.pattern.text, one.order is None) for one in causal] == [
        ("16x1 + 32x1", True),
        ("20x1", False),
        ("64x2", False),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_passes_merge_in_the_accumulation_dtype(dtype: torch.dtype) -> None:
    """At most twice the error of one pass over the same pattern without an order."""
    q, k, v = inputs(1, 256, 2, 1, 16, dtype=dtype)
    pattern = rs.Dilated((64, 96, 256), (1, 1, 4))

    def error(order: rs.Order | None) -> float:
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        right = rs.attention(*wide, pattern=pattern, causal=True, order=order)
        low = rs.attention(q, k, v, pattern=pattern, causal=True, order=order)
        rights = [right, *torch.autograd.grad(right.square().sum(), wide)]
        lows = [low, *torch.autograd.grad(low.float().square().sum(), (q, k, v))]
        return max(((x.double() - y).norm() / y.norm()).item() for x, y in zip(lows, rights, strict=True))

    assert error(rs.Hilbert.folded(64)) <= 2 * error(None)


def test_compiles_whole_forward_and_backward() -> None:
    order = rs.Hilbert.folded(16)
    tensors = inputs(1, 70, 2, 1, 8)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rs.attention(q * 2, k, v, pattern=rs.Dilated((24, 70), (1, 2)), causal=True, order=order).sin()

    eager = layer(*tensors)
    wanted = torch.autograd.grad(eager.sum(), tensors)
    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(*tensors)
    for x, y in zip((out, *torch.autograd.grad(out.sum(), tensors)), (eager, *wanted), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_an_order_that_nobody_keeps_lives_until_backward() -> None:
    q, k, v = inputs(1, 20, 1, 1, 4)
    rs.attention(
        q, k, v, pattern=rs.Dilated((4,), (1,)), order=rs.Hilbert.from_points(torch.rand(20, 2))
    ).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(order="hilbert"), TypeError, "order='hilbert': must be an order such as Hilbert"),
        (dict(order=rs.Hilbert((8, 8)), causal=True), ValueError, "causal=True"),
        (dict(order=rs.Hilbert((8, 9))), ValueError, "64 rows, but Hilbert.* has 72 cells"),
        (dict(order=rs.Hilbert((8, 8)), lengths=(32, 32)), ValueError, "32 rows, but Hilbert.* has 64 cells"),
        (dict(order=rs.Hilbert((8, 8)), ring=rs.SimulatedRing(2)), ValueError, "order the data once, before the model"),
        (
            dict(order=rs.Hilbert.folded(10), ring=rs.SimulatedRing(2, "contiguous")),
            ValueError,
            "moves rows across row 32",
        ),
    ],
)
def test_what_is_refused(options: dict, error: type[Exception], message: str) -> None:  # type: ignore[type-arg]
    q, k, v = inputs(1, 64, 1, 1, 4)
    with pytest.raises(error, match=message):
        rs.attention(q, k, v, pattern=rs.Dilated((16,), (1,)), **options)
