import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringspan.softmax import merge_, put_, sinks_gradient


def partial(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.floats(0, 300))
def test_parts_merge_into_the_whole(sizes: list[int], spread: float) -> None:
    scores = torch.randn(4, sum(sizes), dtype=torch.float64) * spread
    values = torch.randn(sum(sizes), 3, dtype=torch.float64)
    out, lse = torch.zeros(4, 3, dtype=torch.float64), torch.full((4,), -torch.inf, dtype=torch.float64)
    for part, rows in zip(scores.split(sizes, -1), values.split(sizes), strict=True):
        merge_(out, lse, *partial(part, rows))
    whole, whole_lse = partial(scores, values)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-14, atol=1e-12)


def test_putting_is_merging_into_nothing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        part, part_lse = torch.randn(5, 3).to(dtype), torch.tensor([0.0, -3.0, -torch.inf, 80.0, torch.nan])
        part[2] = 0
        merged, lse = torch.zeros(5, 3), torch.full((5,), -torch.inf)
        merge_(merged, lse, part, part_lse)
        put, put_lse = torch.empty(5, 3), torch.empty(5)
        put_(put, put_lse, part, part_lse)
        assert torch.equal(put[:4], merged[:4])
        assert torch.equal(put_lse[:4], lse[:4])
        assert put_lse[4].isnan()


def test_nothing_with_nothing_is_nothing() -> None:
    out, lse = torch.zeros(2, 3), torch.full((2,), -torch.inf)
    merge_(out, lse, torch.zeros(2, 3), torch.full((2,), -torch.inf))
    assert torch.equal(out, torch.zeros(2, 3))
    assert torch.equal(lse, torch.full((2,), -torch.inf))


def test_nothing_changes_nothing_on_either_side() -> None:
    for first, second in (((0.0, -torch.inf), (5.0, 1.0)), ((5.0, 1.0), (0.0, -torch.inf))):
        out, lse = torch.full((1, 2), first[0]), torch.tensor([first[1]])
        merge_(out, lse, torch.full((1, 2), second[0]), torch.tensor([second[1]]))
        assert out.tolist() == [[5.0, 5.0]]
        assert lse.tolist() == [1.0]


def test_nan_stays_visible() -> None:
    out, lse = torch.zeros(1, 1), torch.zeros(1)
    merge_(out, lse, torch.full((1, 1), torch.nan), torch.full((1,), torch.nan))
    assert out.isnan().all()
    assert lse.isnan().all()


def test_parts_in_16_bits_are_merged_in_32() -> None:
    out, lse = torch.zeros(1, 1), torch.zeros(1)
    for _ in range(64):
        merge_(out, lse, torch.full((1, 1), 1.0, dtype=torch.bfloat16), torch.zeros(1))
    torch.testing.assert_close(out.item(), 64 / 65)


@pytest.mark.parametrize("shape", [(3,), (2, 5, 3)], ids=["per head", "per row"])
def test_the_gradient_of_sinks_has_the_layout_that_the_fake_operator_promises(shape: tuple[int, ...]) -> None:
    """Compiled code relies on it."""
    out, lse, sinks = torch.randn(2, 5, 3, 4), torch.randn(2, 3, 5), torch.randn(shape)
    grad = sinks_gradient(torch.randn(2, 5, 3, 4), None, out, lse, sinks)
    assert grad.stride() == torch.empty(shape).stride()
