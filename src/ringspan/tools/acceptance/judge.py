"""Turns what the steps wrote into checks. The checks of a step that did not finish are "not measured"."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ringspan.models.config import WEIGHTS
from ringspan.tools.acceptance.plan import (
    FLOAT64,
    MACHINE,
    SHARE,
    VERIFY,
    AcceptanceSettings,
    kernel_step_name,
    ring_step_name,
)
from ringspan.tools.acceptance.steps import StepReport
from ringspan.tools.bench.cases import BenchCase
from ringspan.tools.bench.ladder import OVERHEAD_BYTES, plan_of, planned_bytes
from ringspan.tools.bench.share import PASSES, REQUIRED_SHARE_NOT_NESTED, REQUIRED_WINDOW_SHARE
from ringspan.tools.bench.summaries import Summary, speed_up, summarize
from ringspan.tools.bench.trials import trial_from_json
from ringspan.tools.verify.check import Check
from ringspan.tools.verify.speed import MIN_EFFICIENCY
from ringspan.tools.verify.verify_page import FAIL, INCOMPLETE, with_reasons

Reports = Mapping[str, StepReport]
MIN_PEAK = 0.5  # of the plan, in which the rows are most of the memory; less was not all measured
MIN_FALL = 0.1  # of the loss, from the first to the last fifth of the steps
ALLOWED_DIFFERENCE = 1e-9  # of losses and weights in fp64 after training, between rings
_MODEL = "model"


def judge_acceptance(reports: Reports, settings: AcceptanceSettings) -> list[Check]:
    """All checks, in the order of the report."""
    checks = [*_limits_of_the_run(settings), _judge(reports, [MACHINE], "the self-test passes", "", _judge_machine)]
    for name in settings.kernels:
        step = kernel_step_name(name)
        report = reports.get(step)
        if report is None or not report.finished or not report.result["unusable"]:
            checks.append(_judge(reports, [step], f"kernel {name} is exact", "one device", _judge_kernel))
    for text in (pattern.text for pattern in settings.share_patterns):
        name = f"share of the bare kernel: {'window' if text.startswith('window') else 'dilated'}"
        case = f"{text}, {settings.scale.share_tokens:,} tokens, causal, {settings.dtype}, one device"
        checks.append(_judge(reports, [SHARE], name, case, partial(_judge_share, text)))
    case = f"rings of up to {settings.largest}, {settings.backend}"
    checks.append(_judge(reports, [VERIFY], "ringspan verify passes", case, _judge_verify))
    if settings.largest == 1:
        reason = f"this machine has one {'core' if settings.device == 'cpu' else 'GPU'}, or --ranks asked for one rank"
        checks.append(Check("rings of several ranks", "not measured", "", reason, ""))
    elif max(settings.timed) == 1:
        reason = "needs a core or a device for each rank"
        checks.append(Check("a ring is faster than one rank", "not measured", "not timed", reason, ""))
    for size in settings.sizes:
        checks += _judge_ring(reports, settings, size)
    return checks + _judge_trainings(reports, settings)


def _limits_of_the_run(settings: AcceptanceSettings) -> list[Check]:
    """Checks that cannot pass, whatever is measured: of a run on the CPU that was not asked for, and of a quick one."""
    found = []
    if settings.fallback:
        way_out = "--device cpu accepts the CPU"
        found.append(Check("runs on GPUs", "not measured", "ran on the CPU", f"{settings.fallback}; {way_out}", ""))
    if settings.quick:
        found.append(Check("runs at full size", "not measured", "--quick", "tiny sizes show only that it runs", ""))
    return found


Outcome = tuple[bool | None, str, str]  # passed (None: not measured), result, explanation


def _judge(reports: Reports, steps: list[str], name: str, case: str, judge: Callable[[list[Any]], Outcome]) -> Check:
    """The check that ``judge`` makes of the results of these steps; not measured if one of them did not finish."""
    for step in steps:
        report = reports.get(step)
        if report is None:
            return Check(name, "not measured", "", f"step {step} was not run", case)
        if not report.finished:
            return Check(name, "not measured", report.outcome, f"step {step}: {report.reason}", case)
    passed, result, reason = judge([reports[step].result for step in steps])
    return Check(name, "not measured" if passed is None else "pass" if passed else "FAIL", result, reason, case)


def _judge_machine(found: list[Any]) -> Outcome:
    tests = found[0]["self_tests"]
    devices = len({test["device"] for test in tests})
    result = f"{len(tests)} tests on {devices} device{'s' if devices > 1 else ''}"
    return bool(found[0]["is_healthy"]), result, found[0]["verdict"]


def _judge_kernel(found: list[Any]) -> Outcome:
    comparisons = found[0]["comparisons"]
    if not comparisons:
        return None, "nothing was compared", "the kernel takes no dtype"
    failing = [each for each in comparisons if not each["passed"]]
    dtypes = ", ".join(dict.fromkeys(each["dtype"] for each in comparisons))
    if failing:
        first = failing[0]
        why = first["failure"] or f"{first['result']} off by {first['error']:.1e}, allowed {first['allowed']:.1e}"
        return False, f"{len(failing)} of {len(comparisons)} cases fail", f"{first['dtype']}, {first['case']}: {why}"
    worst = max(comparisons, key=ratio)
    where = f"{worst['dtype']}, {worst['case']}, {worst['result']}"
    return (
        True,
        f"{len(comparisons)} cases in {dtypes}",
        f"errors are at most {ratio(worst):.2f} of what is allowed: {where}",
    )


def ratio(comparison: Mapping[str, Any]) -> float:
    return float(comparison["error"] / comparison["allowed"]) if comparison["allowed"] else 0.0


def required_share(pattern: str) -> float:
    return REQUIRED_WINDOW_SHARE if pattern.startswith("window") else REQUIRED_SHARE_NOT_NESTED


def shares(row: Mapping[str, Any], way: str = "ours") -> list[float]:
    """The throughput relative to the bare kernel, round by round."""
    return [bare / ours for bare, ours in zip(row["seconds"]["bare"], row["seconds"][way], strict=True)]


def _judge_share(pattern: str, found: list[Any]) -> Outcome:
    rows = [row for row in found[0]["rows"] if row["pattern"] == pattern]
    medians = {row["mode"]: statistics.median(shares(row)) for row in rows}
    result = "; ".join(f"{PASSES[mode]} {share:.2f}" for mode, share in medians.items())
    if any(row["disturbed"] for row in rows):
        return None, result, "other programs were busy: run it on an idle machine"
    required = required_share(pattern)
    return min(medians.values()) >= required, result, f"required: {required}, a target of the project, set on CPUs"


def _judge_verify(found: list[Any]) -> Outcome:
    document = found[0]
    passing = sum(check["verdict"] == "pass" for check in document["checks"])
    result = f"{document['verdict']}: {passing} of {len(document['checks'])} checks pass"
    status = document["status"]
    return False if status == FAIL else None if status == INCOMPLETE else True, result, document["sentence"]


def summaries_of(reports: Reports, settings: AcceptanceSettings) -> dict[BenchCase, Summary]:
    """The trials of the rings that finished."""
    finished = [reports[name] for name in settings.ring_steps if name in reports and reports[name].finished]
    return summarize(trial_from_json(values) for report in finished for values in report.result["trials"])


def possible_speed_up(case: BenchCase) -> float:
    """By the balance of the layout."""
    plan = plan_of(case)
    work = [plan.work(rank) for rank in range(case.ranks)]
    return sum(work) / max(work)


def _judge_ring(reports: Reports, settings: AcceptanceSettings, size: int) -> list[Check]:
    summaries, by_name = summaries_of(reports, settings), settings.cases(size)
    cases = tuple(by_name.values())
    names = "; ".join(f"{case.pattern.text}, {case.tokens:,} tokens" for case in cases)
    text = f"{names}, causal, forward and backward, {settings.dtype}"

    def judge_memory(found: list[Any]) -> Outcome:
        pairs = [(summaries[case].rank_bytes.median, max(planned_bytes(case))) for case in cases]
        result = "; ".join(f"{peak / 2**20:,.0f} MiB, planned {plan / 2**20:,.0f}" for peak, plan in pairs)
        if any(peak < MIN_PEAK * plan for peak, plan in pairs):
            return None, result, "less than the rows take: the process reused memory that it already held"
        reason = f"allowed: the plan and {OVERHEAD_BYTES / 2**20:.0f} MiB of workspace and caches"
        return all(peak <= plan + OVERHEAD_BYTES for peak, plan in pairs), result, reason

    def judge_speed(found: list[Any]) -> Outcome:
        gains = [(speed_up(summaries, case), MIN_EFFICIENCY * possible_speed_up(case)) for case in cases]
        known = [(gain, limit) for gain, limit in gains if gain is not None]
        result = "; ".join(f"{gain.median:.2f} x" for gain, _ in known)
        if len(known) < len(gains) or any(gain.disturbed for gain, _ in known):
            return None, result, "other programs were busy: run it on an idle machine"
        limits = "; ".join(f"{limit:.2f} x" for _, limit in known)
        reason = f"required: {limits}, {MIN_EFFICIENCY} of what the layout allows"
        return all(gain.median >= limit for gain, limit in known), result, reason

    steps = [ring_step_name(size, name) for name in by_name]
    checks = [_judge(reports, steps, f"memory of a ring of {size} is as planned", text, judge_memory)]
    if size > 1 and size in settings.timed:
        needed = [*(ring_step_name(1, name) for name in by_name), *steps]
        checks.insert(0, _judge(reports, needed, f"a ring of {size} is faster", text, judge_speed))
    return checks


def _judge_trainings(reports: Reports, settings: AcceptanceSettings) -> list[Check]:
    scale, checks = settings.scale, []
    text = f"{scale.train_steps} steps of {scale.train_tokens:,} tokens"
    for run in settings.trainings:
        name = f"the loss falls on a ring of {run.size} in {run.dtype}"
        checks.append(_judge(reports, [run.name], name, text, _judge_fall))
    first, second, *_ = settings.trainings
    if settings.largest > 1:
        name = f"a ring of {settings.largest} trains as one rank"
        case = f"{text}, {FLOAT64}"
        checks.append(_judge(reports, [first.name, second.name], name, case, _judge_agreement))
    return checks


def _judge_fall(found: list[Any]) -> Outcome:
    losses = found[0]["losses"]
    part = max(1, len(losses) // 5)
    start, end = statistics.mean(losses[:part]), statistics.mean(losses[-part:])
    reason = f"means of the first and of the last fifth of the steps; required: lower by {MIN_FALL:.0%}"
    return end <= (1 - MIN_FALL) * start, f"{start:.3f} to {end:.3f} nats per byte", reason


def _judge_agreement(found: list[Any]) -> Outcome:
    one, ring = found
    if len(one["losses"]) != len(ring["losses"]):
        return (
            False,
            f"{len(one['losses'])} and {len(ring['losses'])} steps",
            "the runs have different numbers of steps",
        )
    losses = torch.tensor(one["losses"], dtype=torch.float64) - torch.tensor(ring["losses"], dtype=torch.float64)
    loss = losses.abs().max().item()
    weight = _weight_difference(Path(one["folder"]), Path(ring["folder"]))
    result = f"losses differ by {loss:.1e}, weights by {weight:.1e}"
    agrees = loss <= ALLOWED_DIFFERENCE and weight <= ALLOWED_DIFFERENCE  # False for NaN
    return agrees, result, f"allowed: {ALLOWED_DIFFERENCE:g}, after all steps"


def _weight_difference(one: Path, other: Path) -> float:
    from safetensors.torch import load_file  # noqa: PLC0415 - optional

    first, second = (load_file(folder / _MODEL / WEIGHTS) for folder in (one, other))
    if first.keys() != second.keys():
        return float("inf")
    differences = [(first[name].double() - second[name].double()).abs() for name in first]
    return float(torch.stack([each.max() for each in differences]).max())


def sentence_of(checks: list[Check], where: str) -> str:
    """The result in a few sentences."""
    failing = [check for check in checks if check.verdict == "FAIL"]
    passing = sum(check.verdict == "pass" for check in checks)
    rest = with_reasons(checks, "not measured")
    if failing:
        names = "; ".join(f"{check.name} ({check.result})" for check in failing)
        return f"{len(failing)} of {len(checks)} checks fail on {where}: {names}.{rest}"
    return f"{'All' if passing == len(checks) else f'{passing} of'} {len(checks)} checks pass on {where}.{rest}"
