"""The report of `ringspan bench`: its tables, how their cells are formatted, and the files it is written to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringspan.tools.bench.cases import BenchCase
from ringspan.tools.bench.ladder import BenchSettings, CaseForecast, TrialStore, is_planned, plan_of, planned_bytes
from ringspan.tools.bench.summaries import (
    LadderReach,
    Spread,
    Summary,
    memory_picture,
    pattern_names,
    process_count,
    reaches,
    speed_up,
    summarize,
    throughput_picture,
    title_of,
)
from ringspan.tools.bench.trials import Trial, TrialLimits
from ringspan.tools.measure import describe_machine, one_line
from ringspan.tools.pages import Page, Rows, Table, write_page

Summaries = Mapping[BenchCase, Summary]

SPEED_TEXT = """\
Medians over rounds in which all cases of a length take turns, with the lowest and the highest value in brackets. Each
trial runs in fresh processes, and the slowest rank counts. Speed-up is relative to the same implementation on one
process. Load is the most cores that other programs kept busy during a trial. Trials with a load above 0.1 are disturbed
and do not count; values marked † come from disturbed trials only."""
REACH_TEXT = """\
A token reaches the tokens of its longest segment. A segment that crosses ranks is sent, already dilated. Sent: counted
by the busiest rank, forward and backward. Planned: predicted by ringspan's plan before anything runs."""
DISTURBED_MARK = " †"
MEMORY_TEXT = """\
Peak growth of a rank's resident memory: its rows of inputs, outputs and gradients, parcels, workspace and masks.
Planned: predicted by ringspan's plan before anything runs, for the largest rank, without the workspace (16 MiB) and
memory that libraries and allocators retain."""
LONGEST_TEXT = "The longest length at which every trial succeeded, and what ended the ladder at longer ones."
FAILED_TEXT = "A length that fails ends the ladder of that implementation on that number of processes."
_BEFORE_A_UNIT = re.compile(r"(?<=\d) (?=(?:s|x|MiB)\b)")
_BETWEEN_BOUNDS = re.compile(r"(?<=\d) - (?=\d)")
_SPEED_COLUMNS = ("forward", "backward", "total", "tokens/s", "speed-up", "load", "trials")


def seconds(value: float) -> str:
    """A time with three significant digits.

    >>> seconds(0.1234), seconds(12.34), seconds(123.4)
    ('0.123 s', '12.3 s', '123 s')
    """
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} s"


def seconds_with_spread(times: Spread) -> str:
    """The median, with the lowest and the highest value in brackets.

    >>> seconds_with_spread(Spread(2.0, 1.5, 2.5, 3))
    '2.00 s (1.50 - 2.50)'
    """
    low, high = (seconds(x).removesuffix(" s") for x in (times.low, times.high))
    bounds = f" ({low} - {high})" if times.count > 1 else ""
    return seconds(times.median) + bounds + mark(times)


def mark(value: Spread) -> str:
    """The mark of a value that comes from disturbed trials only; empty otherwise."""
    return DISTURBED_MARK if value.disturbed else ""


def factor(ratio: Spread | None) -> str:
    if ratio is None:
        return ""
    bounds = f" ({ratio.low:.2f} - {ratio.high:.2f})" if ratio.count > 1 else ""
    return f"{ratio.median:.2f} x{bounds}{mark(ratio)}"


def throughput(summary: Summary) -> str:
    """Tokens per second."""
    return f"{summary.tokens_per_second:,.0f}{mark(summary.total)}"


