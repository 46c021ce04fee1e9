"""Tables of a benchmark: speed, memory, longest lengths, and what did not run; and how figures are written in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ringspan.geometry import Dilated, Pattern
from ringspan.tools.bench.cases import IMPLEMENTATIONS, Case, pattern_label
from ringspan.tools.bench.ladder import Forecast, plan_of, planned_bytes
from ringspan.tools.bench.summaries import Reach, Spread, Summary, reaches, speed_up
from ringspan.tools.bench.trials import Limits, Trial
from ringspan.tools.pages import Page, Rows, Table

Summaries = Mapping[Case, Summary]

SPEED_TEXT = """\
Medians over rounds in which all cases of a length take turns, each trial in fresh processes and the slower rank
counting; in brackets the lowest and the highest. Speed-up is against the same implementation on one process. Load:
cores that other programs kept busy meanwhile, at most. Disturbed trials, with a load above 0.1, do not count; figures
marked † have no others."""
REACH_TEXT = """\
A token reaches the tokens of its longest segment. A segment that crosses ranks is sent, already dilated. Sent: counted
by the busiest rank, forward and backward; planned: as ringspan's plan says before anything runs."""
DISTURBED_MARK = " †"
MEMORY_TEXT = """\
Growth of a rank's resident memory at its peak: its rows of inputs, outputs and gradients, parcels, workspace and masks.
Planned: what ringspan's plan says before anything runs, for the largest rank; it leaves out the workspace (16 MiB) and
what libraries and allocators keep."""
LONGEST_TEXT = "The longest length at which every trial succeeded, and what ended the climb to longer ones."
_BEFORE_A_UNIT = re.compile(r"(?<=\d) (?=(?:s|x|MiB)\b)")
_BETWEEN_BOUNDS = re.compile(r"(?<=\d) - (?=\d)")
_SPEED_COLUMNS = ("forward", "backward", "total", "tokens/s", "speed-up", "load", "trials")
FAILED_TEXT = "A length that fails ends the climb of that implementation on that many processes."


def seconds(value: float) -> str:
    """Three digits are enough for a time.

    >>> seconds(0.1234), seconds(12.34), seconds(123.4)
    ('0.123 s', '12.3 s', '123 s')
    """
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} s"


def seconds_with_spread(figures: Spread) -> str:
    """The median, and in brackets the lowest and the highest.

    >>> seconds_with_spread(Spread(2.0, 1.5, 2.5, 3))
    '2.00 s (1.50 - 2.50)'
    """
    low, high = (seconds(x).removesuffix(" s") for x in (figures.low, figures.high))
    bounds = f" ({low} - {high})" if figures.count > 1 else ""
    return seconds(figures.median) + bounds + mark(figures)


def mark(figures: Spread) -> str:
    """What stands behind a figure if other programs disturbed every trial it comes from."""
    return DISTURBED_MARK if figures.disturbed else ""


def factor(figures: Spread | None) -> str:
    if figures is None:
        return ""
    bounds = f" ({figures.low:.2f} - {figures.high:.2f})" if figures.count > 1 else ""
    return f"{figures.median:.2f} x{bounds}{mark(figures)}"


def throughput(summary: Summary) -> str:
    """Tokens per second."""
    return f"{summary.tokens_per_second:,.0f}{mark(summary.total)}"


