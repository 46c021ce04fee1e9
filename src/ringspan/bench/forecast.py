"""What a case will need, before it is run: ringspan's memory from its plan, everybody else's from shorter lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import ringspan as rs
from ringspan.bench.cases import Case
from ringspan.bench.implementations import IMPLEMENTATIONS
from ringspan.bench.trials import Limits
from ringspan.geometry import Full
from ringspan.planning import RingPlan

# Beside what the plan counts, a rank needs its workspace, and what libraries and allocators keep.
OVERHEAD_BYTES = 64 * 2**20
_SURELY_TOO_SLOW = 1.5  # a case is not tried if it is expected to take this many times its limit

Seen = Mapping[int, float]  # by length: what shorter cases of the same ladder took


def is_planned(case: Case) -> bool:
    """Whether a plan says beforehand what the case needs."""
    return case.implementation in ("ringspan", "simulated")


def plan_of(case: Case) -> RingPlan:
    """ringspan's plan of a case."""
    return rs.plan(
        case.pattern,
        case.tokens,
        ring_size=case.ranks,
        layout=case.layout,
        causal=case.causal,
        heads=case.heads,
        dim=case.dim,
        dtype=case.torch_dtype,
    )


def planned_bytes(case: Case) -> list[int]:
    """Bytes of each rank as ringspan's plan has them: rows of every tensor, and parcels at their peak."""
    plan = plan_of(case)
    return [plan.memory(rank, backward=case.backward).total for rank in range(case.ranks)]


def predicted_bytes(case: Case, seen: Seen) -> int:
    """Bytes of all ranks together; ``seen`` are those of shorter lengths.

    Another implementation is taken to grow as it did between its last two lengths, or by the square if there is but
    one; before the first, all that is known are the rows of its tensors.
    """
    if case.implementation == "ringspan":
        return sum(planned_bytes(case)) + case.ranks * OVERHEAD_BYTES
    if case.implementation == "simulated":
        return 2 * sum(planned_bytes(case)) + OVERHEAD_BYTES  # whole tensors, and each rank's rows of them
    alone = rs.plan(Full(), case.tokens, heads=case.heads, dim=case.dim, dtype=case.torch_dtype)
    rows = alone.memory(0, backward=case.backward).rows
    return max(rows, int(extrapolate(seen, case.tokens))) if seen else rows


def expected_seconds(case: Case, seen: Seen) -> float:
    """Seconds of forward and backward, if two shorter lengths have been measured; otherwise 0: nobody knows."""
    return extrapolate(seen, case.tokens) if len(seen) > 1 else 0.0


def extrapolate(seen: Seen, tokens: int) -> float:
    """On with the power of the length by which the last two lengths grew, between 1 and 2; 2 if there is but one.

    >>> extrapolate({1024: 10.0, 2048: 40.0}, 4096)
    160.0
    >>> extrapolate({1024: 10.0, 2048: 20.0}, 8192)
    80.0
    """
    *before, last = sorted(seen)
    power = 2.0
    if before and seen[before[-1]] > 0:
        power = math.log(seen[last] / seen[before[-1]]) / math.log(last / before[-1])
    return seen[last] * (tokens / last) ** min(2.0, max(1.0, power))


def refusal(case: Case, limits: Limits, bytes_seen: Seen, seconds_seen: Seen) -> str:
    """Why a case is not worth trying under these limits, or nothing."""
    needed = predicted_bytes(case, bytes_seen)
    if needed > limits.memory_bytes:
        how = "planned" if is_planned(case) else "expected"
        return f"{how} to need {needed / 2**20:,.0f} MiB; {limits.memory_bytes / 2**20:,.0f} MiB are allowed"
    seconds = expected_seconds(case, seconds_seen)
    if seconds > _SURELY_TOO_SLOW * limits.seconds:
        return f"expected to take about {seconds:.0f} s; {limits.seconds:.0f} s are allowed"
    return ""


@dataclass(frozen=True)
class Forecast:
    """What is known of a case before anything has run. ``exact``: from a plan, and not just a lower bound."""

    case: Case
    memory_bytes: int
    exact: bool
    obstacle: str

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "case": self.case.as_json()}


def foretell(case: Case, limits: Limits) -> Forecast:
    obstacle = IMPLEMENTATIONS[case.implementation].missing() or refusal(case, limits, {}, {})
    return Forecast(case, predicted_bytes(case, {}), is_planned(case), obstacle)
