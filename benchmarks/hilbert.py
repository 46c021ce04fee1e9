"""The study of grid orders (`ringspan bench hilbert`), written into docs/hilbert.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.suite import Measuring, Page, Results, Suite
from ringspan.tools.bench.hilbert import QUICK, StudyScale, findings_from_json, study
from ringspan.tools.bench.hilbert_page import make_hilbert_page

LONG = StudyScale()
DEFAULT = replace(LONG, grid=(512, 512), lengths=(8192, 16384), rounds=3)


def measure(run: Measuring) -> dict[str, Any]:
    torch.set_num_threads(int(run.options["threads"]))
    return study(run.sized(QUICK, DEFAULT, LONG), run.announce).as_json()


def report(results: Results) -> Page:
    command, machine = "python -m benchmarks hilbert", f"Machine: {results.machine}"
    return make_hilbert_page(findings_from_json(results["study"]), command, machine)


SUITE = Suite("docs/hilbert.md", {"study": measure}, report, marker="ringspan bench hilbert", options={"threads": "2"})
