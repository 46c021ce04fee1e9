"""Trials of ringspan and its alternatives over lengths and ring sizes, in fresh processes.

The journal holds the trials of `ringspan.tools.bench` and the sizes of the suite, so the page follows from it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import psutil

from benchmarks.results_pictures import longest_picture, ring_memory_picture, two_picture
from benchmarks.suite import Measuring, Page, Results, Rows, Suite, Table
from ringspan.geometry import Full, Pattern, parse_pattern
from ringspan.tools.bench.cases import IMPLEMENTATIONS, BenchCase, make_cases
from ringspan.tools.bench.ladder import BenchSettings, TrialStore, plan_of, planned_bytes, run_cases
from ringspan.tools.bench.report import (
    FAILED_TEXT,
    factor,
    failure_rows,
    keep_together,
    longest_table,
    mark,
    mebibytes,
    outcome,
    ringspan_crashed,
    seconds_with_spread,
    sent_cell,
    throughput,
    trials_cell,
)
from ringspan.tools.bench.summaries import Summary, find_alone, speed_up, summarize, title_of
from ringspan.tools.bench.trials import Trial, TrialLimits

RINGS = ("torch_ring", "ring_attention_pytorch", "all_gather")
SHARE_OF_FREE_MEMORY = 0.8
Summaries = Mapping[BenchCase, Summary]
Trials = Mapping[str, Sequence[Trial]]  # by the name of their part


@dataclass(frozen=True)
class ResultsPart:
    """One table of the suite: its cases, and how they are run."""

    name: str
    cases: Sequence[BenchCase]
    settings: BenchSettings


@dataclass(frozen=True)
class ResultsScale:
    """The sizes of the suite. Lengths grow step by step, since each step is checked before the next is tried.

    ``pattern`` is "spanning" (the pattern spans each length) or the text of one pattern for all lengths. A memory of 0
    bytes means a share of the free memory when the suite starts.
    """

    pattern: str
    first_segment: int
    two_tokens: Sequence[int]
    memory_tokens: Sequence[int]
    simulated_rings: Sequence[int]
    real_rings: Sequence[int]
    longest_tokens: Sequence[int]
    rank_budget_bytes: int
    one_length: int
    long_length: int
    long_dtypes: Sequence[str]
    rounds: int
    attempts: int
    trial_seconds: float  # limit of the short cases
    long_trial_seconds: float  # limit of the long length
    repeat_up_to_seconds: float  # longer trials are run once
    memory_bytes: int


LONG_SCALE = ResultsScale(
    pattern="spanning",
    first_segment=2048,
    two_tokens=(4096, 8192, 16384),
    memory_tokens=(16384,),
    simulated_rings=(1, 2, 4, 8, 16, 32),
    real_rings=(1, 2, 4, 8),
    longest_tokens=(4096, 8192, 16384, 32768, 65536, 131072),
    rank_budget_bytes=2**30,
    one_length=8192,
    long_length=524288,
    long_dtypes=("float32",),
    rounds=3,
    attempts=3,
    trial_seconds=40.0,
    long_trial_seconds=1200.0,
    repeat_up_to_seconds=12.0,
    memory_bytes=0,
)
DEFAULT_SCALE = replace(
    LONG_SCALE,
    two_tokens=(2048, 4096),
    memory_tokens=(4096,),
    simulated_rings=(1, 4, 16),
    real_rings=(1, 2, 4),
    longest_tokens=(4096, 8192, 16384, 32768),
    one_length=4096,
    long_length=131072,
    attempts=2,
    trial_seconds=20.0,
)
QUICK_SCALE = ResultsScale(
    pattern="spanning",
    first_segment=64,
    two_tokens=(256, 512),
    memory_tokens=(256, 512),
    simulated_rings=(1, 2, 4),
    real_rings=(1, 2),
    longest_tokens=(256, 512, 65536),
    rank_budget_bytes=2**28,
    one_length=512,
    long_length=4096,
    long_dtypes=("float32",),
    rounds=1,
    attempts=1,
    trial_seconds=40.0,
    long_trial_seconds=1200.0,
    repeat_up_to_seconds=12.0,
    memory_bytes=0,
)


def trials(run: Measuring) -> None:
    stored = run.results.get("trials", {}).get("scale")
    scale = run.sized(QUICK_SCALE, DEFAULT_SCALE, LONG_SCALE)
    scale = replace(scale, memory_bytes=int(SHARE_OF_FREE_MEMORY * psutil.virtual_memory().available))
    if run.resume and stored:
        scale = ResultsScale(**stored)
    run.results.add("trials", asdict(scale), "scale")
    store = TrialStore(run.results.path, 1)
    for part in results_parts(scale):
        steps = len(part.cases) * part.settings.rounds
        announce = partial(_announce, run, part.name, steps)
        for trial in run_cases(part.cases, part.settings, store, announce=announce):
            if not trial.measured:
                run.announce(f"{trial.case}: {trial.outcome}: {trial.reason}")


def _announce(run: Measuring, part: str, steps: int, step: int, text: str) -> None:
    run.announce(f"{part}, {step} of {steps}: {text}")


def results_parts(scale: ResultsScale) -> list[ResultsPart]:
    """The tables of the suite. They share trials: a case that two tables show is measured once."""
    make = partial(make_cases, first_segment=scale.first_segment)
    dilated: Pattern | Literal["spanning"] = "spanning" if scale.pattern == "spanning" else parse_pattern(scale.pattern)
    patterns = (dilated, Full())
    memory_bytes = scale.memory_bytes
    settings = BenchSettings(
        TrialLimits(memory_bytes, scale.trial_seconds),
        scale.rounds,
        attempts=scale.attempts,
        long_seconds=scale.repeat_up_to_seconds,
    )
    once = replace(settings, rounds=1)
    small = [ranks for ranks in scale.real_rings if ranks > 1]
    two = make(("ringspan", "sdpa", *RINGS[:2]), patterns, scale.two_tokens, (1,)) + make(
        ("ringspan", *RINGS), patterns, scale.two_tokens, (2,)
    )
    memory = (
        make(("simulated",), patterns, scale.memory_tokens, scale.simulated_rings)
        + make(("ringspan",), patterns, scale.memory_tokens, scale.real_rings)
        + make(RINGS, patterns, scale.memory_tokens, small)
    )
    at_one_length = make(
        ("ringspan", "sdpa", "sdpa_mask", "flex", *RINGS[:2]), patterns, (scale.one_length,), (1,)
    ) + make(("ringspan", *RINGS), patterns, (scale.one_length,), (2,))
    longest_names = {1: ("ringspan", "sdpa", "sdpa_mask", "flex"), 2: ("ringspan", *RINGS)}
    longest = [
        ResultsPart(
            f"longest on {ranks}",
            make(names, patterns, scale.longest_tokens, (ranks,)),
            replace(once, limits=TrialLimits(ranks * scale.rank_budget_bytes, scale.trial_seconds)),
        )
        for ranks, names in longest_names.items()
    ]
    long = [
        case
        for dtype in scale.long_dtypes
        for case in make(("ringspan",), (dilated,), (scale.long_length,), (1, 2), dtype=dtype)
    ]
    return [
        ResultsPart("one against two", two, settings),
        ResultsPart("one length", at_one_length, settings),
        ResultsPart("memory", memory, once),
        *longest,
        ResultsPart("long", long, replace(once, limits=TrialLimits(memory_bytes, scale.long_trial_seconds))),
    ]


def stored_trials(results: Results) -> tuple[ResultsScale, dict[str, list[Trial]]]:
    """The sizes and the stored trials of each part."""
    scale = ResultsScale(**results["trials"]["scale"])
    store = TrialStore(results.path, 1, of_last_run=True)
    trials = {}
    for part in results_parts(scale):
        cases = [store.stored_case(case) for case in part.cases]
        trials[part.name] = list(run_cases(cases, part.settings, store, run=None))
    return scale, trials


def broken(results: Results) -> str:
    crashed = [trial for part in stored_trials(results)[1].values() for trial in ringspan_crashed(part)]
    return "; ".join(f"{trial.case} crashed: {trial.reason}" for trial in crashed)


def report(results: Results) -> Page:
    scale, trials = stored_trials(results)
    return make_results_page(trials, scale, results.machine, results.get("note", ""))


def make_results_page(trials: Trials, scale: ResultsScale, machine: str, note: str = "") -> Page:
    """The page, from the trials of each part. ``note`` is shown before everything else."""
    found = {name: summarize(part) for name, part in trials.items()}
    longest = {**found["longest on 1"], **found["longest on 2"]}
    page = Page(
        "Results",
        (f"> {note}\n\n" if note else "") + _sentence(found["long"], scale),
        "python -m benchmarks results",
        f"Machine: {machine}",
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


def _dates(trials: Trials, name: str = "") -> str:
    """The dates of all trials, or of those with the dilated or the full pattern."""
    ran = [trial for part in trials.values() for trial in part if trial.ran]
    days = sorted({trial.when[:10] for trial in ran if not name or _name(trial.case.pattern) == name})
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "not run"


def _sentence(long: Summaries, scale: ResultsScale) -> str:
    measured = [summary for summary in long.values() if summary.measured]
    if not measured:
        return f"{scale.long_length:,} tokens did not run. The last table gives the reason."
    most = max(measured, key=lambda summary: summary.case.ranks)
    return (
        f"{scale.long_length:,} tokens ({most.case.pattern.text}, causal), forward and backward, "
        f"{outcome(most, speed_up(long, most.case))} {plan_of(most.case).reach} All trials run "
        "in fresh processes. The last table lists what did not run, with the reason."
    )


def _patterns(trials: Trials) -> str:
    """The dilated pattern of each length."""
    cases = [trial.case for part in trials.values() for trial in part if _name(trial.case.pattern) == "dilated"]
    found = {case.tokens: case.pattern.text for case in sorted(cases, key=lambda case: case.tokens)}
    return "; ".join(f"{tokens:,} tokens {label}" for tokens, label in found.items())


def _setting_table(trials: Trials, scale: ResultsScale) -> Table:
    ran = [trial for part in trials.values() for trial in part if trial.ran]
    once = {(trial.case, trial.round, trial.when): trial for trial in ran}.values()
    disturbed = sum(trial.disturbed for trial in once)
    heads, head_dim = next(
        ((trial.case.heads, trial.case.head_dim) for part in trials.values() for trial in part), (0, 0)
    )
    rows = [
        ["what", "value"],
        ["dilated", f"segment x rate, causal: {_patterns(trials)}"],
        ["full", "plain causal attention"],
        ["shapes", f"batch 1, {heads} heads of {head_dim}, float32 unless stated otherwise, one thread per process"],
        ["trials", f"{len(once)} in fresh processes; {disturbed} disturbed by other programs in spite of repeats"],
        ["measured", ", ".join(f"{name}: {_dates(trials, name)}" for name in ("dilated", "full"))],
        ["raw data", "benchmarks/results/results.jsonl, one line per trial"],
    ]
    text = (
        f"Times are medians over {scale.rounds} rounds in which all cases of a length take turns, with the lowest and "
        "the highest value in brackets; the slowest rank counts. Disturbed trials, during which other programs kept "
        "more than 0.1 of a core busy, do not count; values marked † come from disturbed trials only. Trials that take "
        f"longer than {scale.repeat_up_to_seconds:.0f} s, including their start, are run once. ring-attention-pytorch "
        "is called with contiguous rows and its default bucket size."
    )
    return Table("How it was measured", rows, text)


def _memory_table(found: Summaries) -> Table:
    """One row for each length, pattern and ring size."""
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
        "Memory of the largest rank, forward and backward. Planned: rows of all tensors and parcels, from the plan. "
        "Simulated rank: the peak of the bytes that a virtual rank holds, counted by the simulated ring. Real process: "
        "peak growth of resident memory, which includes the workspace and memory that libraries and allocators retain, "
        "so it stops falling at short lengths. Other rings support plain attention only, and need two ranks."
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
            continue  # part of the row of its two processes
        one, both = (summary, None) if case.ranks == 1 else (alone, summary)
        times = [_time_cell(which, name) for name in ("forward", "backward", "total") for which in (one, both)]
        trials = " / ".join(trials_cell(which) for which in (one, both) if which is not None and which.measured)
        up = factor(speed_up(found, case))
        rows.append([f"{case.tokens:,}", _name(case.pattern), title_of(case), *times, up, trials])
    text = (
        "On one process (1) and on two (2). Speed-up: total on one divided by total on two, round by round. SDPA runs "
        "on one process only; an all-gather on one process is SDPA."
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
            "total, relative to ringspan",
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
            value, of = ("total", "") if case.backward else ("forward", " (forward)")
            theirs, own = getattr(summary, value), getattr(base, value)
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
        f"Forward and backward at {tokens:,} tokens",
        rows,
        "In the last column, values below 1 are faster than ringspan.",
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


def _longest_text(scale: ResultsScale) -> str:
    return (
        f"Within {mebibytes(scale.rank_budget_bytes)} per process and {scale.trial_seconds:.0f} s per trial, one "
        "trial each; lengths double. Memory is predicted before a trial (ringspan: by its plan; others: from shorter "
        "lengths) and enforced during it."
    )


def _failures(found: Mapping[str, Summaries]) -> Table:
    """All parts except the longest-length ladders, whose own table shows what ended them."""
    head = ["table", "implementation", "pattern", "processes", "tokens", "outcome", "reason"]
    ladders = ("longest on 1", "longest on 2")
    rows = [[name, *row] for name, part in found.items() if name not in ladders for row in failure_rows(part)]
    text = FAILED_TEXT if rows else "Everything ran."
    return Table("What did not run, and why", [head, *rows], text)


def _outcome(summary: Summary) -> str:
    return summary.failure.outcome if summary.failure else ""


def _name(pattern: Pattern) -> str:
    return "full" if isinstance(pattern, Full) else "dilated"


SUITE = Suite("docs/results.md", {"trials": trials}, report, broken=broken)
