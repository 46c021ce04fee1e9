"""The report of `ringspan verify`: verdict, checks, what each rank measured, and memory and time by ring size."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ringspan.tools.measure import describe_machine, one_line
from ringspan.tools.pages import Badge, Page, Picture, Table, markdown_table
from ringspan.tools.verify.check import Check, Failed, values_of
from ringspan.tools.verify.exactness import comparison_rows
from ringspan.tools.verify.memory import fit, peaks
from ringspan.tools.verify.speed import seconds_by_ring, was_disturbed
from ringspan.tools.verify.workload import reach

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ringspan.tools.verify.check import ByRing, Measured
    from ringspan.tools.verify.traffic import TrafficMeasurement
    from ringspan.tools.verify.workload import AttentionUnderTest, VerifySettings

# Exit statuses of the command; 2 is an invalid command line.
PASS, FAIL, INCOMPLETE = 0, 1, 3
BADGES: dict[int, Badge] = {PASS: "PASS", FAIL: "FAIL", INCOMPLETE: "INCOMPLETE"}


def status(checks: Iterable[Check]) -> int:
    """The exit status for these checks."""
    verdicts = [(check.verdict, check.essential) for check in checks]
    if any(verdict == "FAIL" for verdict, _ in verdicts):
        return FAIL
    return INCOMPLETE if ("not measured", True) in verdicts else PASS


def headline(checks: Sequence[Check], name: str, sizes: Sequence[int]) -> str:
    """The result in one or two sentences. Checks that were not measured are named, with the reason.

    >>> even = Check("every rank computes its share", "pass", "", "", "")
    >>> speed = Check("more ranks are faster", "not measured", "", "a busy machine", "", essential=False)
    >>> headline([even, even], "mine", [1, 2, 4])
    'All 2 checks pass on rings of 1, 2 and 4 ranks: mine.'
    >>> headline([even, speed], "mine", [1, 2])
    '1 of 2 checks pass on rings of 1 and 2 ranks: mine. Not measured: more ranks are faster (a busy machine).'
    """
    failing = [check for check in checks if check.verdict == "FAIL"]
    rings = f"{_listed([str(size) for size in sizes])} rank{'s' if max(sizes, default=0) > 1 else ''}"
    where = f"on {'rings' if len(sizes) > 1 else 'a ring'} of {rings}: {name}."
    if failing:
        names = ", ".join(f'"{check.name}"' for check in failing)
        return f"{len(failing)} of {len(checks)} checks fail {where} Failing: {names}."
    passing = sum(check.verdict == "pass" for check in checks)
    first = f"All {passing} checks" if passing == len(checks) else f"{passing} of {len(checks)} checks"
    rest = "".join(with_reasons(checks, verdict) for verdict in ("not measured", "not supported"))
    doubt = " No check fails, but an essential one could not be measured here." if status(checks) == INCOMPLETE else ""
    return f"{first} pass {where}{doubt}{rest}"


def with_reasons(checks: Sequence[Check], verdict: str) -> str:
    """A sentence that names the checks with this verdict, grouped by reason; empty if there are none."""
    by_reason: dict[str, list[str]] = {}
    for check in checks:
        if check.verdict == verdict:
            by_reason.setdefault(check.reason, []).append(check.name)
    groups = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return f" {verdict.capitalize()}: {groups}." if groups else ""


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def make_page(
    implementation: AttentionUnderTest,
    settings: VerifySettings,
    where: str,
    measured: ByRing,
    checks: list[Check],
    command: str,
) -> Page:
    """The page to print and to write."""
    sizes = list(values_of(measured, "exact"))
    compared = (
        "The results of every call, in every check, are compared with the definition in fp64: in all rows of a short "
        "sequence; in a long one at the borders of shards and in sampled rows between them, dk and dv in all rows. "
        "Calls are counted on every rank."
    )
    of_ranks = (
        f"Bytes (not causal, forward) and FLOPs (not causal, forward and backward): {settings.counted}. "
        f"Memory (peak growth of forward and backward): {settings.memory}. "
        f"Time (causal, forward and backward): {settings.speed}."
    )
    parts: list[Table | Picture] = [
        Table(
            f"Checks on rings of {_listed([str(size) for size in sizes])}",
            check_rows(checks),
            f"Ran on {where}. {_what_ran(settings)} {_what_did_not_run(settings, checks, max(sizes))}",
            terminal_columns=(0, 1, 2),
        ),
        Table(f"Comparisons, up to {_longest(settings):,} tokens", comparison_rows(measured), compared, details=True),
        Table("Each rank", rank_rows(measured, settings), of_ranks),
    ]
    memory = peaks(measured) if _succeeded(measured, "memory") else {}
    timed = _succeeded(measured, "speed") and not was_disturbed(measured)
    seconds = seconds_by_ring(measured) if timed else {}
    if len(memory) > 1:
        caption = "Peak memory of a rank by ring size: measured points and the fitted line."
        if seconds:
            caption += " Time of forward and backward, on rings in which each rank has its own core or device."
        parts.append(Picture("verify_memory", draw(memory, seconds, settings), caption))
    return Page(
        title=f"ringspan verify: {implementation.name}",
        sentence=headline(checks, f"{implementation.name}, up to {_longest(settings):,} tokens", sizes),
        command=command,
        machine=one_line(describe_machine()),
        parts=parts,
        badge=BADGES[status(checks)],
    )


def _what_ran(settings: VerifySettings) -> str:
    """Where the named pattern ran unchanged, and which shorter patterns ran elsewhere."""
    named, long = settings.memory.pattern, _longest(settings)
    longest = reach(named)
    lines = [f"The pattern {named.text} runs unchanged at {long:,} tokens."]
    if longest > long:
        lines.append(
            f"Its segments or windows longer than {long:,} tokens cover the whole sequence there; "
            f"--tokens {longest} runs them at full length."
        )
    others = dict.fromkeys(case.pattern.text for case in settings.all_cases if case.pattern != named)
    if others:
        lines.append(
            "Checks that compare all rows or change single tokens run on short sequences, with shorter segments and "
            f"windows and the same rates: {'; '.join(others)}."
        )
    return " ".join(lines)


def _what_did_not_run(settings: VerifySettings, checks: Sequence[Check], ring_size: int) -> str:
    """What a reader might take as verified, though no case of this run shows it."""
    refused = {check.name for check in checks if check.verdict == "not supported"}
    optional = ("uneven shards", "grouped KV heads", "packed documents")
    missing = [what for what in optional if f"{what} are exact" in refused]
    if short := [what for what in optional if what not in missing]:
        missing.append(f"{_listed(short)} beyond {max(case.tokens for case in settings.optional):,} tokens")
    dtypes, dims = ({getattr(case, field) for case in settings.all_cases} for field in ("dtype", "head_dim"))
    missing += [
        f"anything beyond {_longest(settings):,} tokens or {ring_size} ranks",
        f"dtypes other than {_listed(sorted(dtypes))}",
        f"head dimensions other than {_listed([str(dim) for dim in sorted(dims)])}",
        "soft caps, sinks and other options",
    ]
    return f"Not looked at: {'; '.join(missing)}."


def _longest(settings: VerifySettings) -> int:
    return max(case.tokens for case in settings.all_cases)


def check_rows(checks: list[Check]) -> list[list[str]]:
    head = ["check", "verdict", "result", "explanation", "case"]
    return [head, *([check.name, check.verdict, check.result, check.reason, check.case] for check in checks)]


def rank_rows(measured: ByRing, settings: VerifySettings) -> list[list[str]]:
    """One row per rank of each ring; the head names the length of each measurement."""
    disturbed = _succeeded(measured, "speed") and was_disturbed(measured)

    def seconds(value: Any) -> str:
        if not value.seconds:
            return "not timed"
        return "disturbed" if disturbed else f"{statistics.median(value.seconds):.2f}"

    counted, memory, speed = (f"{case.tokens:,} tokens" for case in (settings.counted, settings.memory, settings.speed))
    head = ["ring size", "rank", f"bytes sent, {counted}", f"FLOPs, {counted}", f"peak memory, {memory}"]
    rows = [[*head, f"seconds, {speed}"]]
    for size, ranks in measured.items():
        for rank, values in enumerate(ranks):
            cells = [str(size), str(rank)]
            cells.append(_cell(values, "traffic", _bytes_sent))
            cells.append(_cell(values, "flops", lambda value: f"{value.flops / 1e9:.1f} G"))
            cells.append(_cell(values, "memory", lambda value: f"{value.peak_bytes / 2**20:,.0f} MiB"))
            cells.append(_cell(values, "speed", seconds))
            rows.append(cells)
    return rows


def _bytes_sent(value: list[TrafficMeasurement]) -> str:
    first = value[0]  # not causal
    if first.counted is None:
        return "not counted"
    return f"{first.counted:,}" + (", as planned" if first.counted == first.planned else f", planned {first.planned:,}")


def _cell(values: Measured, measurement: str, show: Callable[[Any], str]) -> str:
    value = values.get(measurement)
    return "" if value is None else "failed" if isinstance(value, Failed) else show(value)


def _succeeded(measured: ByRing, measurement: str) -> bool:
    return not any(isinstance(values.get(measurement), Failed) for ranks in measured.values() for values in ranks)


def readme_lines(page: Page) -> list[str]:
    """The verdict and the checks alone, for a README, with the command and the machine."""
    checks = page.parts[0]
    assert isinstance(checks, Table)
    written = f"Written by `{page.command}`. {page.machine}."
    table = markdown_table([row[:3] for row in checks.rows])
    return ["", f"**{page.badge}.** {page.sentence}", "", *table, "", written, ""]


def draw(memory: dict[int, int], seconds: dict[int, float], settings: VerifySettings) -> Figure:
    """Left: peak memory of a rank by ring size, with the fit. Right, if times are given: seconds."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10 if seconds else 5, 3.8), layout="constrained")
    left, *right = figure.subplots(1, 2 if seconds else 1, squeeze=False)[0]
    a, b = (x / 2**20 for x in fit(memory))
    first, last = min(memory), max(memory)
    curve = [first + (last - first) * i / 100 for i in range(101)]
    left.plot(curve, [a + b / k for k in curve], color="#999999", label=f"{a:.0f} + {b:.0f} / k MiB")
    left.plot(list(memory), [peak / 2**20 for peak in memory.values()], "o", color="#0072B2", label="measured")
    left.set(title=f"Memory, {settings.memory.tokens:,} tokens", ylabel="peak of a rank (MiB)", ylim=(0, None))
    left.set_xticks(list(memory))
    left.legend(frameon=False)
    for axis in right:
        axis.bar([str(size) for size in seconds], list(seconds.values()), color="#0072B2", width=0.6)
        for x, value in enumerate(seconds.values()):
            axis.text(x, value, f"{value:.2f}", ha="center", va="bottom", fontsize=9)
        axis.set(title=f"Time, {settings.speed.tokens:,} tokens", ylabel="forward + backward (s)")
        axis.margins(y=0.15)
    for axis in (left, *right):
        axis.set_xlabel("ring size k")
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def as_json_document(
    implementation: AttentionUnderTest,
    settings: VerifySettings,
    where: str,
    measured: ByRing,
    checks: list[Check],
    page: Page,
) -> dict[str, Any]:
    """The whole result as JSON values."""
    return {
        "implementation": implementation.name,
        "where": where,
        "verdict": page.badge,
        "sentence": page.sentence,
        "status": status(checks),
        "machine": describe_machine(),
        "settings": dataclasses.asdict(settings),
        "speed_disturbed": _succeeded(measured, "speed") and was_disturbed(measured),
        "checks": [dataclasses.asdict(check) for check in checks],
        "measurements": json.loads(json.dumps(measured, default=vars)),
    }
