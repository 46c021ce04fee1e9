"""The page of the suite `slides`, from stored results."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

from benchmarks.large_slide import large_slide_table
from benchmarks.slide_counts import (
    HEADS,
    ORDERS,
    PATTERN,
    RADII,
    SHARED_RADIUS,
    bit_counts,
    heads_that_see,
    pieces_of,
    positions_of,
    rank_of_rows,
)
from benchmarks.suite import Page, Picture, Results, Rows, Table, empty_figure, mebibytes
from ringspan.tools.synthetic_slide import tissue

DRAWN_TILES, DRAWN_RANKS = 20_000, 4
COLOURS = {"row order": "#B35806", "Hilbert": "#542788"}
VARIANTS = {  # of the example: processes and flags
    "one process": (1, ()),
    "ring of 2": (2, ()),
    "2 ranks alone": (2, ("--alone",)),
    "mean of the tiles": (1, ("--pooled",)),
}


def report(results: Results) -> Page:
    counts, curves = results["orders"], by_variant(results["learning"])
    smallest, largest = list(counts)[0 :: len(counts) - 1]
    shares = {
        tiles: [f"{mean_share(counts[tiles], order, 'any_head', -1):.0%}" for order in ORDERS]
        for tiles in (smallest, largest)
    }
    right = {name: f"{statistics.mean(last_accuracies(curves[name])):.1%}" for name in VARIANTS}
    sentence = (
        "Attention works on a sequence of tiles, so their order decides which neighbours a tile sees. With the pattern "
        f"of Prov-GigaPath's slide encoder and {int(largest):,} tiles, a tile sees {shares[largest][1]} of the tiles "
        f"at most {RADII[-1]} tiles away in Hilbert order and {shares[largest][0]} in row order, at the same cost. "
        f"With {int(smallest):,} tiles, it is {shares[smallest][1]} and {shares[smallest][0]}. On a task that needs "
        f"two distant regions, an encoder over a ring of 2 is right on {right['ring of 2']} of new slides, one process "
        f"on {right['one process']}, and ranks that see only their own tiles on {right['2 ranks alone']}."
    )
    return Page(
        "Slides: the order of tiles, and context across ranks",
        sentence,
        "python -m benchmarks slides",
        f"Machine: {results.machine}",
        [
            draw_slide_orders(),
            share_table(counts),
            draw_shares(counts),
            cost_table(counts),
            learning_table(curves),
            draw_learning(curves),
            large_slide_table(results["large_slide"]),
        ],
    )


def mean_share(found: dict[str, Any], order: str, share: str, i: int) -> float:
    """The mean over slides of a share within the i-th radius."""
    return statistics.mean(slide[order][share][i] for slide in found["slides"])


def share_table(counts: dict[str, Any]) -> Table:
    rows: Rows = [["tiles", "order", *(f"within {radius}" for radius in RADII)]]
    gains = []
    for tiles, found in counts.items():
        by_order = {
            order: [
                [mean_share(found, order, share, i) for share in ("any_head", "mean_head")] for i in range(len(RADII))
            ]
            for order in ORDERS
        }
        for order, shares in by_order.items():
            rows.append([f"{int(tiles):,}", order, *(f"{some:.1%} ({mean:.1%})" for some, mean in shares)])
        gains += [hilbert[0] - row[0] for row, hilbert in zip(*by_order.values(), strict=True)]
    slides = len(next(iter(counts.values()))["slides"])
    text = (
        f"Shares of all pairs of tiles at most 1 to {RADII[-1]} tiles apart (Euclidean) that see each other in one "
        f"layer: in at least one of {HEADS} heads and, in brackets, in a head on average. Means of {slides} synthetic "
        "slides of two or three pieces with holes. Row order sorts tiles by x, then by y; Hilbert order is "
        f"`rs.Hilbert.from_points(coords)`. The pattern is `{PATTERN.text}` after a CLS row. Counted exactly, in "
        "integers.\n\n"
        f"**Where Hilbert order does not help.** Its share is lower in {sum(gain < 0 for gain in gains)} of "
        f"{len(gains)} cells of this table (any head), by {max(0.0, -100 * min(gains)):.1f} percentage points at most; "
        f"it is higher by {100 * max(gains):.1f} at most. In row order, a segment of 1024 tiles is a strip of whole "
        "columns. If the strip is wider than the radius, as on small slides, both orders see about the same. A tile "
        "sees the same number of tiles in either order, so what Hilbert order gains nearby it loses elsewhere: strips "
        "reach across the slide. The official code keeps the order of its list of tiles; published weights were not "
        "tried in another order."
    )
    return Table("Which neighbours a tile sees", rows, text)


def cost_table(counts: dict[str, Any]) -> Table:
    header = ["tiles", "pairs", "ring", "rows sent", "bytes sent", "of full attention"]
    rows: Rows = [[*header, *(f"cut by borders: {order}" for order in ORDERS)]]
    fewer = 0
    for tiles, found in counts.items():
        for size, sent in found["cost"]["bytes"].items():
            sent_rows = sent / found["cost"]["row_bytes"] / HEADS
            share = sent_rows / (int(tiles) + 1) / (int(size) - 1)
            cut = [statistics.mean(slide[order]["rows_needed"][size] for slide in found["slides"]) for order in ORDERS]
            fewer += cut[1] < cut[0]
            cells = [f"{int(tiles):,}", f"{found['cost']['pairs']:.2e}", size, f"{sent_rows:,.0f}", mebibytes(sent)]
            rows.append([*cells, f"{share:.0%}", *(f"{each:,.0f}" for each in cut)])
    text = (
        "One layer, forward, fp32, contiguous layout. Pairs are those of all heads; rows sent are a mean over heads. "
        "Both are sums over ranks, and depend on the number of tiles, not on their order: Hilbert order makes a ring "
        "neither faster nor slower. Full attention would send every row to every other rank once. The pattern can send "
        "more than that on small slides, because each branch sends the rows that it selects. "
        "The last columns say how well shards keep neighbourhoods together: the rows of other ranks that ranks would "
        f"need to see all neighbours within {SHARED_RADIUS} tiles, which the pattern does not send as such. Hilbert "
        f"order needs fewer in {fewer} of {len(rows) - 1} lines: shards that are strips have long borders, but only "
        "two of them."
    )
    return Table("What it costs", rows, text)


def draw_slide_orders() -> Picture:
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.colors import ListedColormap, to_hex  # noqa: PLC0415

    cells = tissue(DRAWN_TILES, pieces_of(DRAWN_TILES), seed=0)
    query = int((cells - cells.double().mean(0)).square().sum(1).argmin())
    figure, axes = empty_figure(3, 2, (9.0, 6.6))
    few = ListedColormap([to_hex(colormaps["viridis"](i / 4 * 0.9)) for i in (0, 3, 1, 4, 2)])
    heat = ListedColormap(["#E4E4E4", *(to_hex(colormaps["YlOrRd"](0.25 + 0.75 * i / HEADS)) for i in range(HEADS))])
    for column, order in enumerate(ORDERS):
        positions = positions_of(order, cells)
        seeing = torch.zeros(len(cells), dtype=torch.int32)
        for numbers, bits in heads_that_see(positions, PATTERN, HEADS):
            seeing |= torch.where(numbers == numbers[query], bits, 0)
        shards = rank_of_rows(len(cells) + 1, DRAWN_RANKS)[positions]
        panels = (
            (positions // PATTERN.segment_lengths[0] % 5, few, 4, f"segments of {PATTERN.segment_lengths[0]} tiles"),
            (shards, colormaps["viridis"], DRAWN_RANKS - 0.5, f"shards of {DRAWN_RANKS} ranks"),
            (bit_counts()[seeing], heat, HEADS, "what one tile (+) sees"),
        )
        for row, (values, colours, most, name) in enumerate(panels):
            axis = axes[2 * row + column]
            picture = torch.full((cells.amax(0) + 1).tolist(), torch.nan)
            picture[cells[:, 0], cells[:, 1]] = values.float()
            shown = axis.imshow(picture.T.numpy(), cmap=colours, vmin=0, vmax=most, interpolation="nearest")
            axis.set(xticks=[], yticks=[], title=order if row == 0 else "", ylabel=name if column == 0 else "")
            axis.spines[:].set_visible(False)
        axis.plot(*cells[query].tolist(), "+", color="black", markersize=9)
    figure.colorbar(
        shown, ax=axes, label=f"heads of {HEADS}", ticks=range(0, HEADS + 1, 4), shrink=0.3, anchor=(0.0, 0.0)
    )
    return Picture(
        "slide_orders",
        figure,
        f"A synthetic slide of {DRAWN_TILES:,} tiles in row order and in Hilbert order: the shortest segments of the "
        "pattern, the shards of four ranks, and in how many heads the tile in the middle sees each other tile. In "
        "Hilbert order this tile is at the border of its region, so it sees its neighbours beyond in few heads.",
    )


def draw_shares(counts: dict[str, Any]) -> Picture:
    figure, axes = empty_figure(1, len(counts), (3.4 * len(counts), 3.4))
    for axis, (tiles, found) in zip(axes, counts.items(), strict=True):
        for order in ORDERS:
            for share, dash, label in (("any_head", "-", "any head"), ("mean_head", "--", "mean over heads")):
                values = 100 * torch.tensor([slide[order][share] for slide in found["slides"]])
                axis.plot(
                    RADII, values.mean(0).numpy(), dash, marker="o", color=COLOURS[order], label=f"{order}, {label}"
                )
                low, high = values.amin(0).numpy(), values.amax(0).numpy()
                axis.fill_between(RADII, low, high, color=COLOURS[order], alpha=0.15, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(RADII, [str(radius) for radius in RADII])
        axis.set(title=f"{int(tiles):,} tiles", xlabel="at most so many tiles away", ylim=(0, 103))
    axes[0].set_ylabel("neighbours seen, %")
    axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    slides = len(next(iter(counts.values()))["slides"])
    return Picture(
        "slide_shares",
        figure,
        f"The share of a tile's neighbours that it sees in one layer: mean and range over {slides} slides.",
    )


Curves = dict[str, list[list[dict[str, float]]]]


def by_variant(found: dict[str, Any]) -> Curves:
    """The curves of each variant, in order of seeds."""
    return {name: [curve for item, curve in found.items() if item.startswith(name)] for name in VARIANTS}


def accuracies(curve: list[dict[str, float]]) -> list[tuple[float, float]]:
    return [(record["step"], record["accuracy"]) for record in curve if "accuracy" in record]


def last_accuracies(curves: list[list[dict[str, float]]]) -> list[float]:
    """For each seed, the mean over the last three evaluations."""
    return [statistics.mean(accuracy for _, accuracy in accuracies(curve)[-3:]) for curve in curves]


def learning_table(curves: Curves) -> Table:
    header = ["variant", "accuracy", "of each seed", "last loss", "difference from one process", "seconds"]
    rows: Rows = [header]
    for name, of_seeds in curves.items():
        found = last_accuracies(of_seeds)
        pairs = zip(of_seeds, curves["one process"], strict=True)
        apart = max(
            abs(a["loss"] - b["loss"]) for one, other in pairs for a, b in list(zip(one, other, strict=True))[:10]
        )
        loss = statistics.mean(record["loss"] for curve in of_seeds for record in curve[-10:])
        seconds = statistics.mean(curve[-1]["seconds"] for curve in of_seeds)
        each = ", ".join(f"{share:.1%}" for share in found)
        difference = f"{apart:.0e}" if name == "ring of 2" else "-"
        rows.append([name, f"{statistics.mean(found):.1%}", each, f"{loss:.3f}", difference, f"{seconds:.0f}"])
    steps = len(curves["one process"][0])
    text = (
        "A slide has two pieces of tissue far apart. In each, gland is inflamed and stroma scarred, or the other way "
        "round; the label says whether both pieces agree. One piece says nothing about the label, and the mean of the "
        "tiles is the same for both labels. A small `SlideEncoder` (2 layers of width 64, dropout 0.05) is trained for "
        f"{steps} steps of 32 new slides of 255 tiles by [slide_learning.py](../examples/slide_learning.py): in one "
        "process, over a ring of 2 with one piece on each rank, and with ranks that encode their own tiles only. Then "
        "their embeddings are averaged before the last, linear layer, so nothing compares the pieces. The last variant "
        "is an MLP on the mean of the tiles.\n\n"
        "Accuracies are those of 256 new slides, the mean of the last three evaluations; guessing gives 50 %. The "
        "difference is the largest of the first ten losses, in fp32; in fp64, the example requires that losses and "
        "weights of three steps differ by at most 1e-10. Seeds change weights, slides and dropout. They are "
        f"0 to {len(of_seeds) - 1}; none was left out. Settings were chosen in one process, so that seeds 0 to 7 all "
        "learn. Runs stay at the level of guessing first, then learn quickly. With half as many slides of twice the "
        "size in a step, more noise or more dropout, some seeds did not learn within 150 steps. Seconds include "
        "evaluation; each process has one thread."
    )
    return Table("A task that needs both pieces", rows, text)


def draw_learning(curves: Curves) -> Picture:
    figure, (losses, right) = empty_figure(1, 2, (9.0, 3.6))
    styles = {
        "one process": ("#999999", "-", 4.0),
        "ring of 2": ("#542788", "-", 1.4),
        "2 ranks alone": ("#B35806", "-", 1.4),
        "mean of the tiles": ("#F1A340", "--", 1.4),
    }
    for name, of_seeds in curves.items():
        colour, dash, width = styles[name]
        for i, curve in enumerate(of_seeds):
            window = max(1, len(curve) // 30)
            loss = torch.tensor([record["loss"] for record in curve]).unfold(0, window, 1).mean(1)
            options: dict[str, Any] = dict(color=colour, linestyle=dash, linewidth=width, label=name if i == 0 else "")
            losses.plot(range(window, len(curve) + 1), loss.numpy(), **options)
            steps, shares = zip(*accuracies(curve), strict=True)
            right.plot(steps, [100 * share for share in shares], **options)
    losses.set(xlabel="step", ylabel="loss", ylim=(0, None))
    losses.axhline(math.log(2), color="black", linewidth=0.6, linestyle=":")
    right.set(xlabel="step", ylabel="accuracy on new slides, %", ylim=(40, 102))
    right.axhline(50, color="black", linewidth=0.6, linestyle=":")
    right.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return Picture(
        "slide_learning",
        figure,
        f"Loss and accuracy, one line for each of {len(of_seeds)} seeds; dotted: guessing. The ring (thin) follows one "
        "process (thick).",
    )


def broken(results: Results) -> str:
    curves = by_variant(results["learning"])
    if results.size == "quick":
        return ""
    found = {name: last_accuracies(curves[name]) for name in VARIANTS}
    if min(found["one process"] + found["ring of 2"]) < 0.9:
        return f"a run with context across ranks did not learn: {found}"
    if max(found["2 ranks alone"] + found["mean of the tiles"]) > 0.65:
        return f"a run without context across ranks is better than guessing: {found}"
    return ""
