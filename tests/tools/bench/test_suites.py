"""The suites of `python -m benchmarks`: their journal, and pages that follow from stored results alone."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.__main__ import SUITES
from benchmarks.suite import ROOT, Measuring, Page, Request, Results, Suite, Table, run_suite

# Suites whose stored results miss their bar; their pages say by how much.
MISSED = {"plans", "networks"}
WITHOUT_TRANSFORMERS = [name for name in SUITES if name != "transformers_models"]


@pytest.mark.parametrize("name", WITHOUT_TRANSFORMERS)
def test_every_page_follows_from_stored_results(name: str) -> None:
    suite = import_module(f"benchmarks.{name}").SUITE
    assert suite.page == SUITES[name].page
    results = Results(ROOT / f"benchmarks/results/{name}.jsonl")
    page = suite.report(results)
    assert page.parts
    assert bool(suite.broken(results)) == (name in MISSED)
    if name != "results":  # its page keeps the tables of an older writer
        assert page.sentence in (ROOT / suite.page).read_text()


def counting_suite(calls: list[str]) -> Suite:
    def items(run: Measuring) -> None:
        run.each(("a", "b"), lambda name: calls.append(name) or len(calls))  # type: ignore[func-returns-value]

    def whole(run: Measuring) -> int:
        calls.append("whole")
        return len(calls)

    def report(results: Results) -> Page:
        return Page(
            "Counts", "A sentence.", "a command", results.machine, [Table("Calls", [["json"], [str(results.parts)]])]
        )

    return Suite("docs/counts.md", {"items": items, "whole": whole}, report)


def test_resume_measures_only_what_is_missing(tmp_path: Path) -> None:
    calls: list[str] = []
    suite, console = counting_suite(calls), Console(quiet=True)
    run_suite("counts", suite, Request(tmp_path), console)
    assert calls == ["a", "b", "whole"]
    path = tmp_path / "benchmarks/results/counts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["item"] != "b") + '{"part": "torn')
    run_suite("counts", suite, Request(tmp_path, resume=True), console)
    assert calls == ["a", "b", "whole", "b"]
    run_suite("counts", suite, Request(tmp_path, report_only=True), console)
    run_suite("counts", suite, Request(tmp_path, only=("whole",)), console)
    assert calls == ["a", "b", "whole", "b", "whole"]
    assert Results(path).parts == {"items": {"a": 1, "b": 4}, "whole": 5}
    assert "{'a': 1, 'b': 4}" in (tmp_path / "docs/counts.md").read_text()


def test_a_long_part_is_measured_only_on_request_and_its_results_stay(tmp_path: Path) -> None:
    calls: list[str] = []
    console = Console(quiet=True)
    suite = replace(counting_suite(calls), long_parts=("whole",), options={"n": "3"}, long_options={"n": "9"})
    path = tmp_path / "benchmarks/results/counts.jsonl"
    run_suite("counts", suite, Request(tmp_path, size="long"), console)
    assert calls == ["a", "b", "whole"]
    assert Results(path).machine.endswith("with --long")
    run_suite("counts", suite, Request(tmp_path), console)
    assert calls == ["a", "b", "whole", "a", "b"]
    assert Results(path).parts == {"items": {"a": 4, "b": 5}, "whole": 3}
    assert [machine.endswith("with --long") for machine in Results(path).machines.values()].count(True) == 1
    run_suite("counts", suite, Request(tmp_path, only=("whole",)), console)
    assert Results(path).parts["whole"] == 6


def test_all_suites_take_the_stated_time_by_default() -> None:
    assert 50 <= sum(entry.minutes for entry in SUITES.values()) <= 100
    for name in WITHOUT_TRANSFORMERS:
        suite = import_module(f"benchmarks.{name}").SUITE
        assert set(suite.long_parts) < set(suite.parts)
        assert set(suite.long_options) <= set(suite.options)


def test_suites_are_listed_within_80_columns() -> None:
    command = [sys.executable, "-m", "benchmarks"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert all(name in found.stdout for name in SUITES)
    assert max(map(len, found.stdout.splitlines())) <= 80
