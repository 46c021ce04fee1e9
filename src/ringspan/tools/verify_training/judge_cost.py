"""Work and memory of one long step: shared by the ranks, balanced, and falling with the ring."""

from __future__ import annotations

from ringspan.tools.verify.check import Check
from ringspan.tools.verify.memory import fit
from ringspan.tools.verify_training.compare import Cost
from ringspan.tools.verify_training.findings import BALANCE, DUPLICATES, MEMORY, Found

_MAX_WORK = 1.5  # times the FLOPs of one process, over all ranks
_MAX_IMBALANCE = 1.1  # of the busiest rank, over that of contiguous shards of causal attention
_MAX_CONSTANT_SHARE = 0.75  # of the memory of one process, without gradients, that may stay as the ring grows
_WORKSPACE_BYTES = 16 * 2**20  # of libraries and allocators


def _costs(found: Found) -> dict[int, list[Cost]]:
    costs = {size: [values["cost"] for values in ranks] for size, ranks in found.measured.items()}
    return {size: ranks for size, ranks in costs.items() if all(cost is not None for cost in ranks)}


def judge_duplicates(found: Found) -> Check:
    costs, case = _costs(found), f"{found.settings.long_tokens:,} tokens, {found.dtype}"
    if 1 not in costs or len(costs) < 2 or not costs[1][0].flops:
        return _not_counted(DUPLICATES, case)
    work = {size: sum(cost.flops for cost in ranks) / costs[1][0].flops for size, ranks in costs.items()}
    size = max(work)
    result = f"ring of {size}: {work[size]:.2f} x the FLOPs of one process"
    if work[size] > _MAX_WORK:
        return Check(DUPLICATES, "FAIL", result, "ranks compute the same rows: the sequence is not split", case)
    return Check(DUPLICATES, "pass", result, "ranks share the work of the sequence", case)


def judge_balance(found: Found) -> Check:
    costs, case = _costs(found), f"{found.settings.long_tokens:,} tokens, {found.dtype}"
    if len(costs) < 2 or not any(cost.flops for cost in costs[max(costs)]):
        return _not_counted(BALANCE, case)
    size = max(costs)
    flops = [cost.flops for cost in costs[size]]
    busiest = max(flops) * size / sum(flops)
    result = f"ring of {size}: the busiest rank does {busiest:.2f} x the mean"
    if busiest > _MAX_IMBALANCE * (2 - 1 / size):
        shares = ", ".join(f"{count / sum(flops):.0%}" for count in flops)
        return Check(BALANCE, "FAIL", result, f"shares of the ranks: {shares}; all others wait for the busiest", case)
    return Check(BALANCE, "pass", result, "no rank waits long for another", case, essential=False)


def _not_counted(name: str, case: str) -> Check:
    reason = "the adapter refused the long step, or torch's profiler does not see its operators"
    return Check(name, "not measured", "", reason, case, essential=False)


def judge_memory(found: Found) -> Check:
    costs, case = _costs(found), f"{found.settings.long_tokens:,} tokens, {found.dtype}"
    if len(costs) < 2:
        return _not_counted(MEMORY, case)
    peaks = {size: max(cost.peak_bytes for cost in ranks) for size, ranks in costs.items()}
    constant, falling = fit(peaks)
    result = f"{constant / 2**20:.1f} + {falling / 2**20:.1f} / k MiB"
    weights = 3 * costs[1][0].gradient_bytes if 1 in costs else 0  # gradients, and copies while they are reduced
    if constant - weights - _WORKSPACE_BYTES > _MAX_CONSTANT_SHARE * (constant + falling - weights):
        reason = "most of the memory of a step does not fall with the ring: every rank holds the whole sequence"
        return Check(MEMORY, "FAIL", result, reason, case)
    sizes = ", ".join(map(str, peaks))
    return Check(MEMORY, "pass", result, f"fitted to the peak of a rank on rings of {sizes}", case, essential=False)
