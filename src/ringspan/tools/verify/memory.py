"""Memory: the peak of a rank must fall as the ring grows."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from ringspan.tools.verify.check import ByRing, Check, Harness, judge_if_measured, values_of
from ringspan.tools.verify.workload import VerifyCase, VerifySettings

MAX_WORKSPACE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class MemoryMeasurement:
    """Peak memory growth of forward and backward, including this rank's rows."""

    peak_bytes: int


def measure_memory(harness: Harness) -> MemoryMeasurement | None:
    """Runs first, while the process is fresh. None on a ring size whose memory is not judged."""
    settings = harness.settings
    case, small, causal = settings.memory, settings.warm_up, settings.memory_causal
    if harness.bound.ring.size not in settings.memory_rings:
        return None
    # The warm-up creates threads, libraries and connections, whose memory does not depend on the sequence.
    warm = harness.call(harness.own_rows(small), small, True, backward=True)
    harness.barrier()
    results, peak = harness.device.peak_growth(
        lambda: harness.call(harness.own_rows(case), case, causal, backward=True)
    )
    harness.barrier()
    harness.compare(harness.expect(small, True, backward=True), warm)
    harness.compare(harness.expect(case, causal, backward=True), results)
    return MemoryMeasurement(peak)


def peaks(measured: ByRing) -> dict[int, int]:
    """Ring size -> the largest peak of its ranks."""
    by_ring = values_of(measured, "memory")
    return {size: max(each.peak_bytes for each in ranks) for size, ranks in by_ring.items() if ranks[0] is not None}


def fit(peak_bytes: dict[int, int]) -> tuple[float, float]:
    """Least-squares fit of the peaks by ring size k as a + b / k, in bytes."""
    slope, intercept = statistics.linear_regression([1 / size for size in peak_bytes], list(peak_bytes.values()))
    return intercept, slope


def max_constant_bytes(case: VerifyCase) -> int:
    """The most memory that may stay constant as the ring grows: a workspace, and one whole tensor.

    A rank that gathers K and V holds at least four whole tensors: K, V and their gradients.
    """
    number_bytes: int = getattr(torch, case.dtype).itemsize
    return MAX_WORKSPACE_BYTES + case.batch * case.tokens * case.heads * case.head_dim * number_bytes


def judge_memory(measured: ByRing, settings: VerifySettings) -> Check:
    name, case = "memory per rank falls as 1/k", str(settings.memory)

    def judge() -> Check:
        found, rings = peaks(measured), settings.memory_rings
        if len(found) < 2:
            needed = " and ".join(map(str, rings[:2])) if len(rings) > 1 else "two sizes"
            return Check(name, "not measured", "too few ring sizes", f"needs rings of {needed}", case)
        a, b = (x / 2**20 for x in fit(found))
        result = f"{a:.0f} + {b:.0f} / k MiB"
        limit = max_constant_bytes(settings.memory) / 2**20
        if a > limit:
            reason = f"{a:.0f} MiB stay constant as the ring grows, allowed {limit:.0f}: ranks hold more than a shard"
            return Check(name, "FAIL", result, reason, case)
        sizes = ", ".join(map(str, found))
        return Check(name, "pass", result, f"fitted to the peak of a rank on rings of k = {sizes}", case)

    return judge_if_measured(measured, "memory", name, case, judge)
