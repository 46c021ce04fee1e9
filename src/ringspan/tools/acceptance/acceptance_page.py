"""The report of `ringspan verify --acceptance`: checks, steps, measurements, the machine, and what to send back."""

from __future__ import annotations

import statistics
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringspan.tools.acceptance.judge import ratio, required_share, sentence_of, shares, summaries_of
from ringspan.tools.acceptance.plan import MACHINE, SHARE, AcceptanceSettings, kernel_step_name
from ringspan.tools.acceptance.steps import StepReport
from ringspan.tools.bench.report import memory_table, speed_table
from ringspan.tools.bench.share import PASSES
from ringspan.tools.bench.summaries import plain_axes
from ringspan.tools.measure import describe_machine, one_line
from ringspan.tools.pages import Page, Picture, Rows, Table
from ringspan.tools.verify.verify_page import BADGES, check_rows, status

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ringspan.tools.verify.check import Check

Reports = Mapping[str, StepReport]
ARCHIVE = "acceptance.tar.gz"
_NOT_SENT = ("checkpoints", "model", "tensorboard")  # folders of a training run: large, and needed here only
_COLOURS = ("#0072B2", "#E69F00", "#009E73")
_SEND_BACK = (
    "Send this archive back, and say how the devices are connected. It holds no weights. The output of the steps names "
    "paths and hosts: look through it first if these are confidential."
)


def make_acceptance_page(
    reports: Reports, checks: list[Check], settings: AcceptanceSettings, command: str, archive: Path
) -> Page:
    """The page to print and to write."""
    parts: list[Table | Picture] = [
        Table("Checks", check_rows(checks), _what_ran(settings), terminal_columns=(0, 1, 2)),
        Table("What to send back", _archive_rows(archive), _SEND_BACK),
        Table("Steps", _step_rows(reports), _step_text(settings), details=True),
        Table("Kernels", _kernel_rows(reports, settings), _KERNEL_TEXT, details=True),
    ]
    share = reports.get(SHARE)
    if share is not None and share.finished:
        parts.append(Table("Share of the bare kernel", _share_rows(share.result), _SHARE_TEXT, details=True))
    summaries = summaries_of(reports, settings)
    if summaries:
        for table in (speed_table(summaries), memory_table(summaries)):
            title = f"Rings: {table.title.lower()}"
            parts.append(Table(title, table.rows, _RING_TEXT[table.title], details=True))
    curves = {
        f"ring of {run.size}, {run.dtype}": reports[run.name].result["losses"]
        for run in settings.trainings
        if run.name in reports and reports[run.name].finished
    }
    if curves:
        caption = "Loss of each training. The curves in fp64 lie on each other if the ring is exact."
        parts.append(Picture("acceptance_training", draw_losses(curves), caption))
    machine = reports.get(MACHINE)
    if machine is not None and machine.finished:
        parts.append(Table("Machine and versions", _machine_rows(machine.result), "", details=True))
    return Page(
        title="ringspan verify --acceptance",
        sentence=sentence_of(checks, where(reports, settings)),
        command=command,
        machine=one_line(describe_machine()),
        parts=parts,
        badge=BADGES[status(checks)],
    )


def where(reports: Reports, settings: AcceptanceSettings) -> str:
    """The devices, as the sentence names them."""
    if settings.device == "cpu":
        return "the CPU with gloo"
    machine = reports.get(MACHINE)
    names = [] if machine is None or not machine.finished else _gpu_names(machine.result)
    return f"{settings.largest} x {names[0] if names else 'GPU'} with NCCL"


def _gpu_names(machine: Any) -> list[str]:
    return [each["description"] for each in machine["devices"] if each["usable"] and each["name"].startswith("cuda")]


def _what_ran(settings: AcceptanceSettings) -> str:
    sizes = ", ".join(map(str, settings.sizes))
    timed = ", ".join(map(str, settings.timed))
    what = "cores" if settings.device == "cpu" else "GPUs"
    text = f"Rings of {sizes} over {settings.backend}; timed: {timed}, whose ranks have {what} of their own."
    if settings.device == "cpu":
        text += " No GPU was used: this says nothing about CUDA kernels or NCCL."
    return text


def _archive_rows(archive: Path) -> Rows:
    place = f"{archive.parent.name}/{archive.name}"
    return [["file", "holds"], [place, "report, results, environment, output of all steps"]]


def _step_text(settings: AcceptanceSettings) -> str:
    return (
        f"Each step runs in processes of its own and ends after at most {settings.limit_seconds:g} s. A step that "
        "crashed or timed out leaves its checks open, and the verdict cannot be PASS."
    )


def _step_rows(reports: Reports) -> Rows:
    rows: Rows = [["step", "outcome", "time", "output", "reason"]]
    for report in reports.values():
        rows.append([report.title, report.outcome, f"{report.seconds:.0f} s", report.log, report.reason])
    return rows


