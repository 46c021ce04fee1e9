"""Results computed from sampled rows alone equal those of the dense oracle."""

from __future__ import annotations

import pytest
import torch

from ringspan.geometry import Dilated, Full, Pattern
from ringspan.layout import Layout, LayoutName
from ringspan.oracle import dense_attention
from ringspan.tools.verify import check as module
from ringspan.tools.verify.check import expect, own_rows, positions, sampled_rows
from ringspan.tools.verify.workload import VerifyCase
from tests.ranks import shares_processes

pytestmark = shares_processes(__name__)


@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag"])
@pytest.mark.parametrize("pattern", [Full(), Dilated((10, 64), (1, 8))])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("most_rows", "lengths"), [(1000, ()), (20, ()), (20, (1, 40, 26))])
def test_results_of_every_rank_equal_the_dense_oracle(
    pattern: Pattern,
    layout_name: LayoutName,
    causal: bool,
    most_rows: int,
    lengths: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = VerifyCase(pattern, 67, 2, 4, 2, 8, "float64", lengths)
    layout = Layout(layout_name, case.tokens, 3)
    monkeypatch.setattr(module, "_MAX_PAIRS", 1)
    monkeypatch.setattr(module, "_MIN_ROWS", most_rows)
    whole = [torch.empty(2, 67, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    for rank in range(3):
        for x, rows in zip(whole, own_rows(case, layout, rank), strict=True):
            x[:, positions(layout, rank)] = rows
    *leaves, grad_out = whole
    sampled = sampled_rows(case, layout)
    assert len(sampled) == 67 if most_rows > 67 else 10 < len(sampled) <= 20
    assert (grad_out.abs().sum((0, 2, 3)) > 0).nonzero()[:, 0].tolist() == sampled.tolist()
    packed = lengths or None
    out, _ = dense_attention(*(x.requires_grad_() for x in leaves), pattern=pattern, causal=causal, lengths=packed)
    right = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
    for rank in range(3):
        found = [x[:, positions(layout, rank)] for x in right]
        wanted = expect(case, causal, layout, rank, backward=True)
        assert max(wanted.errors(found)) < 1e-13
        found[2][0, 0, 0, 0] += 1e-9
        assert wanted.errors(found)[2] > 1e-10
        found[0][:, wanted.local[0]] = torch.nan
        assert wanted.errors(found)[0] == torch.inf


def test_borders_of_shards_are_among_the_sampled_rows() -> None:
    rows = sampled_rows(VerifyCase(Full(), 2**20, 1, 4, 4, 64, "float32"), Layout("contiguous", 2**20, 4)).tolist()
    assert len(rows) <= 32
    assert {0, 2**18 - 1, 2**18, 2**19, 3 * 2**18, 2**20 - 1} <= set(rows)
