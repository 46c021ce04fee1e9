"""The ring diagram of the README and the site's home page; drawn by `make figures`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RANKS = 4
HOPS = RANKS - 1
COLOURS = ("#2F6FB0", "#E08A2E", "#3D9970", "#8E5BA6")  # of ranks
INK, PALE = "#333333", "#F2F2F2"


def draw_ring() -> Figure:
    """How a sequence is split over four ranks, what they send, and how transfers overlap with compute."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9.6, 4.5), facecolor="white")
    axis = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axis.set_xlim(0, 96)
    axis.set_ylim(0, 45)
    axis.set_axis_off()
    _draw_sequence(axis)
    _draw_ranks(axis)
    _draw_timeline(axis)
    return figure


def _draw_sequence(axis: Axes) -> None:
    left, width = 4, 88
    _title(
        axis, left, 42.8, "1. Split", "Each of k ranks holds 1/k of the rows of Q, K, V and the output (here: zigzag)."
    )
    cell = width / (2 * RANKS)
    for span in range(2 * RANKS):
        rank = min(span, 2 * RANKS - 1 - span)
        draw_box(axis, left + span * cell, 35.6, cell - 0.5, 3, COLOURS[rank], f"rank {rank}", "white")
    axis.text(left, 33.8, "first token", fontsize=8, color=INK)
    axis.text(left + width - 0.5, 33.8, "last token", fontsize=8, color=INK, ha="right")


def _draw_ranks(axis: Axes) -> None:
    from matplotlib.patches import FancyArrowPatch  # noqa: PLC0415

    _title(axis, 4, 29.8, "2. Send", "Only the K/V rows that another rank needs, already dilated.")
    for rank, (x, y) in enumerate([(4, 17.5), (28, 17.5), (28, 4), (4, 4)]):
        draw_box(axis, x, y, 15, 6.5, COLOURS[rank], f"rank {rank}\nrows of Q K V out", "white")
    arrows = [
        ((19, 20.7), (28, 20.7)),
        ((35.5, 17.5), (35.5, 10.5)),
        ((28, 7.2), (19, 7.2)),
        ((11.5, 10.5), (11.5, 17.5)),
    ]
    for rank, (start, stop) in enumerate(arrows):
        style: dict[str, Any] = dict(arrowstyle="-|>", mutation_scale=16, linewidth=2.4, color=COLOURS[rank])
        axis.add_patch(FancyArrowPatch(start, stop, shrinkA=2, shrinkB=2, **style))
    axis.text(23.5, 14, "parcels of K/V,\none hop at a time", ha="center", va="center", fontsize=9, color=INK)
    axis.text(4, 1.4, "The backward pass returns dK and dV to their owners.", fontsize=8, color=INK)


def _draw_timeline(axis: Axes) -> None:
    left, step = 58, 8.6
    _title(axis, 50, 29.8, "3. Compute and merge", "The next transfer overlaps with compute (shown: rank 0).")
    for name, y in (("compute", 21.2), ("receive", 16.6)):
        axis.text(left - 0.8, y, name, ha="right", va="center", fontsize=8.5, color=INK)
    for hop in range(HOPS + 1):
        owner = -hop % RANKS
        label = "own rows" if hop == 0 else f"hop {hop}"
        draw_box(axis, left + hop * step, 19.5, step - 0.5, 3.4, COLOURS[owner], label, "white")
        if hop:
            draw_box(axis, left + (hop - 1) * step, 14.9, step - 1.4, 3.4, PALE, f"hop {hop}", INK, edge=COLOURS[owner])
    end = left + (HOPS + 1) * step - 0.5
    axis.annotate("", (end, 13), (left, 13), arrowprops=dict(arrowstyle="->", color=INK))
    axis.text((left + end) / 2, 11, "time", ha="center", fontsize=8, color=INK)
    merge = (
        "Partial results merge exactly by their log-sum-exp.\n"
        "The output and all gradients equal those of\none device that holds the whole sequence."
    )
    axis.text(50, 5.8, merge, fontsize=9, color=INK, va="center", linespacing=1.4)


def _title(axis: Axes, x: float, y: float, head: str, text: str) -> None:
    axis.text(x, y, head, fontsize=11, fontweight="bold", color=INK, va="center")
    axis.text(x, y - 2.5, text, fontsize=9, color=INK, va="center")


def draw_box(
    axis: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    text: str,
    ink: str,
    *,
    edge: str = "none",
    size: float = 8.5,
) -> None:
    """A rounded box with text in its middle. ``size`` is that of the font."""
    from matplotlib.patches import FancyBboxPatch  # noqa: PLC0415

    shape = dict(boxstyle="round,pad=0,rounding_size=0.7", linewidth=1.6)
    axis.add_patch(FancyBboxPatch((x, y), width, height, facecolor=fill, edgecolor=edge, **shape))  # type: ignore[arg-type]
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=ink, linespacing=1.3)
