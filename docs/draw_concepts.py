"""The five figures of docs/concepts.md; drawn by `make figures`. All numbers are those of plans, or are computed."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_hex, to_rgb
from matplotlib.figure import Figure

import ringspan as rs
from draw_ring import COLOURS, INK, PALE, draw_box
from ringspan.oracle import multiplicity
from ringspan.planning import RingPlan

RANKS, ROWS = 4, 32
WIDTH = 5.2  # inches: legible on a phone, which shrinks them little


def draw_split() -> Figure:
    """One sequence of 32 rows over four ranks, in both layouts, and what a rank holds."""
    figure = Figure(figsize=(WIDTH, 2.8))
    axis = _empty_axis(figure, 74, 37)
    lines: tuple[tuple[rs.LayoutName, float], ...] = (("contiguous", 28), ("zigzag", 19.5))
    for line, (layout, y) in enumerate(lines):
        plan = _plan(rs.Full(), layout)
        axis.text(2, y + 4.6, f'layout="{layout}"', fontsize=9.5, color=INK, family="monospace")
        for part in plan.layout.rank_spans(0, ROWS):
            x, width = 2 + 70 * part.start / ROWS, 70 * (part.stop - part.start) / ROWS
            draw_box(axis, x, y, width - 0.4, 3.4, COLOURS[part.rank], f"rank {part.rank}", "white")
        if line == 0:
            axis.text(72, y + 4.6, f"{ROWS} rows, first to last", fontsize=9, color=INK, ha="right")
    for rank in range(RANKS):
        x = 2 + 17.7 * rank
        draw_box(axis, x, 2, 16.7, 13, PALE, "", INK, edge=COLOURS[rank])
        axis.text(
            x + 8.3, 13, f"rank {rank}", fontsize=10, color=COLOURS[rank], ha="center", va="center", weight="bold"
        )
        for place, name in enumerate(("Q", "K", "V", "out")):
            draw_box(axis, x + 1 + 3.8 * place, 5.6, 3.2, 5, COLOURS[rank], name, "white", size=7.5)
        axis.text(
            x + 8.3, 3.7, f"{plan.layout.rows_of(rank)} rows of each", fontsize=9, color=INK, ha="center", va="center"
        )
    return figure


def draw_needs() -> Figure:
    """Who sees what under three patterns, keys in the colour of the rank that holds them."""
    patterns = {
        "Full()": rs.Full(),
        "Window(5)": rs.Window(5),
        "Dilated((8, 32), (1, 4))": rs.Dilated((8, 32), (1, 4)),
    }
    figure = Figure(figsize=(WIDTH, 2.7), layout="constrained")
    for axis, (name, pattern) in zip(figure.subplots(1, 3), patterns.items(), strict=True):
        plan = _plan(pattern, "contiguous")
        owner = torch.arange(ROWS) * RANKS // ROWS
        seen = multiplicity(pattern, ROWS, 1, causal=True)[0] > 0
        local = owner[:, None] == owner
        # -1: not seen; 0 to 3: the rank that holds the key; 4 to 7: the same, of another rank
        cells = torch.where(seen, owner + RANKS * ~local, -1)
        palette = ListedColormap(["#FFFFFF", *(_pale(colour) for colour in COLOURS), *COLOURS])
        axis.pcolormesh(cells.numpy(), cmap=palette, vmin=-1.5, vmax=7.5, edgecolors="#EEEEEE", linewidth=0.2)
        received = plan.bytes_received(RANKS - 1) // plan.sizes.parcel_row_bytes
        axis.set_title(name, fontsize=8.5)
        axis.set_xlabel(f"keys of rank\nrank 3 receives {received}", fontsize=9.5)
        _mark_ranks(axis, plan)
    figure.axes[0].set_ylabel("queries of rank", fontsize=9)
    return figure


def draw_hops() -> Figure:
    """The schedule of four ranks: what each computes at each hop, and what it receives meanwhile."""
    plan = _plan(rs.Full(), "contiguous", causal=False)
    figure = Figure(figsize=(WIDTH, 3.2))
    axis = _empty_axis(figure, 74, 39)
    left, step = 10, 15.8
    for hop in range(RANKS):
        axis.text(
            left + step * (hop + 0.47),
            37,
            "own rows" if hop == 0 else f"hop {hop}",
            fontsize=10,
            ha="center",
            color=INK,
        )
    for rank in range(RANKS):
        y = 31 - 8.4 * rank
        axis.text(1, y + 1.6, f"rank {rank}", fontsize=10, weight="bold", color=COLOURS[rank], va="center")
        for number, found in enumerate(plan.rank(rank).hops):
            (owner,) = {message.parcel.owner for message in found.receives} or {rank}
            x = left + step * number
            draw_box(axis, x, y, step - 0.8, 3.8, COLOURS[owner], f"Q {rank} x K/V {owner}", "white", size=8)
            if number:
                text = f"K/V {owner} arrive"
                draw_box(axis, x - step, y - 3, step - 1.6, 2.4, "white", text, INK, edge=COLOURS[owner], size=8)
    axis.annotate("", (left + RANKS * step - 0.8, 1.4), (left, 1.4), arrowprops=dict(arrowstyle="->", color=INK))
    axis.text(left - 1, 1.4, "time", fontsize=9, color=INK, ha="right", va="center")
    return figure


def draw_merge() -> Figure:
    """One query and eight keys: the softmax of two parts, and how they make up the softmax of all keys."""
    scores = torch.tensor([1.2, -0.3, 0.6, 2.0, 0.2, 1.6, -0.8, 0.9], dtype=torch.float64)
    values = torch.tensor([3.0, 1.0, -2.0, 2.0, 5.0, -1.0, 4.0, 0.0], dtype=torch.float64)
    parts = (slice(0, 4), slice(4, 8))
    lse = [scores[part].logsumexp(0) for part in parts]
    outs = [scores[part].softmax(0) @ values[part] for part in parts]
    total = torch.logaddexp(*lse)
    share = [(each - total).exp() for each in lse]
    merged = share[0] * outs[0] + share[1] * outs[1]
    if not torch.allclose(merged, scores.softmax(0) @ values, rtol=0, atol=1e-12):
        raise AssertionError("the parts do not merge to the softmax of all keys")
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    names = ("keys of rank 0", "keys of rank 1")
    shown = [(name, scores[part].softmax(0), [i] * 4) for i, (name, part) in enumerate(zip(names, parts, strict=True))]
    shown.append(("merged: all keys at once", scores.softmax(0), [0] * 4 + [1] * 4))
    texts = [f"out = {out:.3f}\nlse = {each:.3f}" for out, each in zip(outs, lse, strict=True)]
    texts.append(
        f"out = {share[0]:.3f} x {outs[0]:.3f}\n+ {share[1]:.3f} x {outs[1]:.3f} = {merged:.3f}\nlse = {total:.3f}"
    )
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(4, 4, 8))
    for axis, (name, weights, owners), text in zip(panels, shown, texts, strict=True):
        axis.bar(range(len(weights)), weights.tolist(), color=[COLOURS[owner] for owner in owners], width=0.75)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel(text, fontsize=9.5)
        axis.set_xticks([])
        axis.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("weight of a key")
    return figure


def draw_balance() -> Figure:
    """The work of eight ranks, relative to an even share: one causal document, and packed documents."""
    cases: tuple[tuple[str, tuple[int, ...], tuple[rs.LayoutName, ...]], ...] = (
        ("one document", (65_536,), ("contiguous", "zigzag")),
        ("packed documents", (32_768, *[256] * 128), ("zigzag", "balanced")),
    )
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    of_layout = {"contiguous": COLOURS[1], "zigzag": COLOURS[0], "balanced": COLOURS[2]}
    panels = figure.subplots(1, 2, sharey=True)
    for axis, (title, lengths, layouts) in zip(panels, cases, strict=True):
        for i, layout in enumerate(layouts):
            plan = rs.plan(rs.Full(), sum(lengths), ring_size=8, layout=layout, causal=True, lengths=lengths)
            work = torch.tensor([plan.work(rank) for rank in range(8)], dtype=torch.float64)
            label = f"{layout}: at most {plan.imbalance:.2f}"
            places = [rank + 0.4 * i - 0.2 for rank in range(8)]
            axis.bar(places, (work / work.mean()).tolist(), width=0.38, color=of_layout[layout], label=label)
        axis.axhline(1, color=INK, linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=10)
        axis.set(xlabel="rank", xticks=range(8), ylim=(0, 3.0))
        axis.legend(frameon=False, fontsize=9, loc="upper left")
        axis.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("work (1: an even share)")
    return figure


def _plan(pattern: rs.Pattern, layout: rs.LayoutName, *, causal: bool = True) -> RingPlan:
    return rs.plan(pattern, ROWS, ring_size=RANKS, layout=layout, causal=causal, heads=1, optimize="none")


def _empty_axis(figure: Figure, width: float, height: float) -> Axes:
    axis = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.set_axis_off()
    return axis


def _pale(colour: str) -> str:
    red, green, blue = (1 - 0.35 * (1 - part) for part in to_rgb(colour))
    return to_hex((red, green, blue))


def _mark_ranks(axis: Axes, plan: RingPlan) -> None:
    parts = list(plan.layout.rank_spans(0, ROWS))
    middles = [(part.start + part.stop) / 2 for part in parts]
    axis.set_xticks(middles, [str(part.rank) for part in parts], fontsize=9)
    axis.set_yticks(middles, [str(part.rank) for part in parts], fontsize=9)
    for part in parts[1:]:
        axis.axhline(part.start, color="#666666", linewidth=0.6)
        axis.axvline(part.start, color="#666666", linewidth=0.6)
    axis.set_aspect("equal")
    axis.invert_yaxis()
    axis.tick_params(length=0)
