"""Trials in real processes: their measurements, and running out of memory or time and crashes as results."""

import threading
import time
from dataclasses import replace

import psutil
import pytest

import ringspan as rs
from ringspan.tools.bench.cases import case_from_json
from ringspan.tools.bench.ladder import OVERHEAD_BYTES, plan_of, planned_bytes
from ringspan.tools.bench.trials import Trial, TrialLimits, run_trial, trial_from_json
from tests.ranks import starts_processes
from tests.tools.bench.examples import ROOMY, SMALL, case

pytestmark = starts_processes

SLOW = replace(SMALL, tokens=2**19, ranks=2, heads=4, pattern=rs.Full())  # takes many minutes unless it is stopped


def test_two_ranks_need_the_memory_and_bytes_of_the_plan() -> None:
    spanning = replace(case(tokens=8192, ranks=2), pattern=rs.Dilated.spanning(8192), heads=8, head_dim=64)
    trial = run_trial(spanning, 1, ROOMY)
    assert trial.outcome == "measured", trial.reason
    assert trial.forward_seconds > 0
    assert trial.backward_seconds > 0
    assert trial.wall_seconds > trial.total_seconds
    for peak, planned in zip(trial.peak_bytes, planned_bytes(trial.case), strict=True):
        assert 0.9 * planned < peak < planned + OVERHEAD_BYTES
    plan = plan_of(trial.case)
    sent = [plan.bytes_sent(rank) + plan.bytes_sent(rank, backward=True) for rank in range(2)]
    assert list(trial.sent_bytes) == sent


def test_a_simulated_ring_reports_the_peak_of_each_rank() -> None:
    """Virtual ranks hold what the plan says, plus the results of kernel calls, which the workspace bounds."""
    trial = run_trial(replace(case("simulated", tokens=8192, ranks=4), heads=8, head_dim=64), 1, ROOMY)
    assert len(trial.peak_bytes) == 4
    for peak, planned in zip(trial.peak_bytes, planned_bytes(trial.case), strict=True):
        assert planned <= peak < planned + 16 * 2**20


def test_running_out_of_memory_is_a_result() -> None:
    large = replace(SMALL, tokens=262144, heads=4, head_dim=64)  # 256 MiB for each tensor
    trial = run_trial(large, 1, TrialLimits(memory_bytes=128 * 2**20, seconds=60.0))
    assert trial.outcome == "out of memory"
    assert trial.reason == "rank 0 needed more than its 128 MiB"
    assert not trial.peak_bytes


def test_running_out_of_time_is_a_result() -> None:
    trial = run_trial(SLOW, 1, replace(ROOMY, seconds=1.0))
    assert (trial.outcome, trial.reason) == ("out of time", "no result within 1 s")


def test_a_rank_that_raises_is_a_result() -> None:
    trial = run_trial(replace(SMALL, head_dim=0), 1, ROOMY)
    assert trial.outcome == "crashed"
    assert trial.reason.startswith("rank 0: ValueError: q has shape (1, 64, 2, 0)")


def test_a_rank_that_is_killed_is_a_result() -> None:
    found: list[Trial] = []
    thread = threading.Thread(target=lambda: found.append(run_trial(SLOW, 1, ROOMY)))
    thread.start()
    victim = _busy_child(seconds=2.0)
    victim.kill()
    thread.join()
    assert found[0].outcome == "crashed"
    assert found[0].reason.endswith("died with exit code -9")
    assert not _ranks()


def _ranks() -> list[psutil.Process]:
    """The ranks of this process: the children of its fork server."""
    return [rank for child in psutil.Process().children() for rank in child.children()]


def _busy_child(seconds: float) -> psutil.Process:
    """A rank that has used this much CPU time."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for child in _ranks():
            if child.cpu_times().user > seconds:
                return child
        time.sleep(0.05)
    raise AssertionError("no rank was started")


def test_cases_and_trials_survive_json() -> None:
    assert case_from_json(SMALL.as_json()) == SMALL
    trial = Trial(SMALL, 2, "out of memory", ROOMY, "rank 0", peak_bytes=(1, 2))
    assert trial_from_json(trial.as_json()) == trial


def test_when_a_trial_holds_under_other_limits() -> None:
    done = Trial(SMALL, 1, "measured", ROOMY, peak_bytes=(100, 100), wall_seconds=5.0)
    assert done.holds_under(TrialLimits(200, 5.0))
    assert not done.holds_under(TrialLimits(199, 5.0))
    assert not done.holds_under(TrialLimits(200, 4.9))
    full = Trial(SMALL, 1, "out of memory", TrialLimits(100, 5.0))
    assert full.holds_under(TrialLimits(100, 9.0))
    assert not full.holds_under(TrialLimits(101, 5.0))
    late = Trial(SMALL, 1, "out of time", TrialLimits(100, 5.0))
    assert late.holds_under(TrialLimits(999, 5.0))
    assert not late.holds_under(TrialLimits(999, 5.1))


@pytest.mark.parametrize(
    ("foreign", "seconds", "disturbed"), [(0.05, 10.0, False), (0.2, 10.0, True), (0.2, 0.1, False)]
)
def test_a_trial_is_disturbed_above_a_tenth_of_a_core(foreign: float, seconds: float, disturbed: bool) -> None:
    trial = Trial(SMALL, 1, "measured", ROOMY, forward_seconds=seconds, foreign_cores=foreign)
    assert trial.disturbed == disturbed
