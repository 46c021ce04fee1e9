"""The report of an examination: checks, what each rank measured, and a picture of memory and speed by ring size."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

from ringspan.evidence.machine import describe_machine, one_line
from ringspan.evidence.pages import Page, Picture, Table, markdown_table
from ringspan.verify.examine import BytesAnswer, Failed
from ringspan.verify.verdicts import ByRing, Check, fit_memory, fitted_sizes, sentence, speed_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ringspan.verify.settings import Settings
    from ringspan.verify.subject import Subject


def make_page(
    subject: Subject, settings: Settings, where: str, answers: ByRing, checks: list[Check], command: str
) -> Page:
    """The page that is printed and written."""
    lengths = (
        f"{subject.name}; {where}. Exactness at {settings.exact.tokens:,} tokens in {settings.exact_dtype}, bytes and "
        f"FLOPs at {settings.counted.tokens:,}, memory at {settings.memory.tokens:,}, speed at "
        f"{settings.speed.tokens:,}, both in float32."
    )
    parts: list[Table | Picture] = [Table("Is the ring real?", check_rows(checks), lengths)]
    passes = "forward and backward" if settings.memory_backward else "the forward pass"
    parts.append(Table("Rank by rank", rank_rows(answers), f"Memory is the peak growth of {passes}."))
    if _answered(answers, "memory") and len(fitted_sizes(answers)) > 1 and _answered(answers, "speed"):
        caption = "Peak memory of a rank falls as the ring grows; points are measured, the line is the fit."
        parts.append(Picture("verify_memory", draw(answers, settings), caption))
    return Page(
        title=f"ringspan verify: {subject.name}",
        sentence=sentence(checks, subject.name, answers),
        command=command,
        machine=one_line(describe_machine()),
        parts=parts,
    )


def check_rows(checks: list[Check]) -> list[list[str]]:
    return [["check", "verdict", "figure", "meaning"]] + [[c.name, c.verdict, c.figure, c.reason] for c in checks]


def rank_rows(answers: ByRing) -> list[list[str]]:
    rows = [["ring", "rank", "rows", "bytes sent", "FLOPs", "peak memory", "error", "seconds"]]
    for size, ranks in answers.items():
        for rank, given in enumerate(ranks):
            cells = [str(size), str(rank)]
            cells.append(_cell(given["exact"], lambda a: f"{len(a.positions)}"))
            cells.append(_cell(given["bytes"], _sent))
            cells.append(_cell(given["work"], lambda a: f"{a.flops / 1e9:.1f} G"))
            cells.append(_cell(given["memory"], lambda a: f"{a.peak_bytes / 2**20:,.0f} MiB"))
            cells.append(_cell(given["exact"], lambda a: f"{max(a.output_error, a.gradient_error):.1e}"))
            cells.append(
                _cell(given["speed"], lambda a: f"{statistics.median(a.seconds):.2f}" if a.seconds else "not timed")
            )
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


def _cell(answer: Any, show: Any) -> str:
    return "no answer" if isinstance(answer, Failed) else show(answer)


def _answered(answers: ByRing, question: str) -> bool:
    return not any(isinstance(given[question], Failed) for ranks in answers.values() for given in ranks)


def draw(answers: ByRing, settings: Settings) -> Figure:
    """Left: peak memory of a rank by ring size with its fit. Right: seconds of forward and backward."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    sizes = list(answers)
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    peaks = [max(given["memory"].peak_bytes for given in ranks) / 2**20 for ranks in answers.values()]
    a, b = (x / 2**20 for x in fit_memory(answers))
    curve = [1 + (max(sizes) - 1) * i / 100 for i in range(101)]
    left.plot(curve, [a + b / k for k in curve], color="#999999", label=f"{a:.0f} + {b:.0f} / k MiB")
    left.plot(sizes, peaks, "o", color="#0072B2", label="measured")
    left.set(title=f"Memory, {settings.memory.tokens:,} tokens", ylabel="peak of a rank (MiB)", ylim=(0, None))
    left.legend(frameon=False)
    seconds = speed_of(answers)
    right.bar([str(size) for size in seconds], list(seconds.values()), color="#0072B2", width=0.6)
    for place, value in enumerate(seconds.values()):
        right.text(place, value, f"{value:.2f}", ha="center", va="bottom", fontsize=9)
    right.set(title=f"Time, {settings.speed.tokens:,} tokens", ylabel="forward + backward (s)")
    right.margins(y=0.15)
    left.set_xticks(sizes)
    for axis in (left, right):
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
