"""Which rank computes which pair at which hop, pair by pair; long sequences and large rings are scaled down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ringspan.draw.pattern import fitted, pattern_title, wrappable
from ringspan.geometry import Dilated, Documents, Pattern, PatternSum, Window
from ringspan.layout import Layout
from ringspan.planning import Parcel, RingPlan
from ringspan.planning.heads import refuse_head_ranks

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

MOST_ROWS, MOST_RANKS = 64, 8
_MOST_ROWS_BY_PAIR = 1024
_PANELS_PER_LINE = 4
_PANEL, _LEGEND, _NARROWEST = 2.6, 1.7, 9.0  # inches
_NOT_SEEN, _OTHER_HOP = "#FFFFFF", "#D4D4D4"
_LIGHTEST = 0.8  # of viridis, whose lightness rises steadily: readable for colour-blind people and in grey print
_FEW_RANKS = 4  # represent a large ring if segments are shorter than a shard, so that segments stay visible
_FEWEST_SELECTED = 8  # rows of a segment or window; with fewer, dilation is not visible


def scaled_down(plan: RingPlan) -> tuple[RingPlan, str]:
    """A small plan that resembles the given one, and a line that says what was scaled down (empty if nothing was).

    Segments and windows keep their length relative to shards, so the same ones are local or shared. Rates are lowered
    if too few rows of a segment or window would be left. A few ranks represent a large ring.

    >>> import ringspan as rs
    >>> small, note = scaled_down(rs.plan(rs.Dilated((2048, 32768), (1, 16)), 32768, ring_size=4))
    >>> small.pattern.segment_lengths, small.pattern.dilation_rates, small.layout.rows
    ((4, 64), (1, 8), 64)
    >>> note
    'Scaled down: 64 tokens for 32,768; pattern 4x1, 64x8 for 2048x1, 32768x16'
    """
    refuse_head_ranks("scaled_down", plan.head_ranks)
    rows, size = plan.layout.rows, plan.layout.ring_size
    if rows <= MOST_ROWS and size <= MOST_RANKS:
        return plan, ""
    ranks = _ranks_drawn(plan)
    kept = min(rows, MOST_ROWS // (2 * ranks) * 2 * ranks)  # so that all ranks get equal shards under both layouts
    pattern = _scaled_pattern(plan.pattern, kept * size, rows * ranks, kept)
    sizes = replace(plan.sizes, batch=1, heads=plan.sizes.kv_heads)
    small = replace(
        plan, pattern=pattern, documents=Documents((kept,)), layout=Layout(plan.layout.name, kept, ranks), sizes=sizes
    )
    ring = f" over {ranks} ranks for {size:,}" if ranks < size else ""
    scaled = f"{kept} tokens for {rows:,}{ring}{_patterns_text(plan, small)}"
    return small, f"Scaled down: {scaled}"


def _patterns_text(plan: RingPlan, small: RingPlan) -> str:
    """The scaled pattern and the original."""
    if plan.pattern == small.pattern:
        return ""
    drawn, wanted = (wrappable(each.pattern) for each in (small, plan))
    return f"; pattern {drawn} for {wanted}"


def _ranks_drawn(plan: RingPlan) -> int:
    size = plan.layout.ring_size
    if size <= MOST_RANKS:
        return size
    longest = max(branch.reach for branch in plan.pattern.branches(plan.layout.rows))
    return MOST_RANKS if longest * size > plan.layout.rows else _FEW_RANKS


def _scaled_pattern(pattern: Pattern, part: int, whole: int, rows: int) -> Pattern:
    """The pattern with the lengths of its segments and windows multiplied by part / whole."""
    if isinstance(pattern, PatternSum):
        return PatternSum(tuple(_scaled_pattern(term, part, whole, rows) for term in pattern.terms))
    if isinstance(pattern, Window):
        sides = (pattern.left, pattern.right)
        left, right = (min(max(1, round(side * part / whole)), rows) if side else 0 for side in sides)
        return Window(left, right, min(pattern.dilation, max(1, (left + right + 1) // _FEWEST_SELECTED)))
    if not isinstance(pattern, Dilated):
        return pattern
    lengths = tuple(min(max(1, round(w * part / whole)), rows) for w in pattern.segment_lengths)
    rates = tuple(
        min(rate, max(1, length // _FEWEST_SELECTED))
        for length, rate in zip(lengths, pattern.dilation_rates, strict=True)
    )
    return replace(pattern, segment_lengths=lengths, dilation_rates=rates, shift=round(pattern.shift * part / whole))


def draw_work(plan: RingPlan, head: int = 0, *, note: str = "") -> Figure:
    """One panel per hop: the (query, key) pairs computed at it, coloured by the rank that computes them.

    >>> import ringspan as rs
    >>> draw_work(rs.plan(rs.Dilated((8, 32), (1, 4)), 32, ring_size=4, causal=True)).savefig("/dev/null", format="png")
    """
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.colors import BoundaryNorm, ListedColormap, to_hex  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    ranks = plan.layout.ring_size
    of_rank = [to_hex(colormaps["viridis"](_LIGHTEST * rank / max(1, ranks - 1))) for rank in range(ranks)]
    colours = ListedColormap([_NOT_SEEN, _OTHER_HOP, *of_rank])
    norm = BoundaryNorm([i - 2.5 for i in range(ranks + 3)], ranks + 2)
    grids = pairs_by_hop(plan, head)
    seen = (grids >= 0).any(axis=0)
    across = min(len(grids), _PANELS_PER_LINE)
    down = -(-len(grids) // across)
    width = max(_PANEL * across + _LEGEND, _NARROWEST)
    what = f"{pattern_title(plan.pattern, plan.layout.rows, plan.causal)}, {plan.layout.name}, KV head {head}"
    see = "Work of each rank: keys of other ranks arrive hop by hop, and only if a query sees them"
    title = fitted(see, note, what, inches=width - _LEGEND)
    figure = Figure(figsize=(width, 1.1 * _PANEL * down + 0.2 * title.count("\n") + 0.5), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False)
    for number, axis in enumerate(panels.flat):
        if number >= len(grids):
            axis.set_visible(False)
            continue
        grid = grids[number]
        grid[~seen] = -2
        # One image per panel: vector cells would take megabytes.
        axis.pcolormesh(grid, cmap=colours, norm=norm, rasterized=True)
        when = "own rows" if number == 0 else f"hop {number}"
        axis.set_title(f"{when}: {(grid >= 0).sum():,} pairs", fontsize=10)
        _mark_ranks(axis, plan.layout)
    for axis in panels[:, 0]:
        axis.set_ylabel("queries of rank")
    for axis in panels[-1]:
        axis.set_xlabel("keys of rank")
    names = [*(f"rank {rank}" for rank in range(ranks)), "at another hop", "not seen"]
    figure.legend(
        handles=[
            Patch(facecolor=colour, edgecolor="#888888", label=name)
            for colour, name in zip([*of_rank, _OTHER_HOP, _NOT_SEEN], names, strict=True)
        ],
        title="computed by",
        loc="outside right upper",
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def pairs_by_hop(plan: RingPlan, head: int = 0) -> NDArray[np.int64]:
    """(hops, rows, rows): the rank that computes query p against key t of a KV head at each hop; -1 if none does."""
    import numpy as np  # noqa: PLC0415

    refuse_head_ranks("pairs_by_hop", plan.head_ranks)
    rows, ranks = plan.layout.rows, range(plan.layout.ring_size)
    if rows > _MOST_ROWS_BY_PAIR:
        raise ValueError(f"{rows} rows: at most {_MOST_ROWS_BY_PAIR} can be drawn pair by pair; use scaled_down(plan)")
    if not 0 <= head < plan.sizes.kv_heads:
        raise ValueError(f"head={head}: must be in 0 .. {plan.sizes.kv_heads - 1}")
    held = [[row for span in plan.layout.spans(rank) for row in range(span.start, span.stop)] for rank in ranks]
    parcels = {parcel: places for rank in ranks for parcel, places in _packed(plan, rank, head, held[rank])}
    grid = np.full((max(len(plan.rank(rank).hops) for rank in ranks), rows, rows), -1, dtype=np.int64)
    for rank in ranks:
        for number, hop in enumerate(plan.rank(rank).hops):
            for tile in hop.tiles:
                if head not in tile.queries.head_range:
                    continue
                i = tile.queries.head_range.index(head)
                queries = [held[rank][row] for row in tile.queries.lane(i)]
                row_at = dict(enumerate(held[rank])) if tile.parcel is None else parcels[tile.parcel]
                keys = [row_at[place] for place in tile.keys.lane(i)]
                for place, query in enumerate(queries):
                    segment, j = divmod(place, tile.queries.rows)
                    first, count = segment * tile.keys.rows, tile.keys.rows
                    seen = {"full": (0, count), "causal": (0, j + 1), "anticausal": (j, count)}[tile.mask]
                    grid[number, query, keys[first + seen[0] : first + seen[1]]] = rank
    return grid


def _packed(plan: RingPlan, rank: int, head: int, held: list[int]) -> Iterator[tuple[Parcel, dict[int, int]]]:
    """The parcels of a rank: for each, the row of the sequence at each place of a head."""
    for packing in plan.rank(rank).packings:
        places: dict[int, int] = {}
        for own, there in packing.combs:
            if head in own.head_range:
                i = own.head_range.index(head)
                places |= zip(there.lane(i), (held[row] for row in own.lane(i)), strict=True)
        yield packing.parcel, places


def _mark_ranks(axis: Axes, layout: Layout) -> None:
    """Label rows and columns with the rank that holds them, with thin lines between."""
    parts = list(layout.rank_spans(0, layout.rows))
    middles, names = [(part.start + part.stop) / 2 for part in parts], [str(part.rank) for part in parts]
    axis.set_xticks(middles, names, fontsize=8)
    axis.set_yticks(middles, names, fontsize=8)
    for part in parts[1:]:
        axis.axhline(part.start, color="#888888", linewidth=0.4)
        axis.axvline(part.start, color="#888888", linewidth=0.4)
    axis.set_aspect("equal")
    axis.invert_yaxis()
    axis.tick_params(length=0)
    axis.spines[:].set_color("#888888")
