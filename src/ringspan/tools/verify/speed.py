"""Speed: all ranks together compute as much as one alone, larger rings are faster, and communication overlaps compute.

FLOPs are counted: no work is duplicated, and no rank computes more than its share. Times are judged as far as the
layout allows, and not at all while other programs keep the machine busy.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from torch import Tensor

from ringspan.planning.api import plan
from ringspan.schedule import communication_seconds
from ringspan.tools.measure import busy_seconds, count_flops
from ringspan.tools.verify.check import ByRing, Check, Harness, Verdict, judge_if_measured, values_of
from ringspan.tools.verify.workload import VerifySettings

MIN_EFFICIENCY = 0.75  # of the speed-up that the balance of the layout allows
MIN_OVERLAP = 0.5
MAX_FOREIGN_CORES = 0.25  # kept busy by other programs; beyond that, speed is not judged
MIN_TRANSFER_SECONDS = 1e-3  # below that, the overlap is noise
FLOPS_TOLERANCE = 0.05


@dataclass(frozen=True)
class SpeedMeasurement:
    """Seconds of forward and backward in each trial; empty if ranks share a core, which makes them meaningless."""

    seconds: tuple[float, ...]
    window_seconds: float  # from before the first trial to after the last
    own_cpu_seconds: float  # of this process, in the window
    busy_cpu_seconds: float  # of the whole machine, in the window
    busiest_share: float  # of the causal work, in the layout


@dataclass(frozen=True)
class OverlapMeasurement:
    """Seconds that a forward waited for parcels, and seconds that the same transfers take without compute."""

    waited: float
    transferred: float


def measure_speed(harness: Harness) -> SpeedMeasurement:
    case, ring = harness.settings.speed, harness.bound.ring
    if not harness.settings.trials:
        return SpeedMeasurement((), 0.0, 0.0, 0.0, 0.0)
    ring_plan = plan(case.pattern, case.tokens, ring_size=ring.size, layout=ring.layout, causal=True, heads=case.heads)
    pairs = [ring_plan.work(rank) for rank in range(ring.size)]
    expected, rows = harness.expect(case, True, backward=True), harness.own_rows(case)
    seconds, results = [], list[list[Tensor]]()
    harness.barrier()
    start, own, busy = time.perf_counter(), time.process_time(), busy_seconds()
    for _ in range(harness.settings.trials):
        harness.barrier()
        seconds.append(harness.device.seconds(lambda: results.append(harness.call(rows, case, True, backward=True))))
        harness.compare(expected, results.pop())
    window, own, busy = time.perf_counter() - start, time.process_time() - own, busy_seconds() - busy
    return SpeedMeasurement(tuple(seconds), window, own, busy, max(pairs) / sum(pairs))


def measure_overlap(harness: Harness) -> OverlapMeasurement | None:
    """None for other implementations, which do not report how long they wait."""
    case, bound = harness.settings.speed, harness.bound
    if not bound.implementation.is_ringspan or not harness.settings.trials:
        return None
    rows, expected = harness.own_rows(case), harness.expect(case, True, backward=False)
    waited, transferred = [], []
    for _ in range(harness.settings.trials):
        harness.barrier()
        bound.ring.reset_counters()
        found = harness.call(rows, case, True, backward=False)
        waited.append(bound.ring.counters.waiting_seconds)
        harness.compare(expected, found)
        transferred.append(communication_seconds(bound.ring, case.pattern, case.tokens, rows[1], rows[2], causal=True))
    return OverlapMeasurement(statistics.median(waited), statistics.median(transferred))


def seconds_by_ring(measured: ByRing) -> dict[int, float]:
    """Median seconds of forward and backward; a trial takes as long as its slowest rank."""
    return {
        size: statistics.median(max(trial) for trial in zip(*(each.seconds for each in ranks), strict=True))
        for size, ranks in values_of(measured, "speed").items()
        if ranks[0].seconds
    }


def foreign_cores(measured: ByRing) -> float:
    """How many cores other programs kept busy while a ring was timed; the largest of all rings."""
    foreign = [0.0]
    for ranks in values_of(measured, "speed").values():
        if ranks[0].seconds:
            own = sum(each.own_cpu_seconds for each in ranks)
            foreign.append((ranks[0].busy_cpu_seconds - own) / ranks[0].window_seconds)
    return max(foreign)


def was_disturbed(measured: ByRing) -> bool:
    """Whether other programs make the times meaningless."""
    return foreign_cores(measured) > MAX_FOREIGN_CORES


def judge_speed(measured: ByRing, settings: VerifySettings) -> Check:
    name, case = "more ranks are faster", f"{settings.speed}, causal"

    def judge() -> Check:
        not_measured = _not_measured(name, case, measured)
        if not_measured is not None:
            return not_measured
        seconds = seconds_by_ring(measured)
        size = max(seconds)
        ratio = seconds[1] / seconds[size]
        share = values_of(measured, "speed")[size][0].busiest_share
        result = f"{ratio:.2f} x with {size} ranks ({seconds[1]:.2f} s, {seconds[size]:.2f} s)"
        allows = f"the layout allows {1 / share:.2f} x"
        if 1 / share < 0.98 * size:
            allows += f", because its busiest rank has {share:.0%} of the causal work"
        limit = MIN_EFFICIENCY / share
        verdict: Verdict = "pass" if ratio >= limit else "FAIL"
        reason = f"{'at least' if verdict == 'pass' else 'less than'} {limit:.2f} x; {allows}"
        return Check(name, verdict, result, reason, case, essential=False)

    return judge_if_measured(measured, "speed", name, case, judge)


def judge_overlap(measured: ByRing, settings: VerifySettings) -> Check:
    name, case = "communication overlaps compute", f"{settings.speed}, causal"

    def judge() -> Check:
        not_measured = _not_measured(name, case, measured)
        if not_measured is not None:
            return not_measured
        ranks = values_of(measured, "overlap")[max(seconds_by_ring(measured))]
        if None in ranks:
            reason = "only ringspan reports how long it waits"
            return Check(name, "not measured", "", reason, case, essential=False)
        waited, transferred = (max(getattr(each, key) for each in ranks) for key in ("waited", "transferred"))
        result = f"waited {waited * 1000:.1f} ms for transfers of {transferred * 1000:.1f} ms"
        if transferred < MIN_TRANSFER_SECONDS:
            return Check(name, "not measured", result, "the transfers are too short to tell", case, essential=False)
        overlap = max(0.0, 1 - waited / transferred)
        result = f"{overlap:.0%}: {result}"
        if overlap < MIN_OVERLAP:
            reason = f"less than {MIN_OVERLAP:.0%}: ranks wait for parcels instead of computing"
            return Check(name, "FAIL", result, reason, case, essential=False)
        return Check(name, "pass", result, "parcels are sent while the rank computes", case, essential=False)

    return judge_if_measured(measured, "overlap", name, case, judge)


def _not_measured(name: str, case: str, measured: ByRing) -> Check | None:
    """Why speed cannot be judged here; None if it can."""
    if len(seconds_by_ring(measured)) < 2:
        reason = "needs a ring of 2 or more in which each rank has its own core or device"
        return Check(name, "not measured", "not timed", reason, case, essential=False)
    if was_disturbed(measured):
        result = f"other programs used {foreign_cores(measured):.1f} cores"
        return Check(name, "not measured", result, "the machine was busy with other programs", case, essential=False)
    return None


@dataclass(frozen=True)
class FlopsMeasurement:
    """FLOPs of forward and backward, not causal, and the share of all (query, key) pairs in this rank's rows."""

    flops: int
    share: float


