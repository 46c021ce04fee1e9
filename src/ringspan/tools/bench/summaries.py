"""Statistics of trials (medians with their spread, speed-ups, the longest length of each ladder), and their plots.

Lines differ in colour, marker and dash, so that they remain distinct in greyscale.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ringspan.geometry import Dilated, Full, Pattern
from ringspan.tools.bench.cases import IMPLEMENTATIONS, BenchCase
from ringspan.tools.bench.ladder import is_planned, planned_bytes
from ringspan.tools.bench.trials import Trial
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


@dataclass(frozen=True)
class Spread:
    """A median with the lowest and the highest value; ``disturbed`` if every trial was disturbed."""

    median: float
    low: float
    high: float
    count: int
    disturbed: bool = False


def spread(numbers: Iterable[float], disturbed: bool = False) -> Spread:
    """Median, minimum and maximum.

    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, low=1.0, high=3.0, count=3, disturbed=False)
    """
    values = sorted(numbers)
    return Spread(statistics.median(values), values[0], values[-1], len(values), disturbed)


@dataclass(frozen=True)
class Summary:
    """A case and all its trials. Its statistics exist only if a trial is ``measured``.

    Times come from the trials that other programs did not disturb, or from all trials if every one was disturbed.
    """

    case: BenchCase
    trials: tuple[Trial, ...]

    @cached_property
    def measured(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.measured)

    @cached_property
    def failure(self) -> Trial | None:
        """The first trial that failed or was not run, or None."""
        return next((trial for trial in self.trials if not trial.measured), None)

    @cached_property
    def quiet(self) -> tuple[Trial, ...]:
        """The measured trials that other programs did not disturb."""
        return tuple(trial for trial in self.measured if not trial.disturbed)

    @cached_property
    def forward(self) -> Spread:
        return self._times("forward_seconds")

    @cached_property
    def backward(self) -> Spread:
        return self._times("backward_seconds")

    @cached_property
    def total(self) -> Spread:
        return self._times("total_seconds")

    def _times(self, name: str) -> Spread:
        return spread((getattr(trial, name) for trial in self.quiet or self.measured), disturbed=not self.quiet)

    @property
    def sent_bytes(self) -> int | None:
        """Bytes sent by the busiest rank, forward and backward; None if they are not counted."""
        return max((max(trial.sent_bytes) for trial in self.measured if trial.sent_bytes), default=None)

    @cached_property
    def rank_bytes(self) -> Spread:
        """Peak growth of the largest rank."""
        return spread(max(trial.peak_bytes) for trial in self.measured)

    @property
    def tokens_per_second(self) -> float:
        return self.case.tokens / self.total.median

    @property
    def disturbed(self) -> int:
        """Number of trials that other programs disturbed in spite of repeats."""
        return len(self.measured) - len(self.quiet)

    @property
    def foreign_cores(self) -> float:
        """Most cores that other programs kept busy during a trial whose time counts."""
        return max(trial.foreign_cores for trial in self.quiet or self.measured)

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"case": self.case.as_json(), "trials": len(self.measured)}
        if self.measured:
            names = ("forward", "backward", "total", "rank_bytes")
            found |= {name: asdict(getattr(self, name)) for name in names}
            found |= {"tokens_per_second": self.tokens_per_second, "foreign_cores": self.foreign_cores}
            found |= {"disturbed_trials": self.disturbed, "sent_bytes": self.sent_bytes}
        if is_planned(self.case):
            found["planned_rank_bytes"] = max(planned_bytes(self.case))
        if self.failure:
            found |= {"outcome": self.failure.outcome, "reason": self.failure.reason}
        return found


def summarize(trials: Iterable[Trial]) -> dict[BenchCase, Summary]:
    """A summary of each case, in order of first appearance."""
    by_case: defaultdict[BenchCase, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_case[trial.case].append(trial)
    return {case: Summary(case, tuple(found)) for case, found in by_case.items()}


def speed_up(summaries: Mapping[BenchCase, Summary], case: BenchCase) -> Spread | None:
    """Speed relative to the same implementation on one process, round by round; None if that was not measured.

    Trials of the same round are compared, so that a drift of the machine cancels. Rounds with a disturbed trial count
    only if there are no others.
    """
    alone = find_alone(summaries, case)
    if alone is None or case.ranks == 1 or not summaries[case].measured:
        return None
    single = {trial.round: trial for trial in alone.measured}
    pairs = [(single[trial.round], trial) for trial in summaries[case].measured if trial.round in single]
    quiet = [(one, many) for one, many in pairs if not (one.disturbed or many.disturbed)]
    ratios = [one.total_seconds / many.total_seconds for one, many in quiet or pairs]
    return spread(ratios, disturbed=not quiet) if ratios else None


def find_alone(summaries: Mapping[BenchCase, Summary], case: BenchCase) -> Summary | None:
    """The same implementation at the same length on one process, where the layout makes no difference."""
    wanted = replace(case, ranks=1, layout="contiguous")
    for other, summary in summaries.items():
        if replace(other, layout="contiguous") == wanted:
            return summary
    return None


def title_of(case: BenchCase) -> str:
    return IMPLEMENTATIONS[case.implementation].title


def pattern_names(summaries: Mapping[BenchCase, Summary]) -> dict[Pattern, str]:
    """A short name for the pattern of each ladder: "dilated" if there is only one dilated pattern."""
    patterns = {case.ladder.pattern: case.pattern_name for case in summaries}
    alone = sum(isinstance(pattern, Dilated) for pattern in patterns) == 1
    return {p: "dilated" if alone and isinstance(p, Dilated) else name for p, name in patterns.items()}


@dataclass(frozen=True)
class LadderReach:
    """The longest measured length of a ladder, and the trial that ended it; either may be None."""

    ladder: BenchCase
    longest: Summary | None
    ended_by: Trial | None


def reaches(summaries: Mapping[BenchCase, Summary]) -> list[LadderReach]:
    """The reach of each ladder, in order of first appearance."""
    ladders: defaultdict[BenchCase, list[Summary]] = defaultdict(list)
    for case, summary in summaries.items():
        ladders[case.ladder].append(summary)
    return [LadderReach(ladder, _longest(found), _first_failure(found)) for ladder, found in ladders.items()]


def _longest(found: Sequence[Summary]) -> Summary | None:
    whole = [summary for summary in found if summary.measured and not summary.failure]
    return max(whole, key=lambda summary: summary.case.tokens, default=None)


def _first_failure(found: Sequence[Summary]) -> Trial | None:
    failed = [summary for summary in found if summary.failure]
    return min(failed, key=lambda summary: summary.case.tokens).failure if failed else None


Summaries = Mapping[BenchCase, Summary]


def throughput_picture(summaries: Summaries, name: str = "throughput") -> Picture:
    """Tokens per second by length, one line for each implementation and number of processes."""
    figure, axis = _empty_axis()
    _draw_ladders(axis, summaries, lambda summary: summary.tokens_per_second, times=True)
    axis.set_ylabel("tokens per second (log scale)")
    axis.set_title("Throughput: higher is better", loc="left", fontsize=11)
    _add_legend(figure, axis)
    caption = (
        "Median tokens per second by sequence length. A level line means that time grows linearly with the length; a "
        "falling line means that it grows faster, as in plain attention. Dashes: number of processes. Hollow markers: "
        "plain attention. Crossed out: other programs disturbed every trial."
    )
    return Picture(name, figure, caption)


def memory_picture(summaries: Summaries, name: str = "memory") -> Picture:
    """Peak memory of the largest rank by length."""
    figure, axis = _empty_axis()
    _draw_ladders(axis, summaries, lambda summary: summary.rank_bytes.median / 2**20)
    axis.set_ylabel("peak memory of a rank (MiB, log scale)")
    axis.set_title("Memory: lower is better", loc="left", fontsize=11)
    _add_legend(figure, axis)
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


def _empty_axis() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    return figure, figure.subplots()


def _add_legend(figure: Figure, axis: Axes) -> None:
    plain_axes([axis])
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
