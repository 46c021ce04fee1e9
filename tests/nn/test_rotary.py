"""Rotary positions on grids: what they turn, and by what; also for the rows that one rank holds."""

import pytest
import torch

import ringspan as rs
from ringspan.order.curves import all_cells


@pytest.mark.parametrize("shape", [(8, 12), (4, 4, 6)])
def test_scores_depend_on_differences_of_coordinates_only(shape: tuple[int, ...]) -> None:
    rotary = rs.nn.GridRotary(shape, head_dim=12)
    q, k = torch.randn(2, 1, 1, 1, 12, dtype=torch.float64).unbind()
    here, there = torch.randint(0, 4, (2, 1, len(shape))).unbind()
    score = (rotary(q, here) * rotary(k, there)).sum()
    moved = (rotary(q, here + 3) * rotary(k, there + 3)).sum()
    torch.testing.assert_close(score, moved, rtol=0, atol=1e-12)
    assert not torch.isclose(score, (rotary(q, here + 1) * rotary(k, there)).sum())


def test_each_axis_has_pairs_of_its_own() -> None:
    assert rs.nn.GridRotary((4, 4), 16).pairs == [4, 4]
    assert rs.nn.GridRotary((4, 4, 4), 16).pairs == [3, 3, 2]
    x = torch.randn(1, 16, 2, 8, dtype=torch.float64)
    turned = rs.nn.GridRotary((4, 4), 8)(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=0, atol=1e-12)
    assert torch.equal(turned[:, 0], x[:, 0])  # the cell (0, 0) is not turned


def test_local_rows_are_turned_as_the_whole() -> None:
    order, rotary = rs.Hilbert((6, 8)), rs.nn.GridRotary((6, 8), 8)
    x = torch.randn(1, 48, 2, 8)
    whole, mine = rotary(order.apply(x), order.coordinates), slice(13, 31)
    assert torch.equal(whole[:, mine], rotary(order.apply(x)[:, mine], order.coordinates[mine]))
    assert torch.equal(order.coordinates, all_cells((6, 8))[order.permutation])


def test_lower_precision_keeps_its_dtype() -> None:
    x = torch.randn(1, 16, 2, 8, dtype=torch.bfloat16)
    assert rs.nn.GridRotary((4, 4), 8)(x).dtype == torch.bfloat16


def test_compiles_whole() -> None:
    rotary, order = rs.nn.GridRotary((4, 6), 8), rs.Hilbert((4, 6))
    x, coordinates = torch.randn(1, 24, 2, 8), order.coordinates
    compiled = torch.compile(rotary, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), rotary(x))
    assert torch.equal(compiled(x, coordinates), rotary(x, coordinates))


def test_bad_sizes_are_named() -> None:
    for base in (0, -2.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"base={base}: must be positive and finite"):
            rs.nn.GridRotary((4, 4), 8, base=base)
    for wrong in (torch.ones(1, 16, 8), torch.ones(1, 16, 1, 8, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"must be floating point"):
            rs.nn.GridRotary((4, 4), 8)(wrong)
    with pytest.raises(TypeError, match="shape=4: must be a sequence of ints"):
        rs.nn.GridRotary(4, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_dim=5: must be even and at least 4"):
        rs.nn.GridRotary((4, 4), 5)
    with pytest.raises(ValueError, match="head_dim=4: must be even and at least 6"):
        rs.nn.GridRotary((4, 4, 4), 4)
    with pytest.raises(ValueError, match=r"15 rows, but RowMajor.* has 16 cells"):
        rs.nn.GridRotary((4, 4), 8)(torch.ones(1, 15, 1, 8))
    with pytest.raises(ValueError, match=r"coordinates \(15, 2\): x must be \(batch, rows, heads, 8\)"):
        rs.nn.GridRotary((4, 4), 8)(torch.ones(1, 16, 1, 8), torch.ones(15, 2))
