"""Runs all steps of an acceptance, one after the other, and writes the report."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ringspan.tools.acceptance.acceptance_page import ARCHIVE, as_acceptance_json, make_acceptance_page, pack
from ringspan.tools.acceptance.judge import judge_acceptance
from ringspan.tools.acceptance.plan import MACHINE, AcceptanceSettings, StepPlanner, with_dtype
from ringspan.tools.acceptance.steps import Step, StepReport, run_step
from ringspan.tools.doctor import why_no_cuda
from ringspan.tools.pages import Page, write_page
from ringspan.tools.verify.run import LocalRanks

DEVICES = ("auto", "cpu", "cuda")
_CPU_RINGS = (1, 2, 4)


def acceptance_settings(
    device: str, ranks: Sequence[int], limit_seconds: float, *, quick: bool = False
) -> AcceptanceSettings:
    """The settings for this machine. Without ``ranks``, rings of 1, 2, 4 .. ranks, up to one for each GPU.

    Raises ValueError if there are no GPUs and the device is "cuda", or fewer than the largest ring needs.
    """
    if device not in DEVICES:
        raise ValueError(f"device={device!r}: must be one of {', '.join(DEVICES)}")
    missing = "" if torch.cuda.is_available() else why_no_cuda(torch.__version__, torch.version.cuda)
    if device == "cuda" and missing:
        raise ValueError(f"device='cuda': {missing}")
    if device == "cpu" or missing:
        sizes = tuple(sorted({1, *(ranks or _CPU_RINGS)}))
        timed = tuple(size for size in sizes if size <= LocalRanks().parallel_ranks)
        fallback = missing if device == "auto" else ""
        return AcceptanceSettings("cpu", fallback, sizes, timed, limit_seconds, quick)
    count = torch.cuda.device_count()
    sizes = tuple(sorted({1, *(ranks or (count, *(2**i for i in range(count.bit_length()) if 2**i <= count)))}))
    if max(sizes) > count:
        raise ValueError(f"ranks={max(sizes)}: this machine has {count} GPUs, and each rank needs one")
    return AcceptanceSettings("cuda", "", sizes, sizes, limit_seconds, quick)


@dataclass(frozen=True)
class Progress:
    """Told before and after each step; ``total`` counts all steps."""

    before: Callable[[int, int, Step], None]
    after: Callable[[int, int, StepReport], None]


@dataclass(frozen=True)
class AcceptanceRun:
    """The page, the same as JSON values, and the paths of what was written."""

    page: Page
    document: dict[str, Any]
    paths: dict[str, Path]


def run_acceptance(settings: AcceptanceSettings, out: Path, command: str, progress: Progress) -> AcceptanceRun:
    """Run all steps in a new folder inside ``out``, and write report, results and archive there."""
    folder = (out / f"acceptance-{datetime.datetime.now():%Y%m%d-%H%M%S}").absolute()
    for each in ("logs", "results"):
        (folder / each).mkdir(parents=True)
    planner = StepPlanner(settings, folder)
    total = 1 + len(planner.others())
    reports: dict[str, StepReport] = {}

    def run(step: Step) -> StepReport:
        number = len(reports) + 1
        progress.before(number, total, step)
        reports[step.name] = report = run_step(step, folder / "logs", settings.limit_seconds)
        progress.after(number, total, report)
        return report

    machine = run(planner.machine())
    if machine.finished:
        settings = with_dtype(settings, machine.result)
    for step in StepPlanner(settings, folder).others():
        run(step)
    return _write(reports, settings, folder, command)


def _write(reports: dict[str, StepReport], settings: AcceptanceSettings, folder: Path, command: str) -> AcceptanceRun:
    checks, archive = judge_acceptance(reports, settings), folder / ARCHIVE
    page = make_acceptance_page(reports, checks, settings, command, archive)
    document = as_acceptance_json(reports, checks, settings, page, archive)
    paths = write_page(page, folder, "acceptance")
    paths["json"], paths["archive"] = folder / "acceptance.json", archive
    paths["json"].write_text(json.dumps(document, indent=1) + "\n")
    if reports[MACHINE].finished:
        (folder / "environment.json").write_text(json.dumps(reports[MACHINE].result, indent=1) + "\n")
    pack(folder, archive)
    return AcceptanceRun(page, document, paths)