_KERNEL_TEXT = (
    "Tiles of all masks (full, causal, anticausal) in several shapes, strided, with shared keys, with keys in two "
    "parts, and whole calls with windows, dilation, grouped KV heads, sinks and packed documents around them: output, "
    "lse and all gradients against the definition in fp64. Allowed is 1e-12 in fp64; in other dtypes the largest of "
    "twice the error of dense softmax in that dtype, four rounding steps of the result, and ten of the largest lse "
    "times the result in the accumulation dtype."
)


def _kernel_rows(reports: Reports, settings: AcceptanceSettings) -> Rows:
    rows: Rows = [["kernel", "dtype", "cases", "verdict", "closest to its limit", "error", "allowed"]]
    for name in settings.kernels:
        report = reports.get(kernel_step_name(name))
        if report is None or not report.finished:
            rows.append([name, "", "", "not measured", "", "", ""])
            continue
        if report.result["unusable"]:
            rows.append([name, "", "", "not supported", report.result["unusable"], "", ""])
        by_dtype: dict[str, list[Any]] = {}
        for each in report.result["comparisons"]:
            by_dtype.setdefault(each["dtype"], []).append(each)
        for dtype, found in by_dtype.items():
            worst = max(found, key=lambda each: (bool(each["failure"]), ratio(each)))
            text = f"{worst['case']}: {worst['failure'] or worst['result']}"
            verdict = "pass" if all(each["passed"] for each in found) else "FAIL"
            errors = ["", ""] if worst["failure"] else [f"{worst['error']:.1e}", f"{worst['allowed']:.1e}"]
            rows.append([name, dtype, str(len(found)), verdict, text, *errors])
    return rows


_SHARE_TEXT = (
    "Throughput relative to the fused kernel on contiguous tiles that hold every pair of the definition, without "
    'views, merging or sums of gradients; timed in turns, median of rounds. The plain plan (optimize="none") computes '
    "exactly these tiles; the default plan computes pairs once that several branches see, so it can exceed 1. †: other "
    "programs disturbed some calls, also when they were repeated."
)


def _share_rows(found: Any) -> Rows:
    rows: Rows = [["pattern", "tokens", "pass", "bare kernel", "ringspan", "share", "plain plan's share", "required"]]
    for row in found["rows"]:
        times = [f"{statistics.median(row['seconds'][way]):.3f} s" for way in ("bare", "ours")]
        mark = " †" if row["disturbed"] else ""
        medians = [f"{statistics.median(shares(row, way)):.2f}{mark}" for way in ("ours", "plain")]
        start = [row["pattern"], f"{found['tokens']:,}", PASSES[row["mode"]]]
        rows.append([*start, *times, *medians, str(required_share(row["pattern"]))])
    return rows


_RING_TEXT = {
    "Speed": "Medians of passes on the same rows after one that warms up; the slowest rank counts. Speed-up: relative "
    "to one process. Values marked † come from passes that other programs disturbed. Rings with more ranks than cores "
    "are listed, but not judged.",
    "Memory": "Peak growth of a rank in its first pass, in a fresh process, from before its rows are created: inputs, "
    "outputs, gradients, parcels and workspace. Planned: predicted by ringspan's plan, without workspace and caches.",
}


def _machine_rows(machine: Any) -> Rows:
    rows: Rows = [["what", "value"]]
    rows += [[key, str(value)] for key, value in machine["machine"].items()]
    rows += [[key, str(value)] for key, value in machine["libraries"].items() if value is not None]
    rows += [[each["name"], each["description"]] for each in machine["devices"]]
    rows += [[f"backend {each['name']}", "available"] for each in machine["backends"] if each["available"]]
    rows += [[each["name"], each["version"]] for each in machine["packages"] if each["version"]]
    return rows + [[key, value] for key, value in machine["variables"].items()]


def draw_losses(curves: Mapping[str, Sequence[float]]) -> Figure:
    """The loss of each run by step; later curves are dashed, so that equal ones remain visible."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    styles = (("-", 4.0), ("--", 1.8), (":", 1.8))
    for (name, losses), colour, (dash, width) in zip(curves.items(), _COLOURS, styles, strict=False):
        axis.plot(range(1, len(losses) + 1), losses, dash, color=colour, linewidth=width, label=name)
    axis.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axis.legend(frameon=False)
    plain_axes([axis])
    return figure


def as_acceptance_json(
    reports: Reports, checks: list[Check], settings: AcceptanceSettings, page: Page, archive: Path
) -> dict[str, Any]:
    """The whole result as JSON values."""
    return {
        "verdict": page.badge,
        "status": status(checks),
        "sentence": page.sentence,
        "command": page.command,
        "machine": describe_machine(),
        "settings": asdict(settings),
        "checks": [asdict(check) for check in checks],
        "steps": [report.as_json() for report in reports.values()],
        "archive": str(archive),
    }


def pack(folder: Path, archive: Path) -> None:
    """Everything in the folder but weights."""

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if set(Path(entry.name).parts) & {*_NOT_SENT, ARCHIVE} else entry

    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name, filter=wanted)
