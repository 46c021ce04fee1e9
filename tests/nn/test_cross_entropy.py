"""The loss: the same as torch's, in slices; shares of ranks are tested in tests/train."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import ringspan as rs


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(2, 33, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(50, (2, 33))
    targets[0, :5] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("slice_rows", [1, 7, 66, 4096])
def test_slices_give_torchs_own_loss_and_gradients(slice_rows: int) -> None:
    hidden, weight, targets = case()
    ours = rs.nn.ring_cross_entropy(hidden, weight, targets, slice_rows=slice_rows)
    dense = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())
    assert ours.item() == pytest.approx(dense.item(), abs=1e-13)
    wanted = torch.autograd.grad(dense, (hidden, weight))
    for have, want in zip(torch.autograd.grad(ours, (hidden, weight)), wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-13)


def test_no_tensor_of_rows_times_vocabulary_exists() -> None:
    rows, width, vocabulary = 8192, 8, 4096
    hidden = torch.randn(1, rows, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(vocabulary, (1, rows))
    sizes: list[int] = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor))
            return out

    with Largest():
        rs.nn.ring_cross_entropy(hidden, weight, targets, slice_rows=256).backward()
    assert max(sizes) <= 256 * vocabulary


def test_no_targets_at_all_is_zero_with_zero_gradients() -> None:
    hidden, weight, targets = case()
    loss = rs.nn.ring_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    assert loss.item() == 0
    assert all((grad == 0).all() for grad in torch.autograd.grad(loss, (hidden, weight)))
    empty = rs.nn.ring_cross_entropy(hidden[:, :0], weight, targets[:, :0])
    assert torch.autograd.grad(empty, hidden)[0].abs().max() == 0


def test_sums_of_rows_do_not_overflow() -> None:
    hidden = torch.ones(1, 128, 1024, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(4, 1024, dtype=torch.float16, requires_grad=True)
    loss = rs.nn.ring_cross_entropy(hidden, weight, torch.zeros(1, 128, dtype=torch.int64))
    assert loss.item() == pytest.approx(math.log(4), abs=1e-6)
    for grad in torch.autograd.grad(loss, (hidden, weight)):
        assert grad.isfinite().all()


def test_bad_arguments_are_refused() -> None:
    hidden, weight, targets = case()
    with pytest.raises(ValueError, match=r"targets \(2, 32\): must be \(2, 33\)"):
        rs.nn.ring_cross_entropy(hidden, weight, targets[:, 1:])
    with pytest.raises(ValueError, match="slice_rows=0: must be at least 1"):
        rs.nn.ring_cross_entropy(hidden, weight, targets, slice_rows=0)
    with pytest.raises(ValueError, match="gradients='mean'"):
        rs.nn.ring_cross_entropy(hidden, weight, targets, gradients="mean")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"ring is a str: must be a Ring or a SimulatedRing; make one with Ring\(group\)"
    ):
        rs.nn.ring_cross_entropy(hidden, weight, targets, ring="all")  # type: ignore[arg-type]
