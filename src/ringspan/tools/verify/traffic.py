"""Traffic: the bytes that ranks send, by the plan, by ringspan's counters, and by the TCP sockets of the ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ringspan.planning import RingPlan
from ringspan.planning.api import plan
from ringspan.tools.measure import tcp_bytes_sent, why_tcp_is_blind
from ringspan.tools.verify.check import ByRing, Check, Harness, judge_if_measured, values_of
from ringspan.tools.verify.workload import VerifySettings

FRAMING = 0.001  # headers of messages, as a share of the payload
FRAMING_BYTES = 2**14  # per rank, for the barriers around the measurement


@dataclass(frozen=True)
class TrafficMeasurement:
    """Bytes that this rank sent: by the plan, by its counters, and by the kernel's counters of its TCP sockets."""

    causal: bool
    planned: int | None  # None for other implementations, which have no plan
    counted: int | None
    needed: int  # bytes of K and V rows that all ranks together must receive; a lower bound if not causal
    tcp: int | None
    why_blind: str  # why the TCP sockets do not see the traffic


def measure_traffic(harness: Harness) -> list[TrafficMeasurement]:
    case, ring = harness.settings.counted, harness.bound.ring
    rows = harness.own_rows(case)
    why_blind = why_tcp_is_blind(harness.group)
    measured = []
    for causal in (False, True):
        expected = harness.expect(case, causal, backward=False)
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
        ring.reset_counters()
        harness.barrier()
        before = 0 if why_blind else tcp_bytes_sent()
        found = harness.call(rows, case, causal, backward=False)
        harness.barrier()  # all ranks have received what this one sent
        tcp = None if why_blind else tcp_bytes_sent() - before
        harness.compare(expected, found)
        is_ringspan = harness.bound.implementation.is_ringspan
        planned = ring_plan.bytes_sent(ring.rank) if is_ringspan else None
        counted = ring.counters.bytes_sent if is_ringspan else None
        needed = 0 if causal or is_ringspan else _needed_bytes(ring_plan)
        measured.append(TrafficMeasurement(causal, planned, counted, needed, tcp, why_blind))
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
        if first.tcp is not None:
            results.append(f"{sum(each.tcp for each in largest):,} over TCP")
        result = f"ring of {max(by_ring)}: " + (", ".join(results) or "not counted")
        if first.planned is not None:
            reason = f"equal to the plan, byte for byte; {first.why_blind or 'the TCP sockets of each rank agree'}"
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
        if each.planned is not None and each.tcp is not None:
            limit = each.planned * (1 + FRAMING) + FRAMING_BYTES
            if not each.planned <= each.tcp <= limit:
                result = f"planned {each.planned:,}, {each.tcp:,} over TCP"
                return result, f"the TCP sockets of rank {rank} of {size} did not send the planned number of bytes"
    seen, needed = sum(each.tcp or 0 for each in ranks), ranks[0].needed
    if ranks[0].tcp is not None and seen < needed:
        result = f"{seen:,} over TCP, {needed:,} needed"
        return result, f"the ring of {size} sent less than its ranks need from each other"
    return None