def mebibytes(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


def keep_together(page: Page) -> Page:
    """The page with non-breaking spaces, so that a number stays on one line with its unit and its spread."""

    def whole(cell: str) -> str:
        cell = _BEFORE_A_UNIT.sub("\N{NO-BREAK SPACE}", cell)
        return _BETWEEN_BOUNDS.sub("\N{NO-BREAK SPACE}\N{NON-BREAKING HYPHEN}\N{NO-BREAK SPACE}", cell)

    parts = [
        replace(part, rows=[[whole(cell) for cell in row] for row in part.rows]) if isinstance(part, Table) else part
        for part in page.parts
    ]
    return replace(page, parts=parts)


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
    """Medians only, one table for each pattern and implementation, at most 80 columns wide. The report has the rest."""
    tables = []
    for pattern, name in dict.fromkeys((case.ladder.pattern, case.implementation) for case in summaries):
        rows: Rows = [["tokens", "ranks", "fwd, s", "bwd, s", "tok/s", "speed-up", "MiB", "sent"]]
        cases = [case for case in summaries if (case.ladder.pattern, case.implementation) == (pattern, name)]
        rows += [[f"{case.tokens:,}", str(case.ranks), *_medians(summaries, case)] for case in cases]
        patterns = "; ".join(dict.fromkeys(case.pattern.text for case in cases))
        tables.append(Table(f"{name}, {patterns}", rows))
    return tables


def _medians(summaries: Summaries, case: BenchCase) -> list[str]:
    """Cells without units and spaces: seconds, tokens per second, a factor, MiB of the largest rank, MiB sent."""
    summary = summaries[case]
    if not summary.measured:
        return [summary.failure.outcome if summary.failure else "", "", "", "", "", ""]
    gain = speed_up(summaries, case)
    cells = [
        seconds(summary.forward.median) + mark(summary.forward),
        seconds(summary.backward.median) + mark(summary.backward) if case.backward else "",
        throughput(summary),
        f"{gain.median:.2f}{mark(gain)}" if gain else "",
        mebibytes(summary.rank_bytes.median),
        sent_cell(summary),
    ]
    return [cell.replace(" s", "").replace(" MiB", "").replace(DISTURBED_MARK, "†") for cell in cells]


def sent_cell(summary: Summary) -> str:
    """Bytes sent by the busiest rank, forward and backward; empty if they are not counted."""
    sent = summary.sent_bytes
    return "" if sent is None else f"{sent / 2**20:,.1f} MiB" if sent else "nothing"


def reach_table(summaries: Summaries) -> Table | None:
    """Reach, segments that cross ranks, and bytes sent, for ringspan's rings. None if there is no ring."""
    rows: Rows = [["pattern", "tokens", "processes", "layout", "a token reaches", "cross ranks", "sent", "planned"]]
    for case, summary in _rings(summaries):
        plan = plan_of(case)
        reach, ranks = plan.reach, range(case.ranks)
        planned = max(
            plan.bytes_sent(rank) + (plan.bytes_sent(rank, backward=True) if case.backward else 0) for rank in ranks
        )
        rows.append(
            [
                case.pattern.text,
                f"{case.tokens:,}",
                str(case.ranks),
                case.layout,
                f"{reach.longest:,}",
                ", ".join(f"{w:,}" for w in dict.fromkeys(reach.crossing)) or "none",
                sent_cell(summary),
                f"{planned / 2**20:,.1f} MiB",
            ]
        )
    return Table("Reach and bytes sent", rows, REACH_TEXT) if len(rows) > 1 else None


def idle_rings(summaries: Summaries) -> list[str]:
    """A sentence for each ring that sends nothing because no segment crosses its ranks."""
    found = ((case, plan_of(case).reach) for case, _ in _rings(summaries))
    return [f"{case.tokens:,} tokens on {case.ranks} ranks: {reach}" for case, reach in found if not reach.crossing]


def _rings(summaries: Summaries) -> list[tuple[BenchCase, Summary]]:
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


def reach_cells(reach: LadderReach) -> list[str]:
    end = f"{reach.ended_by.case.tokens:,}: {why(reach.ended_by)}" if reach.ended_by else "the longest requested"
    if reach.longest is None:
        return ["none", "", "", end]
    longest = reach.longest
    speed = throughput(longest) + ("" if longest.case.backward else " (forward only)")
    return [f"{longest.case.tokens:,}", speed, mebibytes(longest.rank_bytes.median), end]


def failures_table(summaries: Summaries) -> Table | None:
    """One row per failure, with the longer lengths that were not tried because of it. None if everything ran."""
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
    """An outcome with its reason in brackets."""
    return f"{trial.outcome} ({trial.reason})" if trial.reason else trial.outcome


def forecast_table(forecasts: Sequence[CaseForecast], limits: TrialLimits) -> Table:
    """The cases that would run. For other implementations memory is a lower bound."""
    rows: Rows = [["implementation", "tokens", "ranks", "layout", "memory, MiB", "runs"]]
    for one in forecasts:
        case, bound = one.case, "" if one.exact else "≥ "
        memory = f"{bound}{one.memory_bytes / 2**20:,.0f}"
        rows.append(
            [case.implementation, f"{case.tokens:,}", str(case.ranks), case.layout, memory, _yes(not one.obstacle)]
        )
    return Table(f"{len(forecasts)} cases, {mebibytes(limits.memory_bytes)} allowed for each", rows)


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def make_page(trials: Sequence[Trial], command: str) -> Page:
    """Tables of speed, memory, longest lengths and failures, with plots of what was measured."""
    summaries = summarize(trials)
    page = Page("ringspan bench", headline(summaries), command, one_line(describe_machine()))
    if any(summary.measured for summary in summaries.values()):
        page.parts.append(speed_table(summaries))
        page.parts.append(throughput_picture(summaries))
        page.parts.append(memory_table(summaries))
        page.parts.append(memory_picture(summaries))
    reach = reach_table(summaries)
    if reach:
        page.parts.append(reach)
    page.parts.append(longest_table(summaries))
    failures = failures_table(summaries)
    if failures:
        page.parts.append(failures)
    return keep_together(page)


def headline(summaries: Mapping[BenchCase, Summary]) -> str:
    """One sentence about ringspan's longest case on the most processes."""
    ours = [s for case, s in summaries.items() if case.implementation == "ringspan" and s.measured]
    if not ours:
        return "Nothing was measured. The last table gives the reasons."
    best = max(ours, key=lambda s: (s.case.tokens, s.case.ranks))
    case = best.case
    causal = "causal" if case.causal else "not causal"
    passes = "forward and backward" if case.backward else "forward"
    return (
        f"{case.tokens:,} tokens ({case.pattern.text}, {causal}, {case.heads} heads of {case.head_dim}, "
        f"{case.dtype}), {passes}, {outcome(best, speed_up(summaries, case))} {plan_of(case).reach}"
    )


def outcome(summary: Summary, gain: Spread | None) -> str:
    """Time, speed-up, memory and bytes sent, as the end of a sentence. Disturbed times and speed-ups are omitted."""
    ranks, sent = process_count(summary.case.ranks), sent_cell(summary)
    quiet = not summary.total.disturbed
    text = f"in {seconds(summary.total.median)} on {ranks}" if quiet else f"on {ranks}"
    if gain and not gain.disturbed:
        text += f", {gain.median:.2f} times the speed of one process"
    text += f", with {mebibytes(summary.rank_bytes.median)} on the largest rank"
    text += f" and {sent} sent by the busiest." if sent else "."
    if not quiet:
        return f"{text} Other programs disturbed every trial: all times are marked †. Run it on an idle machine."
    if gain and gain.disturbed:
        return f"{text} Other programs disturbed every round: speed-ups are marked †. Run it on an idle machine."
    return text


def as_json(trials: Sequence[Trial], settings: BenchSettings, store: TrialStore, command: str) -> dict[str, Any]:
    """The whole report as JSON: machine, settings, all trials, and their summaries."""
    return {
        "command": command,
        "machine": describe_machine(),
        "settings": {
            "memory_bytes": settings.limits.memory_bytes,
            "time_limit_seconds": settings.limits.seconds,
            "rounds": settings.rounds,
            "threads": settings.threads,
        },
        "fingerprint": store.fingerprint,
        "summaries": [summary.as_json() for summary in summarize(trials).values()],
        "trials": [trial.as_json() for trial in trials],
    }


def write_report(page: Page, document: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Write bench.json, bench.md with its pictures, and bench.html. Returns the path of each."""
    paths = write_page(page, folder, "bench")
    paths["json"] = folder / "bench.json"
    paths["json"].write_text(json.dumps(document, indent=1) + "\n")
    return paths


def ringspan_crashed(trials: Sequence[Trial]) -> list[Trial]:
    """Crashed trials of ringspan. Running out of memory or time is a result; a crash is a defect."""
    return [t for t in trials if t.outcome == "crashed" and is_planned(t.case)]
