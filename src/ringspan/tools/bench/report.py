"""The report of a benchmark: one page from all its trials, and the files it becomes (JSON, Markdown, HTML)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringspan.tools.bench.cases import Case, pattern_label
from ringspan.tools.bench.ladder import Settings, Store, is_planned, plan_of
from ringspan.tools.bench.pictures import memory_picture, process_count, throughput_picture
from ringspan.tools.bench.summaries import Spread, Summary, speed_up, summarize
from ringspan.tools.bench.tables import (
    failures_table,
    keep_together,
    longest_table,
    mebibytes,
    memory_table,
    reach_table,
    seconds,
    sent_cell,
    speed_table,
)
from ringspan.tools.bench.trials import Trial
from ringspan.tools.measure import describe_machine, one_line
from ringspan.tools.pages import Page, write_page


def make_page(trials: Sequence[Trial], command: str) -> Page:
    """Tables of speed, memory, longest lengths and failures, with plots where there is something to plot."""
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


def headline(summaries: Mapping[Case, Summary]) -> str:
    """The longest case of ringspan on the most processes: time and gain, unless disturbed; memory, bytes and reach."""
    ours = [s for case, s in summaries.items() if case.implementation == "ringspan" and s.measured]
    if not ours:
        return "Nothing was measured; the last table says why."
    best = max(ours, key=lambda s: (s.case.tokens, s.case.ranks))
    case = best.case
    causal = "causal" if case.causal else "not causal"
    passes = "forward and backward" if case.backward else "forward"
    return (
        f"{case.tokens:,} tokens ({pattern_label(case.pattern)}, {causal}, {case.heads} heads of {case.dim}, "
        f"{case.dtype}), {passes}, {outcome(best, speed_up(summaries, case))} {plan_of(case).reach}"
    )


def outcome(summary: Summary, gain: Spread | None) -> str:
    """Time, speed-up, memory and bytes sent, as the end of a sentence. Disturbed times and speed-ups are left out."""
    ranks, sent = process_count(summary.case.ranks), sent_cell(summary)
    quiet = not summary.total.disturbed
    text = f"in {seconds(summary.total.median)} on {ranks}" if quiet else f"on {ranks}"
    if gain and not gain.disturbed:
        text += f", {gain.median:.2f} times the speed of one process"
    text += f", with {mebibytes(summary.rank_bytes.median)} on the largest rank"
    text += f" and {sent} sent by the busiest." if sent else "."
    if not quiet:
        return f"{text} Other programs disturbed every trial, so no time is given: repeat on a quiet machine."
    if gain and gain.disturbed:
        return f"{text} Other programs disturbed every round, so no speed-up is given: repeat on a quiet machine."
    return text


def as_json(trials: Sequence[Trial], settings: Settings, store: Store, command: str) -> dict[str, Any]:
    """Everything: the machine, the settings, all trials, and their summaries."""
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
    """Write bench.json, bench.md with its pictures, and bench.html; where each one is."""
    paths = write_page(page, folder, "bench")
    paths["json"] = folder / "bench.json"
    paths["json"].write_text(json.dumps(document, indent=1) + "\n")
    return paths


def ringspan_crashed(trials: Sequence[Trial]) -> list[Trial]:
    """Trials that speak against ringspan: running out of memory or time is a result, a crash is a defect."""
    return [t for t in trials if t.outcome == "crashed" and is_planned(t.case)]
