"""FLOPs: all ranks together compute as much as one rank alone, and no rank computes more than its share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ringspan.planning.api import plan
from ringspan.tools.measure import count_flops
from ringspan.tools.verify.check import ByRing, Check, Harness, judge_if_measured, values_of
from ringspan.tools.verify.workload import VerifySettings

FLOPS_TOLERANCE = 0.05


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
