"""The price model of tiles, fitted to this machine (`ringspan.tools.fit_costs`), written into docs/derivation.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.suite import HEAD_DIM, HEADS, Measuring, Page, Results, Rows, Suite, Table
from ringspan.planning import CPU_COSTS
from ringspan.tools.fit_costs import CostFit, TileShape, TileTime, fit_costs, judge_costs, measure_tiles, tile_shapes


def tiles(run: Measuring) -> list[dict[str, Any]]:
    """Times of tiles of several shapes, forward and backward."""
    shapes, rounds = run.sized((tile_shapes(1024), 1), (tile_shapes(), 3), (tile_shapes(4096), 9))
    return [asdict(time) for time in measure_tiles(shapes, heads=HEADS, head_dim=HEAD_DIM, rounds=rounds)]


def report(results: Results) -> Page:
    times = [TileTime(TileShape(**row["shape"]), row["heads"], row["seconds"]) for row in results["tiles"]]
    fitted = fit_costs(times)
    costs = fitted.costs
    return Page(
        "What a tile costs",
        f"Fitted to {len(times)} shapes of tiles, {HEADS} heads of {HEAD_DIM}, fp32, forward and backward: "
        f"`rs.TileCosts(row={costs.row:.0f}, call={costs.call:.0f}, narrow={costs.narrow:.2f})`.",
        "python -m benchmarks tiles",
        f"Machine: {results.machine}",
        [costs_table({"fitted": fitted, "default": judge_costs(times, CPU_COSTS)}), times_table(times, fitted)],
    )


def costs_table(fits: dict[str, CostFit]) -> Table:
    cells: Rows = [["costs", "row", "call", "narrow", "a pair", "error of a tile's time"]]
    cells += [
        [
            name,
            *(f"{fit.costs.row:.0f}", f"{fit.costs.call:,.0f}", f"{fit.costs.narrow:.2f}"),
            *(f"{fit.seconds_per_pair * 1e9:.2f} ns", f"{fit.error:.1%}"),
        ]
        for name, fit in fits.items()
    ]
    text = (
        "Costs in pairs, by least squares of the relative errors; `diagonal` and `narrow_rows` are the default's. The "
        "error is the median over all shapes, with the time of a pair that suits the costs best."
    )
    return Table("Fitted costs", cells, text)


def times_table(times: list[TileTime], fit: CostFit) -> Table:
    """Square tiles with step 1."""
    cells: Rows = [["rows", "tile", "segments", "time", "predicted"]]
    for time in times:
        shape = time.shape
        if shape.queries == shape.keys and shape.step == 1:
            price = fit.costs.price(shape.queries, shape.keys, shape.mask, time.heads * shape.segments)
            seconds = (f"{s * 1e3:.2f} ms" for s in (time.seconds, price * fit.seconds_per_pair))
            cells.append([str(shape.queries), shape.mask, str(shape.segments), *seconds])
    return Table("Times of square tiles", cells, "Rows without gaps, forward and backward, fastest of all rounds.")


SUITE = Suite("docs/derivation.md", {"tiles": tiles}, report, marker="python -m benchmarks tiles")