def mebibytes(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


def keep_together(page: Page) -> Page:
    """The page with its figures unbroken: a number, its unit and its spread do not fall apart over lines."""

    def whole(cell: str) -> str:
        cell = _BEFORE_A_UNIT.sub("\N{NO-BREAK SPACE}", cell)
        return _BETWEEN_BOUNDS.sub("\N{NO-BREAK SPACE}\N{NON-BREAKING HYPHEN}\N{NO-BREAK SPACE}", cell)

    parts = [
        replace(part, rows=[[whole(cell) for cell in row] for row in part.rows]) if isinstance(part, Table) else part
        for part in page.parts
    ]
    return replace(page, parts=parts)


def title_of(case: Case) -> str:
    return IMPLEMENTATIONS[case.implementation].title


def pattern_names(summaries: Summaries) -> dict[Pattern, str]:
    """A short name for the pattern of each ladder: "dilated" if there is only one of that kind."""
    patterns = {case.ladder.pattern: case.pattern_name for case in summaries}
    alone = sum(isinstance(pattern, Dilated) for pattern in patterns) == 1
    return {p: "dilated" if alone and isinstance(p, Dilated) else name for p, name in patterns.items()}


def trials_cell(summary: Summary) -> str:
    count = str(len(summary.measured))
    return f"{count} ({summary.disturbed} disturbed)" if summary.disturbed else count


def speed_table(summaries: Summaries) -> Table:
    names = pattern_names(summaries)
    rows = [["implementation", "pattern", "tokens", "processes", *_SPEED_COLUMNS]]
    for case, summary in summaries.items():
        if summary.measured:
            rows.append(
                [
                    title_of(case),
                    names[case.ladder.pattern],
                    f"{case.tokens:,}",
                    str(case.ranks),
                    seconds_with_spread(summary.forward),
                    seconds_with_spread(summary.backward) if case.backward else "not run",
                    seconds_with_spread(summary.total),
                    throughput(summary),
                    factor(speed_up(summaries, case)),
                    f"{summary.foreign_cores:.2f}",
                    trials_cell(summary),
                ]
            )
    return Table("Speed", rows, SPEED_TEXT)


def terminal_tables(summaries: Summaries) -> list[Table]:
    """Medians alone, narrow enough for a terminal, a table for each pattern; the report has the rest."""
    tables = []
    for pattern in dict.fromkeys(case.ladder.pattern for case in summaries):
        rows: Rows = [["", "tokens", "ranks", "forward", "backward", "tok/s", "speed-up", "memory", "sent"]]
        for case, summary in summaries.items():
            if case.ladder.pattern == pattern:
                rows.append(
                    [case.implementation, f"{case.tokens:,}", str(case.ranks), *_medians(summaries, case, summary)]
                )
        patterns = dict.fromkeys(pattern_label(case.pattern) for case in summaries if case.ladder.pattern == pattern)
        tables.append(Table("; ".join(patterns), rows))
    return tables


def _medians(summaries: Summaries, case: Case, summary: Summary) -> list[str]:
    if not summary.measured:
        return [summary.failure.outcome if summary.failure else "", "", "", "", "", ""]
    gain = speed_up(summaries, case)
    return [
        seconds(summary.forward.median) + mark(summary.forward),
        seconds(summary.backward.median) + mark(summary.backward) if case.backward else "not run",
        throughput(summary),
        f"{gain.median:.2f} x{mark(gain)}" if gain else "",
        mebibytes(summary.rank_bytes.median),
        sent_cell(summary),
    ]


def sent_cell(summary: Summary) -> str:
    """What the busiest rank sent, forward and backward; empty if nobody counted."""
    sent = summary.sent_bytes
    return "" if sent is None else f"{sent / 2**20:,.1f} MiB" if sent else "nothing"


def reach_table(summaries: Summaries) -> Table | None:
    """How far tokens see, which segments cross ranks, and what is sent: of ringspan's rings. None without a ring."""
    rows: Rows = [["pattern", "tokens", "processes", "layout", "a token reaches", "cross ranks", "sent", "planned"]]
    for case, summary in _rings(summaries):
        plan = plan_of(case)
        reach, ranks = plan.reach, range(case.ranks)
        planned = max(
            plan.bytes_sent(rank) + (plan.bytes_sent(rank, backward=True) if case.backward else 0) for rank in ranks
        )
        rows.append(
            [
                pattern_label(case.pattern),
                f"{case.tokens:,}",
                str(case.ranks),
                case.layout,
                f"{reach.longest_segment:,}",
                ", ".join(f"{w:,}" for w in reach.crossing) or "none",
                sent_cell(summary),
                f"{planned / 2**20:,.1f} MiB",
            ]
        )
    return Table("Reach, and what is sent", rows, REACH_TEXT) if len(rows) > 1 else None


def idle_rings(summaries: Summaries) -> list[str]:
    """A sentence for each ring that sends nothing, since no segment crosses its ranks."""
    found = ((case, plan_of(case).reach) for case, _ in _rings(summaries))
    return [f"{case.tokens:,} tokens on {case.ranks} ranks: {reach}" for case, reach in found if not reach.crossing]


def _rings(summaries: Summaries) -> list[tuple[Case, Summary]]:
    return [
        (case, summary)
        for case, summary in summaries.items()
        if case.implementation == "ringspan" and case.ranks > 1 and summary.measured
    ]


def memory_table(summaries: Summaries) -> Table:
    names = pattern_names(summaries)
    rows = [["implementation", "pattern", "tokens", "processes", "largest rank", "all ranks", "planned"]]
    for case, summary in summaries.items():
        if summary.measured:
            planned = mebibytes(max(planned_bytes(case))) if case.implementation == "ringspan" else ""
            largest = summary.rank_bytes.median
            together = max(sum(trial.peak_bytes) for trial in summary.measured)
            rows.append(
                [
                    title_of(case),
                    names[case.ladder.pattern],
                    f"{case.tokens:,}",
                    str(case.ranks),
                    mebibytes(largest),
                    mebibytes(together),
                    planned,
                ]
            )
    return Table("Memory", rows, MEMORY_TEXT)


def longest_table(summaries: Summaries, title: str = "Longest length", text: str = LONGEST_TEXT) -> Table:
    names = pattern_names(summaries)
    rows = [["implementation", "pattern", "processes", "longest", "tokens/s", "memory of a rank", "ended by"]]
    for reach in reaches(summaries):
        ladder = reach.ladder
        rows.append([title_of(ladder), names[ladder.pattern], str(ladder.ranks), *reach_cells(reach)])
    return Table(title, rows, text)


def reach_cells(reach: Reach) -> list[str]:
    end = f"{reach.ended_by.case.tokens:,}: {why(reach.ended_by)}" if reach.ended_by else "the longest asked for"
    if reach.longest is None:
        return ["none", "", "", end]
    longest = reach.longest
    speed = throughput(longest) + ("" if longest.case.backward else " (forward only)")
    return [f"{longest.case.tokens:,}", speed, mebibytes(longest.rank_bytes.median), end]


def failures_table(summaries: Summaries) -> Table | None:
    """Each failure; the longer lengths that were not tried because of it share its row. None if everything ran."""
    rows: Rows = [["implementation", "pattern", "processes", "tokens", "outcome", "reason"], *failure_rows(summaries)]
    return Table("What did not run, and why", rows, FAILED_TEXT) if len(rows) > 1 else None


def failure_rows(summaries: Summaries) -> Rows:
    names = pattern_names(summaries)
    rows: Rows = []
    for reach in reaches(summaries):
        if reach.ended_by is None:
            continue
        ladder, failed = reach.ladder, reach.ended_by
        longer = [c for c, s in summaries.items() if c.ladder == ladder and c.tokens > failed.case.tokens and s.failure]
        untried = f"; {len(longer)} longer not tried" if longer else ""
        where = [title_of(ladder), names[ladder.pattern], str(ladder.ranks)]
        rows.append([*where, f"{failed.case.tokens:,}{untried}", failed.outcome, failed.reason])
    return rows


def why(trial: Trial) -> str:
    """An outcome and its reason in one phrase."""
    return f"{trial.outcome} ({trial.reason})" if trial.reason else trial.outcome


def forecast_table(title: str, forecasts: Sequence[Forecast], limits: Limits) -> Table:
    """What would be run; of other implementations nothing is known but a lower bound."""
    rows = [["case", "layout", "all ranks need", "obstacle"]]
    for one in forecasts:
        bound = "" if one.exact else "at least "
        rows.append([str(one.case), one.case.layout, bound + mebibytes(one.memory_bytes), one.obstacle])
    return Table(f"{title}: {len(forecasts)}, {mebibytes(limits.memory_bytes)} allowed for each", rows)
