"""Pictures of the suite `results`: memory by ring size, one process against two, and the longest sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ringspan.geometry import Full
from ringspan.tools.bench.cases import BenchCase
from ringspan.tools.bench.report import throughput
from ringspan.tools.bench.summaries import (
    STYLES,
    Summary,
    cross_out,
    draw_line,
    length_label,
    log_axes,
    plain_axes,
    process_count,
    reaches,
    title_of,
)
from ringspan.tools.pages import Picture

Summaries = Mapping[BenchCase, Summary]
_KINDS = ((False, "Dilated"), (True, "Full (plain attention)"))


def ring_memory_picture(found: Summaries, tokens: int) -> Picture:
    """Peak memory of a rank by ring size at one length, dilated and full side by side."""
    figure, axes = _two_panels()
    for axis, (full, title) in zip(axes, _KINDS, strict=True):
        for name in STYLES:
            points = sorted(
                (case.ranks, summary.rank_bytes.median / 2**20)
                for case, summary in found.items()
                if case.implementation == name
                and isinstance(case.pattern, Full) == full
                and case.tokens == tokens
                and summary.measured
            )
            if points:
                like = next(c for c in found if c.implementation == name and isinstance(c.pattern, Full) == full)
                ranks, sizes = zip(*points, strict=True)
                draw_line(axis, like, ranks, sizes, title_of(like), dash=":" if name == "simulated" else "-")
        ticks = sorted({case.ranks for case in found})
        log_axes(axis, ticks, [str(k) for k in ticks])
        axis.set_xlabel("ranks (log scale)")
        axis.set_title(title, loc="left", fontsize=11)
    axes[0].set_ylabel("peak memory of a rank (MiB, log scale)")
    _finish(figure, axes)
    caption = (
        f"Memory of a rank by ring size, {tokens:,} tokens, forward and backward. Dotted: bytes held by a virtual rank "
        "of a simulated ring. Solid: growth of real processes, which includes a fixed workspace. In a ring memory "
        "falls as 1/k; an all-gather holds the whole sequence on every rank."
    )
    return Picture("results_memory", figure, caption)


def two_picture(found: Summaries) -> Picture:
    """Time of forward and backward by length, on one process and on two."""
    figure, axes = _two_panels()
    for axis, (full, title) in zip(axes, _KINDS, strict=True):
        ladders: dict[BenchCase, list[Summary]] = {}
        for case, summary in found.items():
            if summary.measured and isinstance(case.pattern, Full) == full:
                ladders.setdefault(case.ladder, []).append(summary)
        for ladder, ran in ladders.items():
            ran.sort(key=lambda summary: summary.case.tokens)
            label = f"{title_of(ladder)}, {process_count(ladder.ranks)}"
            lengths, totals = [s.case.tokens for s in ran], [s.total.median for s in ran]
            draw_line(axis, ladder, lengths, totals, label)
            cross_out(axis, lengths, totals, ran)
        ticks = sorted({case.tokens for case in found})
        log_axes(axis, ticks, [length_label(n) for n in ticks])
        axis.set_xlabel("tokens (log scale)")
        axis.set_title(title, loc="left", fontsize=11)
    axes[0].set_ylabel("seconds, forward and backward (log scale)")
    _finish(figure, axes)
    caption = (
        "Time of one forward and backward pass by length, on one process (solid) and on two (dashed): the gap is the "
        "speed-up. Dilated attention grows linearly, plain attention quadratically. Crossed out: other programs "
        "disturbed every trial."
    )
    return Picture("results_two", figure, caption)


def longest_picture(found: Summaries, rank_budget_bytes: int) -> Picture:
    """One bar for each implementation and number of processes: the longest sequence within the budget."""
    bars = reaches(found)
    figure = Figure(figsize=(10, 0.42 * len(bars) + 1.6), layout="constrained")
    axis = figure.subplots()
    for row, reach in enumerate(bars):
        ladder, longest = reach.ladder, reach.longest
        colour, _ = STYLES[ladder.implementation]
        tokens = longest.case.tokens if longest else 0
        hatch = "//" if isinstance(ladder.pattern, Full) else ""
        axis.barh(row, tokens, color=colour, hatch=hatch, edgecolor="white")
        speed = f"  {tokens:,} at {throughput(longest)} tokens/s" if longest else "  none"
        passes = "" if ladder.backward else ", forward only"
        axis.text(tokens, row, speed + passes, va="center", fontsize=9)
    names = [
        f"{title_of(r.ladder)}, {'full' if isinstance(r.ladder.pattern, Full) else 'dilated'}, "
        f"{process_count(r.ladder.ranks)}"
        for r in bars
    ]
    axis.set_yticks(range(len(bars)), names, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel("longest sequence (tokens)")
    axis.set_xlim(0, 1.45 * max((r.longest.case.tokens for r in bars if r.longest), default=1))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.spines[["top", "right"]].set_visible(False)
    caption = (
        f"The longest sequence that each computes, forward and backward, within {rank_budget_bytes // 2**20:,} MiB a "
        "process and the time limit, with its speed; lengths double. Hatched: plain attention. The table shows what "
        "ended each ladder. †: other programs disturbed every trial."
    )
    return Picture("results_longest", figure, caption)


def _two_panels() -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    return figure, list(figure.subplots(1, 2, sharey=True))


def _finish(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for both panels, without duplicates."""
    plain_axes(axes)
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
