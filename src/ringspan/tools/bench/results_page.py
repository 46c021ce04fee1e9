"""docs/results.md: the tables of the `results` suite, from its trials alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ringspan.geometry import Full, Pattern
from ringspan.tools.bench.cases import IMPLEMENTATIONS, BenchCase
from ringspan.tools.bench.ladder import plan_of, planned_bytes
from ringspan.tools.bench.report import outcome
from ringspan.tools.bench.results_pictures import longest_picture, ring_memory_picture, two_picture
from ringspan.tools.bench.suites import REPEAT_UP_TO_SECONDS, RINGS, TRIAL_SECONDS, Scale
from ringspan.tools.bench.summaries import Summary, find_alone, speed_up, summarize
from ringspan.tools.bench.report import (
    FAILED_TEXT,
    factor,
    failure_rows,
    keep_together,
    longest_table,
    mark,
    mebibytes,
    seconds_with_spread,
    sent_cell,
    throughput,
    title_of,
    trials_cell,
)
from ringspan.tools.bench.trials import Trial
from ringspan.tools.measure import describe_machine, one_line
from ringspan.tools.pages import Page, Picture, Rows, Table, html, markdown

Summaries = Mapping[BenchCase, Summary]
Trials = Mapping[str, Sequence[Trial]]  # by the name of their part


def make_results_page(trials: Trials, scale: Scale, command: str) -> Page:
    """The page, from the trials of each part."""
    found = {name: summarize(part) for name, part in trials.items()}
    longest = {**found["longest on 1"], **found["longest on 2"]}
    machine = describe_machine() | {"date": _dates(trials)}
    page = Page(
        "Results",
        _sentence(found["long"], scale),
        command,
        f"Machine: {one_line(machine)}",
        [
            _setting_table(trials, scale),
            _memory_table(found["memory"]),
            ring_memory_picture(found["memory"], scale.memory_tokens[-1]),
            _two_table(found["one against two"]),
            two_picture(found["one against two"]),
            longest_table(longest, "Longest sequence and throughput", _longest_text(scale)),
            longest_picture(longest, scale.rank_budget_bytes),
            _one_length_table(found["one length"], scale.one_length),
            _long_table(found["long"], scale.long_length),
            _failures(found),
        ],
    )
    return keep_together(page)


def write_results(page: Page, root: Path) -> dict[str, Path]:
    """Write docs/results.md with docs/figures/results_*.png, and the same as one HTML file beside the raw data."""
    paths = {"markdown": root / "docs/results.md", "html": root / "benchmarks/results/results.html"}
    for path in (*paths.values(), root / "docs/figures/any"):
        path.parent.mkdir(parents=True, exist_ok=True)
    for part in page.parts:
        if isinstance(part, Picture):
            part.figure.savefig(root / "docs/figures" / f"{part.name}.png", dpi=130)
    paths["markdown"].write_text(markdown(page, "figures"))
    paths["html"].write_text(html(page))
    return paths


def _dates(trials: Trials, name: str = "") -> str:
    """The days of all trials, or of those with a dilated or the full pattern."""
    ran = [trial for part in trials.values() for trial in part if trial.ran]
    days = sorted({trial.when[:10] for trial in ran if not name or _name(trial.case.pattern) == name})
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "nothing was run"


def _sentence(long: Summaries, scale: Scale) -> str:
    measured = [summary for summary in long.values() if summary.measured]
    if not measured:
        return f"{scale.long_length:,} tokens did not run; the last table says why."
    most = max(measured, key=lambda summary: summary.case.ranks)
    return (
        f"{scale.long_length:,} tokens ({most.case.pattern.text}, causal), forward and backward, "
        f"{outcome(most, speed_up(long, most.case))} {plan_of(most.case).reach} Every figure below was measured in "
        "fresh processes, and what did not run is in the last table, with the reason."
    )


def _patterns(trials: Trials) -> str:
    """The dilated pattern of each length."""
    cases = [trial.case for part in trials.values() for trial in part if _name(trial.case.pattern) == "dilated"]
    found = {case.tokens: case.pattern.text for case in sorted(cases, key=lambda case: case.tokens)}
    return "; ".join(f"{tokens:,} tokens {label}" for tokens, label in found.items())


def _setting_table(trials: Trials, scale: Scale) -> Table:
    ran = [trial for part in trials.values() for trial in part if trial.ran]
    once = {(trial.case, trial.round, trial.when): trial for trial in ran}.values()
    disturbed = sum(trial.disturbed for trial in once)
    heads, dim = next(((trial.case.heads, trial.case.dim) for part in trials.values() for trial in part), (0, 0))
    rows = [
        ["what", "value"],
        ["dilated", f"segment x rate, causal, spanning the sequence: {_patterns(trials)}"],
        ["full", "plain causal attention"],
        ["shapes", f"batch 1, {heads} heads of {dim}, float32 unless said otherwise, one thread a process"],
        ["trials", f"{len(once)} in fresh processes; {disturbed} disturbed by other programs in spite of repeats"],
        ["measured", ", ".join(f"{name}: {_dates(trials, name)}" for name in ("dilated", "full"))],
        ["raw data", "benchmarks/results/results.jsonl, a line for each trial"],
    ]
    text = (
        "Times are medians over rounds in which all cases of a length take turns, the slower rank counting; in "
        "brackets the lowest and the highest. Disturbed trials (other programs kept more than 0.1 of a core busy) do "
        "not count; figures marked † have no others. Trials that take longer than "
        f"{REPEAT_UP_TO_SECONDS:.0f} s, their start included, are run once. "
        "ring-attention-pytorch is called as its function comes: contiguous rows, its own bucket size."
    )
    return Table("How it was measured", rows, text)


def _memory_table(found: Summaries) -> Table:
    """A row for each length, pattern and ring size."""
    by_key: dict[tuple[int, Pattern, int], dict[str, Summary]] = {}
    for case, summary in found.items():
        by_key.setdefault((case.tokens, case.pattern, case.ranks), {})[case.implementation] = summary
    rows: Rows = [
        [
            "tokens",
            "pattern",
            "ranks",
            "planned",
            "simulated rank",
            "real process",
            *(IMPLEMENTATIONS[name].title for name in RINGS),
        ]
    ]
    order = sorted(by_key, key=lambda key: (key[0], isinstance(key[1], Full), key[2]))
    for key in order:
        who = by_key[key]
        ours = who.get("ringspan") or who.get("simulated")
        planned = mebibytes(max(planned_bytes(ours.case))) if ours else ""
        cells = [_memory_cell(who.get(name)) for name in ("simulated", "ringspan", *RINGS)]
        rows.append([f"{key[0]:,}", _name(key[1]), str(key[2]), planned, *cells])
    text = (
        "Of the largest rank, forward and backward. Planned: rows of all tensors and parcels, from the plan alone. "
        "Simulated rank: the peak of the bytes that a virtual rank held, as the simulated ring counts them. Real "
        "process: growth of a process's resident memory at its peak; it holds the workspace and what libraries and "
        "allocators keep too, which is why it stops falling at short lengths. The others know plain attention only, "
        "and a ring of one is none."
    )
    return Table("Memory by ring size", rows, text)


def _memory_cell(summary: Summary | None) -> str:
    if summary is None:
        return ""
    return mebibytes(summary.rank_bytes.median) if summary.measured else _outcome(summary)


def _two_table(found: Summaries) -> Table:
    rows: Rows = [
        [
            "tokens",
            "pattern",
            "implementation",
            "forward, 1",
            "forward, 2",
            "backward, 1",
            "backward, 2",
            "total, 1",
            "total, 2",
            "speed-up",
            "trials",
        ]
    ]
    for case, summary in sorted(found.items(), key=lambda item: _two_order(item[0])):
        alone = find_alone(found, case)
        if case.ranks == 1 and any(_same_but_ranks(case, other) for other in found if other.ranks > 1):
            continue  # stands in the row of its two processes
        one, both = (summary, None) if case.ranks == 1 else (alone, summary)
        times = [_time_cell(which, name) for name in ("forward", "backward", "total") for which in (one, both)]
        trials = " / ".join(trials_cell(which) for which in (one, both) if which is not None and which.measured)
        up = factor(speed_up(found, case))
        rows.append([f"{case.tokens:,}", _name(case.pattern), title_of(case), *times, up, trials])
    text = (
        "On one process (1) and on two (2). Speed-up: total on one over total on two, round by round. SDPA knows no "
        "second process; an all-gather on one process is SDPA."
    )
    return Table("One process against two", rows, text)


def _two_order(case: BenchCase) -> tuple[int, bool, int]:
    return case.tokens, isinstance(case.pattern, Full), list(IMPLEMENTATIONS).index(case.implementation)


def _same_but_ranks(case: BenchCase, other: BenchCase) -> bool:
    return replace(case, ranks=0, layout="contiguous") == replace(other, ranks=0, layout="contiguous")


def _time_cell(summary: Summary | None, name: str) -> str:
    if summary is None:
        return ""
    return seconds_with_spread(getattr(summary, name)) if summary.measured else _outcome(summary)


def _one_length_table(found: Summaries, tokens: int) -> Table:
    ours = {(c.pattern, c.ranks): s for c, s in found.items() if c.implementation == "ringspan" and s.measured}
    rows: Rows = [
        [
            "pattern",
            "processes",
            "implementation",
            "forward",
            "backward",
            "total",
            "tokens/s",
            "memory of a rank",
            "total, of ringspan's",
        ]
    ]
    for case, summary in sorted(found.items(), key=lambda item: (isinstance(item[0].pattern, Full), item[0].ranks)):
        start = [_name(case.pattern), str(case.ranks), title_of(case)]
        if not summary.measured:
            rows.append([*start, _outcome(summary), "", "", "", "", ""])
            continue
        backward = seconds_with_spread(summary.backward) if case.backward else "none on CPUs"
        base = ours.get((case.pattern, case.ranks))
        share = ""
        if base is not None and case.implementation != "ringspan":
            figure, of = ("total", "") if case.backward else ("forward", " (forward)")
            theirs, own = getattr(summary, figure), getattr(base, figure)
            share = f"{theirs.median / own.median:.2f} x{of}{mark(theirs) or mark(own)}"
        rows.append(
            [
                *start,
                seconds_with_spread(summary.forward),
                backward,
                seconds_with_spread(summary.total),
                throughput(summary),
                mebibytes(summary.rank_bytes.median),
                share,
            ]
        )
    return Table(
        f"Forward and backward at {tokens:,} tokens", rows, "The last column: below 1 is faster than ringspan."
    )


def _long_table(found: Summaries, tokens: int) -> Table:
    rows: Rows = [
        [
            "dtype",
            "processes",
            "forward",
            "backward",
            "total",
            "tokens/s",
            "speed-up",
            "sent by a rank",
            "planned for a rank",
            "measured, each rank",
        ]
    ]
    for case, summary in found.items():
        start, planned = [case.dtype, str(case.ranks)], mebibytes(max(planned_bytes(case)))
        if not summary.measured:
            rows.append([*start, _outcome(summary), "", "", "", "", "", planned, ""])
            continue
        times = [seconds_with_spread(x) for x in (summary.forward, summary.backward, summary.total)]
        speed, up = throughput(summary), factor(speed_up(found, case))
        peaks = ", ".join(mebibytes(peak) for peak in summary.measured[0].peak_bytes)
        rows.append([*start, *times, speed, up, sent_cell(summary), planned, peaks])
    label = next(iter(found)).pattern.text
    text = (
        f"{label}, causal, one trial each. Sent: counted by the busiest rank, forward and backward. Memory counts the "
        "inputs, the output and all gradients."
    )
    return Table(f"{tokens:,} tokens", rows, text)


def _longest_text(scale: Scale) -> str:
    return (
        f"Within {mebibytes(scale.rank_budget_bytes)} a process and {TRIAL_SECONDS:.0f} s a trial, one trial each, "
        "lengths doubling. Memory is checked before a trial (ringspan: its plan; others: their growth so far) and "
        "enforced during it."
    )


def _failures(found: Mapping[str, Summaries]) -> Table:
    """Of all parts but the climbs to the longest length, whose own table says what ended them."""
    head = ["table", "implementation", "pattern", "processes", "tokens", "outcome", "reason"]
    climbs = ("longest on 1", "longest on 2")
    rows = [[name, *row] for name, part in found.items() if name not in climbs for row in failure_rows(part)]
    text = FAILED_TEXT if rows else "Everything ran."
    return Table("What did not run, and why", [head, *rows], text)


def _outcome(summary: Summary) -> str:
    return summary.failure.outcome if summary.failure else ""


def _name(pattern: Pattern) -> str:
    return "full" if isinstance(pattern, Full) else "dilated"