def measure_flops(harness: Harness) -> FlopsMeasurement:
    case, ring = harness.settings.counted, harness.bound.ring
    rows, results = harness.own_rows(case), list[list[Tensor]]()
    flops = count_flops(lambda: results.append(harness.call(rows, case, False, backward=True)))
    harness.compare(harness.expect(case, False, backward=True), results[0])
    ring_plan = plan(
        case.pattern,
        case.tokens,
        ring_size=ring.size,
        layout=ring.layout,
        heads=case.heads,
        head_dim=case.head_dim,
    )
    pairs = [ring_plan.work(rank) for rank in range(ring.size)]
    return FlopsMeasurement(flops, pairs[ring.rank] / sum(pairs))


def judge_total(measured: ByRing, settings: VerifySettings) -> Check:
    name, case = "no work is duplicated", str(settings.counted)

    def judge() -> Check:
        by_ring = values_of(measured, "flops")
        alone = sum(each.flops for each in by_ring.get(1, []))
        if not alone:
            reason = "its kernels bypass the torch dispatcher"
            return Check(name, "not measured", "0 FLOPs counted", reason, case)
        ratios = {size: sum(each.flops for each in ranks) / alone for size, ranks in by_ring.items()}
        worst = max(ratios, key=lambda size: (round(abs(ratios[size] - 1), 2), size))
        result = f"ring of {worst}: {ratios[worst]:.2f} x the FLOPs of one rank"
        if abs(ratios[worst] - 1) > FLOPS_TOLERANCE:
            reason = "several ranks compute the same work" if ratios[worst] > 1 else "some of the work is missing"
            return Check(name, "FAIL", result, reason, case)
        return Check(name, "pass", result, "all ranks together compute as much as one rank alone", case)

    return judge_if_measured(measured, "flops", name, case, judge)


def judge_shares(measured: ByRing, settings: VerifySettings) -> Check:
    name, case = "every rank computes its share", str(settings.counted)

    def judge() -> Check:
        found = []
        for size, ranks in values_of(measured, "flops").items():
            total = sum(each.flops for each in ranks)
            if size > 1 and total:
                found += [(each.flops / total / each.share, size, rank, each) for rank, each in enumerate(ranks)]
        if not found:
            reason = "needs a ring of 2 or more, and kernels that torch's profiler sees"
            return Check(name, "not measured", "0 FLOPs counted", reason, case)
        ratio, size, rank, each = max(found, key=lambda entry: round(entry[0], 2))
        result = f"ring of {size}: rank {rank} does {ratio * each.share:.0%} of the work"
        if ratio > 1 + FLOPS_TOLERANCE:
            reason = f"its rows need {each.share:.0%} of the work: the other ranks wait for it"
            return Check(name, "FAIL", result, reason, case)
        return Check(name, "pass", result, f"its rows need {each.share:.0%}; no rank exceeds its share more", case)

    return judge_if_measured(measured, "flops", name, case, judge)
