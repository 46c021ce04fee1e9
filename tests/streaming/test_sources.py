"""Synthetic rows depend only on their position, and look random."""

import pytest
import torch

from ringspan.streaming import RowShape, SyntheticSource


def test_rows_do_not_depend_on_how_they_are_read() -> None:
    rows = SyntheticSource(RowShape(heads=3, kv_heads=3, head_dim=10, batch=2), seed=5)
    whole = rows.read("k", range(20_000), range(3))
    assert torch.equal(rows.read("k", range(17, 20_000, 97), range(1, 3)), whole[:, 17::97, 1:3])
    far = 2**40
    assert torch.equal(
        rows.read("k", range(far, far + 5), range(3))[:, 2:3], rows.read("k", range(far + 2, far + 3), range(3))
    )


def test_seeds_names_sequences_and_heads_differ() -> None:
    shape = RowShape(heads=2, kv_heads=2, head_dim=8, batch=2)
    first = SyntheticSource(shape, 0).read("k", range(100), range(2))
    assert not torch.equal(first, SyntheticSource(shape, 1).read("k", range(100), range(2)))
    assert not torch.equal(first, SyntheticSource(shape, 0).read("v", range(100), range(2)))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[:, :, 0], first[:, :, 1])


@pytest.mark.parametrize("start", [0, 2**30, 2**33 + 7])
def test_mean_variance_and_correlations(start: int) -> None:
    x = SyntheticSource(RowShape(heads=2, kv_heads=2, head_dim=32)).read("q", range(start, start + 4096), range(2))
    x = x.flatten(2).squeeze(0).double()  # (rows, 64)
    count = x.numel()
    assert abs(x.mean()) < 5 / count**0.5
    assert abs(x.var() - 1) < 5 * 0.9**0.5 / count**0.5  # the variance of x * x is 4/5
    correlations = torch.corrcoef(x.T)  # of columns, over 4,096 rows: each off by 1/64 at most a few times
    assert (correlations - torch.eye(64, dtype=torch.float64)).abs().max() < 6 / 64
    neighbours = (x[1:] * x[:-1]).mean()
    assert abs(neighbours) < 5 / count**0.5
    assert x.unique().numel() > 0.95 * 65536  # nearly all 16-bit values occur among 262,144 numbers


def test_dtypes() -> None:
    wide = SyntheticSource(RowShape(1, 1, 8, torch.float32)).read("q", range(10), range(1))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        found = SyntheticSource(RowShape(1, 1, 8, dtype)).read("q", range(10), range(1))
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wide.double(), rtol=2**-8, atol=0)
