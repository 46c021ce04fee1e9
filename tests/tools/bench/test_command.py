"""`ringspan bench` as a user runs it, in a separate process."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from typer.testing import CliRunner

import ringspan as rs
from ringspan.cli.app import app
from tests.ranks import starts_processes
from tests.traces import check_against_plan, read_trace

BENCH = [sys.executable, "-m", "ringspan", "bench"]
TINY = ["--pattern", "64x1,256x4", "--heads", "2", "--head-dim", "16", "--ranks", "1", "--rounds", "1"]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BENCH, *TINY, *options], capture_output=True, text=True, check=False)


def test_prints_only_json_and_continues_after_an_interruption(tmp_path: Path) -> None:
    out = ["--tokens", "128,256", "--out", str(tmp_path), "--json"]
    first = bench(*out)
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)  # and nothing else
    assert [s["case"]["tokens"] for s in document["summaries"]] == [128, 256]
    assert {trial["outcome"] for trial in document["trials"]} == {"measured"}
    assert json.loads((tmp_path / "bench.json").read_text()) == document
    assert "<h1>ringspan bench</h1>" in (tmp_path / "bench.html").read_text()

    lines = (tmp_path / "bench.jsonl").read_bytes()
    (tmp_path / "bench.jsonl").write_bytes(lines[:-40])  # as if killed while writing its last line
    again = bench(*out)
    assert "Continuing" in again.stderr
    trials = json.loads(again.stdout)["trials"]
    assert trials[0] == document["trials"][0]  # not run again
    assert trials[1]["wall_seconds"] != document["trials"][1]["wall_seconds"]  # run again
    assert len((tmp_path / "bench.jsonl").read_text().splitlines()) == 2


@starts_processes
def test_traces_the_longest_case_of_the_largest_ring(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options = ["--tokens", "128,256", "--ranks", "1,2", "--out", str(tmp_path), "--trace", str(path)]
    found = bench(*options)
    assert found.returncode == 0, found.stderr
    assert "256 tokens, 2 ranks" in found.stderr
    plan = rs.plan(rs.Dilated((64, 256), (1, 4)), 256, ring_size=2, causal=True, heads=2, head_dim=16)
    case = json.loads((tmp_path / "bench.json").read_text())["trials"][-1]["case"]
    for rank in range(2):
        check_against_plan(read_trace(path), replace(plan, layout=replace(plan.layout, name=case["layout"])), rank)
    refused = bench("--tokens", "128", "--out", str(tmp_path), "--trace", str(path))
    assert refused.returncode == 2
    assert "no case of a ring" in refused.stderr


def test_fails_with_a_report_if_nothing_fits(tmp_path: Path) -> None:
    found = bench("--tokens", "256", "--memory", "1MiB", "--out", str(tmp_path), "--json")
    assert found.returncode == 1
    (trial,) = json.loads(found.stdout)["trials"]
    assert (trial["outcome"], trial["reason"]) == ("refused", "planned to need 64 MiB; 1 MiB allowed")


@starts_processes
def test_interruption_leaves_no_process_running(tmp_path: Path) -> None:
    slow = ["--pattern", "full", "--ranks", "2", "--tokens", "256k", "--memory", "8GiB", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [*BENCH, *slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        ranks = _wait_for_ranks(process, 2)
        os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal does
        _, complaints = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    assert "run the same command to continue" in " ".join(complaints.split())
    assert "Traceback" not in complaints
    gone, alive = psutil.wait_procs(ranks, timeout=300)
    assert not alive
    assert len(gone) >= 2


def _wait_for_ranks(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """All processes of a command, once ``count`` ranks (children of its fork server) have started to compute."""
    while process.poll() is None:
        children = psutil.Process(process.pid).children()
        ranks = [rank for child in children for rank in child.children()]
        if sum(rank.cpu_times().user > 0.5 for rank in ranks) >= count:
            return children + ranks
        time.sleep(0.05)
    raise AssertionError(f"it ended first: {process.communicate()}")


def run_here(*options: str) -> Any:
    return CliRunner().invoke(app, ["bench", *options])


def test_dry_run_lists_cases_and_obstacles() -> None:
    found = run_here(*TINY, "--tokens", "256,16M", "--memory", "1GiB", "--dry-run", "--json")
    small, large = json.loads(found.stdout)["cases"]
    assert small["obstacle"] == ""
    assert small["memory_bytes"] > 64 * 2**20
    assert large["obstacle"].endswith("1,024 MiB allowed")


def test_help_shows_examples() -> None:
    found = subprocess.run([*BENCH, "--help"], capture_output=True, text=True, check=True)
    assert "ringspan bench hilbert --quick" in found.stdout
