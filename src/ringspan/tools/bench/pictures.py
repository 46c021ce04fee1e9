"""Plots of a benchmark. Lines differ in colour, marker and dash, so that they remain distinct in greyscale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ringspan.geometry import Full
from ringspan.tools.bench.cases import BenchCase
from ringspan.tools.bench.summaries import Summary, pattern_names, title_of
from ringspan.tools.pages import Picture

# Okabe and Ito's colours, which are distinct for every kind of colour vision.
STYLES = {
    "ringspan": ("#0072B2", "o"),
    "simulated": ("#0072B2", "."),
    "sdpa": ("#E69F00", "s"),
    "sdpa_mask": ("#CC79A7", "D"),
    "flex": ("#666666", "v"),
    "torch_ring": ("#D55E00", "^"),
    "ring_attention_pytorch": ("#009E73", "P"),
    "all_gather": ("#56B4E9", "X"),
}
DISTURBED_LABEL = "disturbed by other programs"
_DASHES = {1: "-", 2: "--", 4: "-.", 8: ":"}
Summaries = Mapping[BenchCase, Summary]


def throughput_picture(summaries: Summaries, name: str = "throughput") -> Picture:
    """Tokens per second by length, one line for each implementation and number of processes."""
    figure, axis = _empty()
    _draw_ladders(axis, summaries, lambda summary: summary.tokens_per_second, times=True)
    axis.set_ylabel("tokens per second (log scale)")
    axis.set_title("Throughput: higher is better", loc="left", fontsize=11)
    _finish(figure, axis)
    caption = (
        "Median tokens per second by sequence length. A level line means that time grows linearly with the length; a "
        "falling line means that it grows faster, as in plain attention. Dashes: number of processes. Hollow markers: "
        "plain attention. Crossed out: other programs disturbed every trial."
    )
    return Picture(name, figure, caption)


def memory_picture(summaries: Summaries, name: str = "memory") -> Picture:
    """Peak memory of the largest rank by length."""
    figure, axis = _empty()
    _draw_ladders(axis, summaries, lambda summary: summary.rank_bytes.median / 2**20)
    axis.set_ylabel("peak memory of a rank (MiB, log scale)")
    axis.set_title("Memory: lower is better", loc="left", fontsize=11)
    _finish(figure, axis)
    caption = (
        "Peak memory growth of the largest rank by sequence length. Twice the processes should halve it. If the lines "
        "for one and two processes coincide, every rank holds the whole sequence."
    )
    return Picture(name, figure, caption)


def _draw_ladders(
    axis: Axes, summaries: Summaries, value_of: Callable[[Summary], float], *, times: bool = False
) -> None:
    names = pattern_names(summaries)
    ladders: defaultdict[BenchCase, list[Summary]] = defaultdict(list)
    for case, summary in summaries.items():
        if summary.measured:
            ladders[case.ladder].append(summary)
    for ladder, found in ladders.items():
        found.sort(key=lambda summary: summary.case.tokens)
        hollow = isinstance(ladder.pattern, Full)
        label = f"{title_of(ladder)}, {names[ladder.pattern]}, {process_count(ladder.ranks)}"
        lengths, values = [s.case.tokens for s in found], [value_of(s) for s in found]
        draw_line(axis, ladder, lengths, values, label, hollow=hollow)
        if times:
            cross_out(axis, lengths, values, found)
    ticks = sorted({case.tokens for case in summaries})
    log_axes(axis, ticks, [length_label(n) for n in ticks])
    axis.set_xlabel("tokens (log scale)")


def draw_line(
    axis: Axes,
    like: BenchCase,
    x: Sequence[float],
    y: Sequence[float],
    label: str,
    *,
    dash: str = "",
    hollow: bool = False,
) -> None:
    """A line with the colour and marker of its implementation and the dash of its number of processes."""
    colour, marker = STYLES[like.implementation]
    axis.plot(
        x,
        y,
        linestyle=dash or _DASHES.get(like.ranks, ":"),
        marker=marker,
        color=colour,
        markerfacecolor="white" if hollow else colour,
        markersize=7,
        label=label,
    )


def cross_out(axis: Axes, x: Sequence[float], y: Sequence[float], found: Sequence[Summary]) -> None:
    """Draw a cross over each time that comes from disturbed trials only."""
    disturbed = [(a, b) for a, b, summary in zip(x, y, found, strict=True) if summary.total.disturbed]
    if disturbed:
        label = DISTURBED_LABEL if DISTURBED_LABEL not in axis.get_legend_handles_labels()[1] else None
        a, b = zip(*disturbed, strict=True)
        axis.plot(a, b, linestyle="", marker="x", color="black", markersize=12, markeredgewidth=1.5, label=label)


def log_axes(axis: Axes, ticks: Sequence[int], labels: Sequence[str]) -> None:
    """Make both axes logarithmic, with the given ticks along x and 1, 2, 5, 10, .. along y."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, labels)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axis.minorticks_off()


def process_count(ranks: int) -> str:
    return "1 process" if ranks == 1 else f"{ranks} processes"


def length_label(n: int) -> str:
    """A length in units of 1024 where it is a multiple.

    >>> length_label(4096), length_label(1000)
    ('4K', '1,000')
    """
    return f"{n // 1024:,}K" if n % 1024 == 0 else f"{n:,}"


def plain_axes(axes: Iterable[Axes]) -> None:
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axis.set_axisbelow(True)


def _empty() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    return figure, figure.subplots()


def _finish(figure: Figure, axis: Axes) -> None:
    plain_axes([axis])
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
