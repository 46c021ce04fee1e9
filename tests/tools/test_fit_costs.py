"""Costs of tiles: what was measured, and that the fit finds the costs behind given times."""

import pytest

from ringspan.planning import TileCosts
from ringspan.tools.fit_costs import TileShape, TileTime, fit_costs, judge_costs, measure_tiles, tile_shapes

SMALL = [TileShape(16, 16), TileShape(8, 16, segments=2), TileShape(16, 16, "causal", step=2, segments=3)]


def times_from(costs: TileCosts, seconds_per_pair: float = 1e-9, heads: int = 4) -> list[TileTime]:
    return [
        TileTime(s, heads, seconds_per_pair * costs.price(s.queries, s.keys, s.mask, heads * s.segments))
        for s in tile_shapes()
    ]


@pytest.mark.parametrize("base", [TileCosts(), TileCosts(diagonal=128, narrow_rows=300)])
def test_the_fit_finds_the_costs_behind_the_times(base: TileCosts) -> None:
    true = TileCosts(12.0, 3e4, base.diagonal, 1.3, base.narrow_rows)
    times = times_from(true, 2e-9)
    fit = fit_costs(times, base)
    assert (fit.costs.row, fit.costs.call, fit.costs.narrow) == pytest.approx((12.0, 3e4, 1.3))
    assert fit.seconds_per_pair == pytest.approx(2e-9)
    assert fit.error == pytest.approx(0, abs=1e-9)
    assert judge_costs(times, true).seconds_per_pair == pytest.approx(2e-9)
    assert judge_costs(times, TileCosts(row=500)).error > 0.1


def test_costs_are_never_negative() -> None:
    times = [TileTime(time.shape, time.heads, time.seconds * 0.9**i) for i, time in enumerate(times_from(TileCosts()))]
    costs = fit_costs(times).costs
    assert min(costs.row, costs.call, costs.narrow) >= 0


def test_times_that_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="no tile with at least 768 query rows"):
        fit_costs([TileTime(shape, 1, 1e-3) for shape in SMALL])
    with pytest.raises(ValueError, match="took no time"):
        fit_costs([TileTime(SMALL[0], 1, 0.0)])


def test_tiles_of_all_shapes_run() -> None:
    times = measure_tiles(SMALL, heads=2, head_dim=8, rounds=1)
    assert [time.shape for time in times] == SMALL
    assert all(time.heads == 2 for time in times)
