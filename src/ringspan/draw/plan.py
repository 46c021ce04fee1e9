"""Pictures of a plan: its schedule, and files of its pattern, the work of each rank and the schedule (PNG and SVG)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ringspan.draw.pattern import draw_density, draw_pattern, fitted, pattern_title
from ringspan.draw.work import MOST_ROWS, draw_work, scaled_down
from ringspan.geometry import SegmentBranch
from ringspan.layout import LayoutName
from ringspan.planning import Hop, RingPlan
from ringspan.planning.heads import refuse_head_ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_RANKS_WRITTEN, _MOST_HOPS_WRITTEN = 16, 12  # a larger schedule is drawn without text
_NOTHING = "#F5F5F5"
_MOST_HEADS = 3
_DOTS_PER_INCH = 150


def draw_schedule(plan: RingPlan) -> Figure:
    """Ranks (down) against hops (across): whose rows a rank computes, how much work that is, and how much it receives.

    A large ring is drawn without text; of a very large one, only an even sample of ranks is drawn.

    >>> import ringspan as rs
    >>> ring = rs.plan(rs.Dilated((64, 256), (1, 4)), 256, ring_size=4, causal=True)
    >>> draw_schedule(ring).savefig("/dev/null", format="png")
    """
    from matplotlib.figure import Figure  # noqa: PLC0415

    refuse_head_ranks("draw_schedule", plan.head_ranks)
    ranks, hops = len(plan.sample), max(len(plan.rank(rank).hops) for rank in plan.sample)
    small = plan.layout.ring_size <= _MOST_RANKS_WRITTEN and hops <= _MOST_HOPS_WRITTEN
    size = (max(2.1 * hops + 1.2, 5.5), 0.85 * ranks + 1.6) if small else (9.0, 6.0)
    figure = Figure(figsize=size, layout="constrained")
    axis = figure.subplots()
    if small:
        _draw_words(axis, plan, hops)
    else:
        _draw_shades(figure, axis, plan, hops)
    axis.set_ylabel("rank")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    title = f"{pattern_title(plan.pattern, plan.layout.rows, plan.causal)}, {plan.layout.name}"
    drawn = "" if ranks == plan.layout.ring_size else f"; {ranks} of {plan.layout.ring_size:,} ranks drawn"
    legend = f"darker: more work; imbalance {plan.imbalance:.2f}{drawn}"
    axis.set_title(fitted(title, legend, inches=size[0]), fontsize=10)
    return figure


def _work(plan: RingPlan) -> list[list[int]]:
    """(query, key) pairs of each drawn rank at each hop."""
    return [[sum(tile.pairs for tile in hop.tiles) for hop in plan.rank(rank).hops] for rank in plan.sample]


def _draw_words(axis: Axes, plan: RingPlan, hops: int) -> None:
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    pairs = _work(plan)
    most, total = max(max(row) for row in pairs) or 1, sum(map(sum, pairs)) or 1
    colours = colormaps["Blues"]
    for rank in plan.sample:
        for number, hop in enumerate(plan.rank(rank).hops):
            share = pairs[rank][number] / most
            fill = colours(0.1 + 0.8 * share) if hop.tiles else _NOTHING
            axis.add_patch(Rectangle((number + 0.04, rank + 0.06), 0.92, 0.88, color=fill))
            text = _hop_text(hop, number, plan.sizes.parcel_row_bytes)
            text += f"\n{_share(pairs[rank][number] / total)} of all work" if hop.tiles else ""
            colour = "white" if share > 0.6 else "black"
            axis.text(number + 0.5, rank + 0.5, text, ha="center", va="center", fontsize=8, color=colour)
    axis.set(xlim=(0, hops), ylim=(len(pairs), 0))
    axis.set_xticks([i + 0.5 for i in range(hops)], ["own rows", *(f"hop {i}" for i in range(1, hops))])
    axis.set_yticks([i + 0.5 for i in plan.sample], [str(i) for i in plan.sample])


def _share(part: float) -> str:
    return f"{part:.1%}" if part >= 0.001 else "under 0.1%"


def _draw_shades(figure: Figure, axis: Axes, plan: RingPlan, hops: int) -> None:
    import numpy as np  # noqa: PLC0415
    from matplotlib import colormaps  # noqa: PLC0415

    grid = np.full((len(plan.sample), hops), np.nan)  # NaN: nothing to compute
    for line, row in enumerate(_work(plan)):
        grid[line, : len(row)] = [pairs or np.nan for pairs in row]
    axis.set_facecolor(_NOTHING)
    shades = axis.pcolormesh(grid / np.nanmax(grid), cmap=colormaps["Blues"], vmin=0, vmax=1, rasterized=True)
    axis.invert_yaxis()
    figure.colorbar(shades, ax=axis, label="work of a rank at a hop (1: the most)", shrink=0.8)
    axis.set_xlabel("hop (0: own rows; grey: nothing to compute)")
    lines, columns = (range(0, count, max(1, count // 12)) for count in (len(plan.sample), hops))
    axis.set_yticks([line + 0.5 for line in lines], [f"{plan.sample[line]:,}" for line in lines])
    axis.set_xticks([column + 0.5 for column in columns], [f"{column:,}" for column in columns])


def _hop_text(hop: Hop, number: int, row_bytes: int) -> str:
    """What a rank does at a hop: whose parcels it computes, and their size."""
    if number == 0:
        return f"{len(hop.tiles)} tiles"
    if not hop.receives:
        return "nothing to compute"
    owners = ", ".join(str(owner) for owner in sorted({message.parcel.owner for message in hop.receives}))
    received = sum(message.parcel.rows for message in hop.receives) * row_bytes
    return f"rows of rank {owners}\n{received / 2**20:.2g} MiB"


def draw_plans(plans: Mapping[LayoutName, RingPlan], folder: Path) -> list[Path]:
    """Draw plans that differ only in layout. Returns the paths of the pictures.

    The pattern and the schedules are drawn at the real length. The work of each rank is drawn pair by pair: a long
    sequence or a large ring is scaled down, and the title says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = next(iter(plans.values()))
    paths = save_figure(_draw_seen(plan), folder / "who_sees_what")
    for name, plan in plans.items():
        small, note = scaled_down(plan)
        paths += save_figure(draw_work(small, note=note), folder / f"who_computes_what_{name}")
        paths += save_figure(draw_schedule(plan), folder / f"schedule_{name}")
    return paths


def _draw_seen(plan: RingPlan) -> Figure:
    rows, heads = plan.layout.rows, plan.sizes.kv_heads
    if rows > MOST_ROWS:
        return draw_density(plan.pattern, rows, heads, causal=plan.causal)
    # Heads beyond the largest rate of a segment repeat earlier ones; windows are the same for all heads.
    rates = (branch.rate for branch in plan.pattern.branches(rows) if isinstance(branch, SegmentBranch))
    shown = min(heads, max(rates, default=1), _MOST_HEADS)
    return draw_pattern(plan.pattern, rows, shown, causal=plan.causal, note="darker: a key counts more often")


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and SVG. Returns both paths."""
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for file in paths:
        figure.savefig(file, dpi=_DOTS_PER_INCH)
    return paths
