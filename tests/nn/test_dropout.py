"""Dropout and stochastic depth: the same on every split of the rows, recomputable, and statistically sound."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from ringspan.layout import Layout
from tests.strategies import examples

KEY = rs.nn.DropoutKey(seed=7, step=3)


def kept(rows: int, features: int, rate: float, key: rs.nn.DropoutKey = KEY, batch: int = 1) -> Tensor:
    x = torch.ones(batch, rows, features, dtype=torch.float64)
    return rs.nn.row_dropout(x, rate, key=key, positions=torch.arange(rows)) != 0


@examples(100)
@given(
    st.integers(0, 60),
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from(["contiguous", "zigzag"]),
    st.floats(0, 0.99),
)
def test_every_split_of_the_rows_gives_the_same_mask(
    rows: int, features: int, ring_size: int, layout: str, rate: float
) -> None:
    x = torch.randn(2, rows, features, dtype=torch.float64)
    whole = rs.nn.row_dropout(x, rate, key=KEY, positions=torch.arange(rows))
    for rank in range(ring_size):
        spans = Layout(layout, rows, ring_size).spans(rank)  # type: ignore[arg-type]
        mine = torch.tensor([row for span in spans for row in range(span.start, span.stop)], dtype=torch.int64)
        found = rs.nn.row_dropout(x[:, mine], rate, key=KEY, positions=mine)
        assert torch.equal(found, whole[:, mine])


def test_packed_documents_are_the_entries_of_a_batch() -> None:
    x = torch.randn(3, 20, 5)
    positions = torch.arange(20)
    samples = torch.arange(3).repeat_interleave(20)[None]
    batch = rs.nn.row_dropout(x, 0.4, key=KEY, positions=positions)
    packed = rs.nn.row_dropout(x.view(1, 60, 5), 0.4, key=KEY, positions=positions.repeat(3), samples=samples)
    assert torch.equal(packed.view_as(x), batch)
    paths = rs.nn.drop_path(x, 0.4, key=KEY)
    assert torch.equal(rs.nn.drop_path(x.view(1, 60, 5), 0.4, key=KEY, samples=samples).view_as(x), paths)


def test_kept_numbers_are_scaled_and_gradients_follow_the_mask() -> None:
    x = torch.randn(2, 30, 7, dtype=torch.float64, requires_grad=True)
    for y in (
        rs.nn.row_dropout(x, 0.4, key=KEY, positions=torch.arange(30)),
        rs.nn.drop_path(x, 0.4, key=KEY.at(1)),
    ):
        mask = (y != 0).double()
        torch.testing.assert_close(y, x * mask / 0.6, rtol=0, atol=1e-15)
        grad = torch.randn_like(y)
        torch.testing.assert_close(torch.autograd.grad(y, x, grad)[0], grad * mask / 0.6, rtol=0, atol=1e-15)


def test_recomputation_and_the_global_random_state_do_not_matter() -> None:
    x = torch.randn(1, 50, 6, requires_grad=True)

    def block(y: Tensor) -> Tensor:
        return rs.nn.row_dropout(y.sin(), 0.5, key=KEY, positions=torch.arange(50)).exp()

    before = torch.get_rng_state()
    wanted = torch.autograd.grad(block(x).sum(), x)[0]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    torch.manual_seed(5)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], wanted)


@pytest.mark.parametrize("rate", [0.05, 0.25, 0.5, 0.9])
def test_the_share_of_dropped_numbers_is_the_rate(rate: float) -> None:
    """In all, and in each row, feature and sample: as many as independent draws, within 5 standard deviations."""
    batch, rows, features = 4, 500, 301
    dropped = (~kept(rows, features, rate, batch=batch)).double()
    for dims in ((0, 1, 2), (0, 1), (0, 2), (1, 2)):
        draws = 1.0
        for dim in dims:
            draws *= dropped.shape[dim]
        deviations = (dropped.mean(dims) - rate) / (rate * (1 - rate) / draws) ** 0.5
        assert deviations.abs().max() < 5
        if deviations.numel() > 100:  # and they vary as much as independent draws would: variance 1
            assert abs(deviations.var().item() - 1) < 5 * (2 / deviations.numel()) ** 0.5


def test_neighbours_are_independent() -> None:
    """Correlations of masks of neighbours in every coordinate, and of keys that differ in one number."""
    rate, shape = 0.3, (4, 400, 256)
    mask = kept(*shape[1:], rate, batch=shape[0]).double() - (1 - rate)
    variance = rate * (1 - rate)
    pairs = [
        (mask.narrow(dim, 0, shape[dim] - lag), mask.narrow(dim, lag, shape[dim] - lag))
        for dim, lag in product(range(3), (1, 2, 3))
    ]
    others = (
        rs.nn.DropoutKey(7, 4),
        rs.nn.DropoutKey(8, 3),
        rs.nn.DropoutKey(3, 7),
        KEY.at(0),
        KEY.at(0, 1),
        KEY.at(1),
    )
    pairs += [(mask, kept(*shape[1:], rate, key, batch=shape[0]).double() - (1 - rate)) for key in others]
    for one, other in pairs:
        assert abs((one * other).mean().item()) / variance * one.numel() ** 0.5 < 5


def test_samples_are_dropped_whole_and_at_the_rate() -> None:
    x = torch.ones(20_000, 3, 2)
    found = rs.nn.drop_path(x, 0.2, key=KEY)
    assert torch.equal(found, found[:, :1, :1].expand_as(x))
    dropped = (found[:, 0, 0] == 0).double()
    assert abs(dropped.mean().item() - 0.2) < 5 * (0.2 * 0.8 / len(x)) ** 0.5
    neighbours = ((dropped[1:] - 0.2) * (dropped[:-1] - 0.2)).mean().item() / (0.2 * 0.8)
    assert abs(neighbours) < 5 / len(x) ** 0.5


def splitmix64(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_the_hash_is_splitmix64_and_stays_the_same() -> None:
    """In Python's integers. Runs that resume with another version of ringspan drop the same numbers."""
    golden = 0x9E3779B97F4A7C15

    def absorb(state: int, word: int) -> int:
        return splitmix64((state + golden) % 2**64 ^ word * 0xBF58476D1CE4E5B9 % 2**64)

    key, sample, found = KEY.at(5), 1, kept(4, 7, 0.25, KEY.at(5), batch=2)
    state = 0
    for word in (7, 3, 1, 5, sample):  # seed, step, the number of places, the place
        state = absorb(state, word)
    for position, feature in product(range(4), range(7)):
        bits = splitmix64((absorb(state, position) + feature // 2 * golden) % 2**64)
        assert found[sample, position, feature].item() == ((bits >> 32 * (feature % 2)) % 2**32 >= 2**30), key
    text = "".join("01"[int(bit)] for bit in kept(4, 16, 0.5).flatten())
    assert text == "1010000011110101111101101100111100101111001100100010010110000100"


def test_memory_is_bounded_by_slices() -> None:
    rows, features = 4096, 768
    x = torch.randn(1, rows, features)
    sizes: list[int] = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes.extend(y.nbytes for y in (out,) if isinstance(y, Tensor) and y.dtype == torch.int64)
            return out

    with Largest():
        rs.nn.row_dropout(x, 0.1, key=KEY, positions=torch.arange(rows))
    assert max(sizes) <= 4 * 2**20


def test_bad_arguments_are_refused() -> None:
    x = torch.ones(2, 5, 3)
    for rate in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=f"rate={rate}: must be at least 0 and less than 1"):
            rs.nn.row_dropout(x, rate, key=KEY, positions=torch.arange(5))
        with pytest.raises(ValueError, match=f"rate={rate}: must be at least 0 and less than 1"):
            rs.nn.drop_path(x, rate, key=KEY)
    with pytest.raises(ValueError, match=r"positions has shape \(4,\): must be \(5,\) or \(2, 5\)"):
        rs.nn.row_dropout(x, 0.5, key=KEY, positions=torch.arange(4))
    for bad in (-1, 2**63, 1.5, True):
        with pytest.raises(ValueError, match=r"seed=.*: must be a whole number"):
            rs.nn.DropoutKey(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="place=-1: must be a whole number"):
        KEY.at(-1)
