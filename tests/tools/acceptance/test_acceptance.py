"""Acceptance: faults of a kernel fail, crashes and hangs leave the verdict open, and nothing missing can pass."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from ringspan import kernels
from ringspan.kernels import Kernel
from ringspan.tools.acceptance import run as acceptance
from ringspan.tools.acceptance.judge import judge_acceptance, sentence_of
from ringspan.tools.acceptance.plan import AcceptanceSettings, StepPlanner, TrainingRun, kernel_step_name, with_dtype
from ringspan.tools.acceptance.run import AcceptanceRun, Progress, acceptance_settings, run_acceptance
from ringspan.tools.acceptance.steps import Step, StepReport, run_step
from ringspan.tools.acceptance.tiles import compare_kernel
from ringspan.tools.bench.ladder import planned_bytes
from ringspan.tools.bench.trials import RankMetrics, TrialLimits, combine_ranks
from ringspan.tools.verify.verify_page import FAIL, INCOMPLETE, PASS, status
from tests.ranks import starts_processes

pytestmark = starts_processes
ON_CPU = AcceptanceSettings("cpu", "", (1, 2), (1, 2), limit_seconds=60.0)
NOTHING = Progress(lambda *_: None, lambda *_: None)


def faulty(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Kernel:
    """The CPU kernel with changed results of the forward pass."""
    right = kernels.get("cpu_flash")
    return replace(right, compute_forward=lambda *arguments: change(*right.compute_forward(*arguments)))


FAULTS = {
    "the last row is zero": lambda out, lse: (torch.cat((out[:, :, :-1], 0 * out[:, :, -1:]), 2), lse),
    "heads are swapped": lambda out, lse: (out.flip(1), lse),
    "lse in base 2": lambda out, lse: (out, lse / 0.6931471805599453),
    "lse off by 1 %": lambda out, lse: (out, lse + 0.01),
    "a value is NaN": lambda out, lse: (out.index_fill(2, torch.tensor([0]), torch.nan), lse),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_kernel_is_found_in_every_dtype(fault: str) -> None:
    comparisons = list(compare_kernel(faulty(FAULTS[fault]), torch.device("cpu"), large=False))
    dtypes = {each.dtype for each in comparisons}
    assert len(dtypes) == 4
    assert {each.dtype for each in comparisons if not each.passed} == dtypes


def test_right_kernels_pass() -> None:
    comparisons = list(compare_kernel(kernels.get("cpu_flash"), torch.device("cpu"), large=False))
    assert all(each.passed for each in comparisons), [each for each in comparisons if not each.passed]
    assert {each.result for each in comparisons} & {"dq", "dk", "dv", "dsinks"}


def test_an_error_of_the_device_ends_the_comparison() -> None:
    def lost(*arguments: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    (only,) = compare_kernel(replace(kernels.get("cpu_flash"), compute_forward=lost), torch.device("cpu"))
    assert not only.passed
    assert "illegal memory access" in only.failure


# What steps write, as a run in which everything is right would have it.


def right_results(settings: AcceptanceSettings, folder: Path) -> dict[str, Any]:
    comparison = dict(dtype="float64", case="a tile", result="out", error=1e-15, allowed=1e-12, failure="", passed=True)
    found: dict[str, Any] = {
        "machine": {
            "self_tests": [{"device": "cpu"}],
            "is_healthy": True,
            "verdict": "ringspan works here.",
            "machine": {"cores": 2},
            "libraries": {"cuda": None},
            "devices": [],
            "backends": [],
            "packages": [],
            "variables": {},
        },
        "verify": {"verdict": "PASS", "status": PASS, "sentence": "All checks pass.", "checks": [{"verdict": "pass"}]},
        "share": {
            "tokens": settings.scale.share_tokens,
            "dtype": "float32",
            "rows": [
                dict(pattern=p.text, mode=mode, seconds=dict(ours=[1.0], plain=[1.0], bare=[1.0]), disturbed=0)
                for p in settings.share_patterns
                for mode in ("forward", "both")
            ],
        },
    }
    found |= {kernel_step_name(k): {"unusable": "", "comparisons": [comparison]} for k in settings.kernels}
    for name, case in settings.ring_steps.items():
        size, planned = case.ranks, max(planned_bytes(case))
        metrics = [RankMetrics(1 / size, 2 / size, planned, 1.0, 1.0, 3 / size) for _ in range(size)]
        trials = [combine_ranks(case, 0, TrialLimits(0, 60.0), metrics, 0.0).as_json()]
        found[name] = {"where": "here", "trials": trials}
    for run in settings.trainings:
        found[run.name] = {"losses": [5.0, 4.0, 3.0], "folder": str(write_weights(folder / run.name))}
    return found


def write_weights(folder: Path, change: float = 0.0) -> Path:
    from safetensors.torch import save_file

    (folder / "model").mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.ones(3, dtype=torch.float64) + change}, folder / "model" / "model.safetensors")
    return folder


def reports_of(results: dict[str, Any]) -> dict[str, StepReport]:
    return {
        name: StepReport(name, name, "finished", 1.0, "command", "log", result=result)
        for name, result in results.items()
    }


@pytest.fixture
def results(tmp_path: Path) -> dict[str, Any]:
    return right_results(ON_CPU, tmp_path)


def judged(results: dict[str, Any], settings: AcceptanceSettings = ON_CPU) -> tuple[int, list[str]]:
    """The status, and the checks that do not pass."""
    checks = judge_acceptance(reports_of(results), settings)
    return status(checks), [check.name for check in checks if check.verdict != "pass"]


def test_only_a_complete_run_passes(results: dict[str, Any]) -> None:
    assert judged(results) == (PASS, [])
    for name in results:
        rest = {other: result for other, result in results.items() if other != name}
        found, open_checks = judged(rest)
        assert found == INCOMPLETE, name
        assert open_checks, name


@pytest.mark.parametrize("outcome", ["crashed", "timed out"])
def test_a_step_that_does_not_finish_leaves_the_verdict_open(results: dict[str, Any], outcome: Any) -> None:
    for name in results:
        reports = reports_of(results)
        reports[name] = replace(reports[name], outcome=outcome, result=None, reason="why it ended")
        checks = judge_acceptance(reports, ON_CPU)
        assert status(checks) == INCOMPLETE, name
        assert "why it ended" in sentence_of(checks, "here")


def test_the_cpu_passes_only_if_it_was_asked_for(results: dict[str, Any]) -> None:
    fallback = replace(ON_CPU, fallback="torch is built without CUDA")
    assert judged(results, fallback) == (INCOMPLETE, ["runs on GPUs"])


def test_a_quick_run_never_passes(tmp_path: Path) -> None:
    quick = replace(ON_CPU, quick=True)
    assert judged(right_results(quick, tmp_path), quick) == (INCOMPLETE, ["runs at full size"])


def test_a_ring_of_one_never_passes(tmp_path: Path) -> None:
    alone = replace(ON_CPU, sizes=(1,), timed=(1,))
    assert judged(right_results(alone, tmp_path), alone) == (INCOMPLETE, ["rings of several ranks"])
    untimed = replace(ON_CPU, timed=(1,))
    assert judged(right_results(untimed, tmp_path), untimed) == (INCOMPLETE, ["a ring is faster than one rank"])


def failing(results: dict[str, Any]) -> list[str]:
    found, names = judged(results)
    assert found == FAIL
    return names


def test_a_failing_kernel_fails(results: dict[str, Any]) -> None:
    comparisons = compare_kernel(faulty(FAULTS["heads are swapped"]), torch.device("cpu"), large=False)
    results["kernel-cpu_flash"]["comparisons"] = [each.as_json() for each in comparisons]
    assert failing(results) == ["kernel cpu_flash is exact"]


def test_a_kernel_whose_contract_excludes_the_device_has_no_check(results: dict[str, Any]) -> None:
    results["kernel-cpu_flash"] = {"unusable": "capability 7.5 is below 8.0", "comparisons": []}
    checks = judge_acceptance(reports_of(results), ON_CPU)
    assert "kernel cpu_flash is exact" not in [check.name for check in checks]


def test_a_slow_kernel_call_fails(results: dict[str, Any]) -> None:
    results["share"]["rows"][0]["seconds"]["ours"] = [1.2]
    assert failing(results) == ["share of the bare kernel: dilated"]
    for row in results["share"]["rows"]:
        row["disturbed"] = 1
    assert judged(results)[0] == INCOMPLETE


@pytest.mark.parametrize(("verdict", "wanted"), [(FAIL, FAIL), (INCOMPLETE, INCOMPLETE), (PASS, PASS)])
def test_the_verdict_of_verify_counts(results: dict[str, Any], verdict: int, wanted: int) -> None:
    results["verify"]["status"] = verdict
    assert judged(results)[0] == wanted


def test_a_ring_that_is_not_faster_fails(results: dict[str, Any]) -> None:
    results["ring-2-full"]["trials"][0]["forward_seconds"] = 2.0
    assert failing(results) == ["a ring of 2 is faster"]


def test_a_rank_that_holds_more_than_planned_fails(results: dict[str, Any]) -> None:
    (trial,), check = results["ring-2-full"]["trials"], "memory of a ring of 2 is as planned"
    trial["peak_bytes"] = [2**20, 2**40]
    assert failing(results) == [check]
    trial["peak_bytes"] = [0, 0]  # a blind measurement
    assert judged(results) == (INCOMPLETE, [check])


def test_training_must_fall_and_agree(results: dict[str, Any]) -> None:
    run = TrainingRun(2, "float64").name
    results[run]["losses"] = [5.0, 5.0, 4.9]
    assert failing(results) == ["the loss falls on a ring of 2 in float64", "a ring of 2 trains as one rank"]
    results[run]["losses"] = [5.0, 4.0, float("nan")]
    assert failing(results) == ["the loss falls on a ring of 2 in float64", "a ring of 2 trains as one rank"]
    results[run]["losses"] = [5.0, 4.0, 3.0]
    write_weights(Path(results[run]["folder"]), change=1e-6)
    assert failing(results) == ["a ring of 2 trains as one rank"]
    write_weights(Path(results[run]["folder"]), change=float("nan"))
    assert failing(results) == ["a ring of 2 trains as one rank"]


# Steps in real processes.


def step(tmp_path: Path, program: str, **more: Any) -> Step:
    return Step("a", "a step", (sys.executable, "-c", program), tmp_path / "result.json", **more)


def test_a_step_that_finishes(tmp_path: Path) -> None:
    report = run_step(step(tmp_path, f"open({str(tmp_path / 'result.json')!r}, 'w').write('[1]')"), tmp_path, 60)
    assert (report.outcome, report.result, report.reason) == ("finished", [1], "")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit status -11"),
        ("print('so far'); raise MemoryError('too large')", "MemoryError: too large"),
        ("print('all is well')", "no result: all is well"),
        ("open('result.json', 'w').write('{')", "no result"),
    ],
)
def test_a_crash_is_recorded_with_its_output(
    tmp_path: Path, program: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = run_step(step(tmp_path, program), tmp_path, 60)
    assert report.outcome == "crashed"
    assert words in report.reason
    assert report.result is None


def test_a_hang_ends_with_all_its_processes(tmp_path: Path) -> None:
    program = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
    start = time.monotonic()
    report = run_step(step(tmp_path, program), tmp_path, 2.0)
    assert report.outcome == "timed out"
    assert "within 2 s" in report.reason
    assert time.monotonic() - start < 60
    pid = int((tmp_path / "a.log").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


class PlannerWithFaults(StepPlanner):
    """The real first step, one that crashes, and one that hangs."""

    def others(self) -> list[Step]:
        crash = self._step("share", "a crash", ("no_such_module",), self.folder / "x.json", ranks=0)
        hang = self._step("verify", "a hang", ("http.server", "0"), self.folder / "x.json", ranks=0)
        return [crash, hang]


def test_the_rest_runs_after_a_crash_and_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "StepPlanner", PlannerWithFaults)
    seen: list[str] = []
    progress = Progress(
        lambda *_: None, lambda number, total, report: seen.append(f"{number}/{total} {report.outcome}")
    )
    settings = replace(ON_CPU, limit_seconds=30.0)
    run: AcceptanceRun = run_acceptance(settings, tmp_path, "ringspan verify --acceptance", progress)
    assert seen == ["1/3 finished", "2/3 crashed", "3/3 timed out"]
    assert run.document["status"] == INCOMPLETE
    assert run.page.badge == "INCOMPLETE"
    text = run.paths["markdown"].read_text()
    assert "No module named no_such_module" in text
    assert "timed out" in text
    assert json.loads(run.paths["json"].read_text())["verdict"] == "INCOMPLETE"


def test_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert acceptance_settings("cpu", [], 60.0).fallback == ""
    assert acceptance_settings("auto", [], 60.0).fallback
    assert acceptance_settings("cpu", [3], 60.0).sizes == (1, 3)
    with pytest.raises(ValueError, match="device='cuda'"):
        acceptance_settings("cuda", [], 60.0)
    with pytest.raises(ValueError, match="device='tpu'"):
        acceptance_settings("tpu", [], 60.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    gpus = acceptance_settings("auto", [], 60.0)
    assert (gpus.device, gpus.sizes, gpus.timed, gpus.fallback) == ("cuda", (1, 2, 4, 6), (1, 2, 4, 6), "")
    assert gpus.kernels == ("reference", "cuda_flash", "cuda_efficient", "cuda_cudnn")
    assert with_dtype(gpus, {"devices": [dict(name="cuda:0", suggested_dtype="bfloat16")]}).dtype == "bfloat16"
    with pytest.raises(ValueError, match="has 6 GPUs"):
        acceptance_settings("auto", [8], 60.0)
