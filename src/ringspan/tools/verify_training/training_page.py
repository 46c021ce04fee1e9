"""The report of `ringspan verify --training`: the sentence that matters, the checks, and a picture of each failure."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from ringspan.tools.measure import describe_machine, one_line
from ringspan.tools.pages import Page, Picture, Table
from ringspan.tools.verify.verify_page import BADGES, check_rows, status
from ringspan.tools.verify_training.compare import Cost, ReachComparison, StepComparison, allowed_error
from ringspan.tools.verify_training.findings import DOCUMENTS, GRADIENTS, REACHES
from ringspan.tools.verify_training.judge_reach import document_of
from ringspan.tools.verify_training.steps import BASE, PACKED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ringspan.tools.verify_training.rings import TrainingReport

_BLUE, _RED, _ORANGE = "#0072B2", "#B2182B", "#E69F00"
_MAX_PARAMETERS = 24  # shown in the picture of gradient errors
_NOT_LOOKED_AT = (
    "Not looked at: the optimizer, data loading, checkpoints, dropout, autocast, longer sequences and other devices."
)


def make_training_page(report: TrainingReport, command: str, versions: str = "") -> Page:
    """The page to print and to write."""
    settings, checks = report.settings, report.checks
    failing = {check.name for check in checks if check.verdict == "FAIL"}
    ran = f"Ran on {report.where}. {versions}Each ring takes the same steps as one process. {_NOT_LOOKED_AT}"
    rings = ", ".join(map(str, report.measured))
    parts: list[Table | Picture] = [Table(f"Checks on rings of {rings}", check_rows(checks), ran, False, (0, 1, 2))]
    steps = {size: ranks[0].get("steps", []) for size, ranks in report.measured.items() if size > 1}
    if failing & {REACHES, DOCUMENTS}:
        size, reach = _worst_reach(report)
        caption = (
            f"Which rows move when one token changes, on a ring of {size}. Red rows move and must not; orange rows "
            "move on one process, but not on the ring. Lines separate documents."
        )
        parts.append(Picture("training_reach", draw_reach(reach, size), caption))
    if GRADIENTS in failing:
        size, step = _worst_gradients(steps)
        caption = f"Relative error of the gradient of each parameter on a ring of {size}; the line is what is allowed."
        parts.append(Picture("training_gradients", draw_gradients(step, size, _allowed(report)), caption))
    if any(steps.values()):
        text = "Errors are relative to one process: of the loss, and of the gradient of the worst parameter."
        parts.append(Table("Steps", step_rows(steps), text, details=True))
        parts.append(Table("Each rank", cost_rows(report.measured, settings.long_tokens), "", details=True))
    return Page(
        title=f"ringspan verify --training: {settings.target}",
        sentence=report.sentence,
        command=command,
        machine=one_line(describe_machine()),
        parts=parts,
        badge=BADGES[status(checks)],
    )


def _allowed(report: TrainingReport) -> float:
    return allowed_error(next(iter(report.measured.values()))[0]["dtype"]["name"])


def step_rows(steps: dict[int, list[StepComparison]]) -> list[list[str]]:
    """One row for each step; columns for each ring."""
    head = ["step", "tokens", "documents"]
    for size in steps:
        head += [f"loss, ring of {size}", f"gradients, ring of {size}"]
    rows = [head]
    first = next(iter(steps.values()))
    for i, step in enumerate(first):
        cells = [step.step, f"{step.tokens:,}", str(step.documents)]
        for found in steps.values():
            each = found[i] if i < len(found) else None
            if each is None or each.refused or each.refused_alone:
                cells += ["not supported", ""]
            else:
                cells += [f"{each.loss_error:.1e}", f"{each.gradient_error:.1e}" if each.gradient_errors else ""]
        rows.append(cells)
    return rows


def cost_rows(measured: dict[int, list[dict[str, Any]]], tokens: int) -> list[list[str]]:
    """FLOPs and memory of one long step on every rank."""
    rows = [["ring size", "rank", f"FLOPs, {tokens:,} tokens", f"peak memory, {tokens:,} tokens"]]
    for size, ranks in measured.items():
        for rank, values in enumerate(ranks):
            cost = values.get("cost")
            cells = ["", ""] if not isinstance(cost, Cost) else [f"{cost.flops / 1e6:,.0f} M", _mebibytes(cost)]
            rows.append([str(size), str(rank), *cells])
    return rows


def _mebibytes(cost: Cost) -> str:
    return f"{cost.peak_bytes / 2**20:,.1f} MiB"


def _worst_reach(report: TrainingReport) -> tuple[int, list[ReachComparison]]:
    """The smallest ring on which rows move differently, with its changed tokens in packed documents if they leak."""
    for size, ranks in sorted(report.measured.items()):
        for packed in (True, False):
            reach = [each for each in ranks[0].get("reach", []) if (len(each.lengths) > 1) == packed]
            if any({"more", "fewer"} & {*_colours(each)} for each in reach):
                return size, reach
    size = max(report.measured)
    return size, report.measured[size][0].get("reach", [])


def _colours(each: ReachComparison) -> list[str]:
    """For each observed row: still, moves, more (on the ring only) or fewer (on one process only)."""
    limit, own = each.allowed, document_of(each)
    found = []
    for row, alone, ring in zip(each.rows, each.alone, each.ring, strict=True):
        should = alone > limit and row in own
        found.append("moves" if should and ring > limit else "more" if ring > limit else "fewer" if should else "still")
    return found


def draw_reach(reach: list[ReachComparison], size: int) -> Figure:
    """One line for each changed token: the rows that move."""
    from matplotlib.colors import ListedColormap  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    kinds = ("still", "moves", "fewer", "more")
    tokens = max(sum(each.lengths) for each in reach)
    image = [[0] * tokens for _ in reach]
    for line, each in zip(image, reach, strict=True):
        for row, kind in zip(each.rows, _colours(each), strict=True):
            line[row] = kinds.index(kind)
    figure = Figure(figsize=(9, 1.2 + 0.26 * len(reach)), layout="constrained")
    axis = figure.subplots()
    colours = ListedColormap(["white", _BLUE, _ORANGE, _RED])
    axis.imshow(image, cmap=colours, vmin=0, vmax=3, aspect="auto", interpolation="nearest")
    for i, each in enumerate(reach):
        axis.plot(each.position, i, marker="|", color="black", markersize=9)
    border = -0.5
    for length in reach[0].lengths[:-1]:
        border += length
        axis.axvline(border, color="black", linewidth=0.8)
    axis.set_yticks(range(len(reach)), [str(each.position) for each in reach])
    axis.set(xlabel="row of the sequence", ylabel="changed token", title=f"Ring of {size}: rows that move")
    handles = [_patch(_BLUE, "moves"), _patch(_RED, "moves, must not"), _patch(_ORANGE, "must move, does not")]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    _plain(axis)
    return figure


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch  # noqa: PLC0415

    return Patch(color=colour, label=label)


def _worst_gradients(steps: dict[int, list[StepComparison]]) -> tuple[int, StepComparison]:
    plain = [(size, step) for size, found in steps.items() for step in found if step.step in (BASE, PACKED)]
    pairs = [(size, step) for size, step in plain if step.gradient_errors]
    return max(pairs, key=lambda pair: pair[1].gradient_error)


def draw_gradients(step: StepComparison, size: int, allowed: float) -> Figure:
    """The parameters with the largest errors, on a logarithmic axis."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    worst = sorted(step.gradient_errors.items(), key=lambda pair: -pair[1])[:_MAX_PARAMETERS]
    figure = Figure(figsize=(9, 1.2 + 0.24 * len(worst)), layout="constrained")
    axis = figure.subplots()
    shown = [min(error, 10.0) if math.isfinite(error) else 10.0 for _, error in worst]
    colours = [_RED if error > allowed else _BLUE for _, error in worst]
    axis.barh(range(len(worst)), [max(error, 1e-17) for error in shown], left=1e-17, color=colours)
    axis.set_xscale("log")
    axis.set_xlim(1e-17, 30)
    axis.axvline(allowed, color="black", linewidth=0.8)
    axis.set_yticks(range(len(worst)), [name for name, _ in worst])
    axis.invert_yaxis()
    axis.set(xlabel="relative error of the gradient", title=f"Ring of {size}: {step.step}")
    _plain(axis)
    return figure


def _plain(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)


def as_training_json(report: TrainingReport, page: Page) -> dict[str, Any]:
    """The whole result as JSON values."""
    return {
        "target": report.settings.target,
        "where": report.where,
        "verdict": page.badge,
        "sentence": page.sentence,
        "status": status(report.checks),
        "machine": describe_machine(),
        "settings": dataclasses.asdict(report.settings),
        "causes": [check.name for check in report.causes],
        "checks": [dataclasses.asdict(check) for check in report.checks],
        "measurements": json.loads(json.dumps(report.measured, default=vars)),
    }
