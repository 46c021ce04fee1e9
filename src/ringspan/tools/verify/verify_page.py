"""The report of an examination: checks, what each rank measured, and a picture of memory and speed by ring size."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

from ringspan.tools.measure import describe_machine, one_line
from ringspan.tools.pages import Page, Picture, Table, markdown_table
from ringspan.tools.verify.check import Check, Failed, answers_to, sentence, status
from ringspan.tools.verify.exactness import comparison_rows
from ringspan.tools.verify.memory import fit, peaks
from ringspan.tools.verify.settings import short_text
from ringspan.tools.verify.speed import is_disturbed, seconds_by_ring
from ringspan.tools.verify.wire import BytesAnswer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ringspan.tools.verify.check import Answers, ByRing
    from ringspan.tools.verify.settings import Settings, Subject


_DISTURBED = "disturbed"


def make_page(
    subject: Subject, settings: Settings, where: str, answers: ByRing, checks: list[Check], command: str
) -> Page:
    """The page that is printed and written."""
    text = f"{where}. {_what_was_run(settings)}"
    compared = (
        "Every call of every check is compared with the definition in fp64. Of a long sequence, rows at the borders of "
        "shards and others between them are; dk and dv are compared in all rows. Calls are counted on every rank."
    )
    parts: list[Table | Picture] = [
        Table("Is the ring real?", check_rows(checks), text),
        Table("What was compared", comparison_rows(answers), compared, details=True),
        Table("Rank by rank", rank_rows(answers), "Memory is the peak growth of forward and backward."),
    ]
    memory = peaks(answers) if _answered(answers, "memory") else {}
    seconds = seconds_by_ring(answers) if _answered(answers, "speed") and not is_disturbed(answers) else {}
    if len(memory) > 1:
        caption = "Peak memory of a rank by ring size; points are measured, the line is the fit."
        if seconds:
            caption += " Time is of forward and backward, on rings whose ranks each have a core or device."
        parts.append(Picture("verify_memory", draw(memory, seconds, settings), caption))
    return Page(
        title=f"ringspan verify: {subject.name}",
        sentence=sentence(checks, f"{subject.name}, up to {_longest(settings):,} tokens", _rings(answers)),
        command=command,
        machine=one_line(describe_machine()),
        parts=parts,
    )


def _what_was_run(settings: Settings) -> str:
    """The pattern that was named, where it was run as it is, and what was run instead."""
    named, long = settings.memory.pattern, _longest(settings)
    segments = named.branches(long)
    longest = max(branch.segment_length for branch in segments)
    lines = [f"{short_text(named)} itself is run at {long:,} tokens."]
    if longest > long:
        lines.append(
            f"There its segments above {long:,} are the whole sequence; --tokens {longest} gives them their length."
        )
    others = dict.fromkeys(short_text(c.pattern) for c in settings.all_cases if c.pattern != named)
    if others:
        lines.append(
            f"Where all rows are compared, or single tokens changed, sequences are short, and so are its segments; "
            f"rates are the same: {', '.join(others)}."
        )
    return " ".join(lines)


def _longest(settings: Settings) -> int:
    return max(case.tokens for case in settings.all_cases)


def _rings(answers: ByRing) -> list[int]:
    """The rings that were asked everything."""
    return list(answers_to(answers, "exact"))


def check_rows(checks: list[Check]) -> list[list[str]]:
    head = ["check", "verdict", "figure", "meaning", "run on"]
    return [head, *([check.name, check.verdict, check.figure, check.reason, check.ran] for check in checks)]


def rank_rows(answers: ByRing) -> list[list[str]]:
    timed = _answered(answers, "speed")
    disturbed = timed and is_disturbed(answers)

    def seconds(answer: Any) -> str:
        if not answer.seconds:
            return "not timed"
        return _DISTURBED if disturbed else f"{statistics.median(answer.seconds):.2f}"

    rows = [["ring", "rank", "bytes sent", "FLOPs", "peak memory", "seconds"]]
    for size, ranks in answers.items():
        for rank, given in enumerate(ranks):
            cells = [str(size), str(rank)]
            cells.append(_cell(given, "bytes", _sent))
            cells.append(_cell(given, "work", lambda a: f"{a.flops / 1e9:.1f} G"))
            cells.append(_cell(given, "memory", lambda a: f"{a.peak_bytes / 2**20:,.0f} MiB"))
            cells.append(_cell(given, "speed", seconds))
            rows.append(cells)
    return rows


def _sent(answer: list[BytesAnswer]) -> str:
    """Of the first case: not causal."""
    first = answer[0]
    if first.counted is None:
        return "not counted"
    return f"{first.counted:,}" + (", as planned" if first.counted == first.planned else f", planned {first.planned:,}")


def readme_lines(page: Page) -> list[str]:
    """The checks alone, for a README: what was found, by which command, on which machine."""
    checks = page.parts[0]
    assert isinstance(checks, Table)
    made = f"Written by `{page.command}`. {page.machine}."
    return ["", page.sentence, "", *markdown_table([row[:3] for row in checks.rows]), "", made, ""]


def _cell(given: Answers, question: str, show: Any) -> str:
    answer = given.get(question)
    return "" if answer is None else "no answer" if isinstance(answer, Failed) else show(answer)


def _answered(answers: ByRing, question: str) -> bool:
    return not any(isinstance(given.get(question), Failed) for ranks in answers.values() for given in ranks)


def draw(memory: dict[int, int], seconds: dict[int, float], settings: Settings) -> Figure:
    """Left: peak memory of a rank by ring size with its fit. Right, if it was not disturbed: seconds."""
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
        for place, value in enumerate(seconds.values()):
            axis.text(place, value, f"{value:.2f}", ha="center", va="bottom", fontsize=9)
        axis.set(title=f"Time, {settings.speed.tokens:,} tokens", ylabel="forward + backward (s)")
        axis.margins(y=0.15)
    for axis in (left, *right):
        axis.set_xlabel("ranks k")
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def as_json(
    subject: Subject, settings: Settings, where: str, answers: ByRing, checks: list[Check], page: Page
) -> dict[str, Any]:
    """Everything, as plain numbers and words."""
    return {
        "subject": subject.name,
        "where": where,
        "sentence": page.sentence,
        "machine": describe_machine(),
        "settings": dataclasses.asdict(settings),
        "status": status(checks),
        "speed_disturbed": _answered(answers, "speed") and is_disturbed(answers),
        "checks": [dataclasses.asdict(check) for check in checks],
        "answers": {str(size): [_plain(given) for given in ranks] for size, ranks in answers.items()},
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(inner) for key, inner in dataclasses.asdict(value).items()}
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
