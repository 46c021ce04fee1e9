"""Traffic: the bytes that ranks send, by the plan, by ringspan's counters, and by the network interface."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ringspan.planning import RingPlan
from ringspan.planning.api import plan
from ringspan.tools.measure import loopback_bytes_sent, why_loopback_is_blind
from ringspan.tools.verify.check import ByRing, Check, Harness, judge_if_measured, values_of
from ringspan.tools.verify.workload import VerifySettings

FRAMING = 0.02  # headers and acknowledgements, as a share of the payload
FRAMING_BYTES = 2**16  # per rank, for the barriers around the measurement
_MAX_TRIALS = 8  # other programs may use the interface too, so the smallest reading counts


@dataclass(frozen=True)
class TrafficMeasurement:
    """Bytes that this rank sent, by the plan and by its counters, and bytes of all ranks on the interface."""

    causal: bool
    planned: int | None  # of this rank; None for other implementations, which have no plan
    counted: int | None
    needed: int  # bytes of K and V rows that all ranks together must receive; a lower bound if not causal
    interface: int | None
    why_blind: str  # why the interface does not see the traffic


def measure_traffic(harness: Harness) -> list[TrafficMeasurement]:
    case, ring = harness.settings.counted, harness.bound.ring
    rows = harness.own_rows(case)
    why_blind = why_loopback_is_blind(harness.group)
    measured = []
    for causal in (False, True):
        expected = harness.expect(case, causal, backward=False)
        planned = counted = None
        limit, readings = float("inf"), list[int]()
        ring_plan = plan(
            case.pattern,
            case.tokens,
            ring_size=ring.size,
            layout=ring.layout,
            causal=causal,
            batch=case.batch,
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            dtype=rows[0].dtype,
        )
        if harness.bound.implementation.is_ringspan:
            planned = ring_plan.bytes_sent(ring.rank)
            limit = _max_bytes(sum(ring_plan.bytes_sent(rank) for rank in range(ring.size)), ring.size)
        while not readings or (not why_blind and min(readings) > limit and len(readings) < _MAX_TRIALS):
            ring.reset_counters()
            before = 0 if why_blind else _read_interface(harness)
            found = harness.call(rows, case, causal, backward=False)
            counted = None if planned is None else ring.counters.bytes_sent
            readings.append(0 if why_blind else _read_interface(harness) - before)
            harness.compare(expected, found)
        needed = 0 if causal or planned is not None else _needed_bytes(ring_plan)
        seen = None if why_blind else min(readings)
        measured.append(TrafficMeasurement(causal, planned, counted, needed, seen, why_blind))
    return measured


def _needed_bytes(ring_plan: RingPlan) -> int:
    """Bytes of K and V rows that all ranks together must receive, however they are sent.

    A row that several branches need may be sent once, so only the branch that needs most counts.
    """
    rows = 0
    for rank in range(ring_plan.layout.ring_size):
        of_branch: Counter[int] = Counter()
        for message in (message for hop in ring_plan.rank(rank).hops for message in hop.receives):
            of_branch[message.parcel.branch] += message.parcel.rows
        rows += max(of_branch.values(), default=0)
    return rows * ring_plan.sizes.parcel_row_bytes


def _read_interface(harness: Harness) -> int:
    """What the first rank reads while no rank sends; broadcast, so that all ranks make the same decision next."""
    harness.barrier()
    reading = torch.tensor([loopback_bytes_sent()])
    dist.broadcast(reading, dist.get_global_rank(harness.group, 0), group=harness.group)
    harness.barrier()
    return int(reading)


def _max_bytes(planned: int, size: int) -> float:
    return planned * (1 + FRAMING) + FRAMING_BYTES * size


def judge_traffic(measured: ByRing, settings: VerifySettings) -> Check:
    name, case = "bytes sent are as expected", str(settings.counted)

    def judge() -> Check:
        by_ring = values_of(measured, "traffic")
        for size, ranks in by_ring.items():
            for same_call in zip(*ranks, strict=True):  # not causal, then causal
                problem = _problem(size, list(same_call))
                if problem:
                    return Check(name, "FAIL", *problem, case)
        largest = [rank[0] for rank in by_ring[max(by_ring)]]  # not causal
        first, results = largest[0], []
        if first.planned is not None:
            results.append(f"{sum(each.planned for each in largest):,} planned and sent")
        if first.interface is not None:
            results.append(f"{first.interface:,} on the interface")
        result = f"ring of {max(by_ring)}: " + (", ".join(results) or "not counted")
        if first.planned is not None:
            reason = f"equal to the plan, byte for byte; {first.why_blind or 'the interface agrees'}"
            return Check(name, "pass", result, reason, case)
        if first.why_blind:
            return Check(name, "not measured", result, first.why_blind, case)
        return Check(name, "pass", result, "at least the K and V rows that the ranks need from each other", case)

    return judge_if_measured(measured, "traffic", name, case, judge)


def _problem(size: int, ranks: list[TrafficMeasurement]) -> tuple[str, str] | None:
    for rank, each in enumerate(ranks):
        if each.planned != each.counted:
            result = f"planned {each.planned:,}, sent {each.counted:,}"
            return result, f"rank {rank} of {size} did not send the planned number of bytes"
    seen, needed = ranks[0].interface, ranks[0].needed
    if seen is None:
        return None
    if seen < needed:
        result = f"{seen:,} on the interface, {needed:,} needed"
        return result, f"the ring of {size} sent less than its ranks need from each other"
    if ranks[0].planned is not None:
        planned = sum(each.planned or 0 for each in ranks)
        if not planned <= seen <= _max_bytes(planned, size):
            result = f"planned {planned:,}, {seen:,} on the interface"
            return result, f"on the ring of {size} the interface did not see the planned number of bytes"
    return None
