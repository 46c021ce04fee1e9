"""A whole ring, from a few of its ranks: which ones to rehearse, each in a process of its own, and what follows.

A step of the ring ends when its slowest rank does. Ranks that were not rehearsed are judged by the plan: by how much
work they have, and how long a unit of work took on those that were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ringspan.planning import RingPlan
from ringspan.processes import run_local_ranks
from ringspan.rehearse.network import Network
from ringspan.rehearse.rank import Rehearsed, rehearse_rank


@dataclass(frozen=True)
class RehearsedRing:
    """Rehearsed ranks by the reason for which they were chosen, and the most work that the plan gives to any rank."""

    ranks: dict[str, Rehearsed]
    most_work: int

    @property
    def slowest(self) -> Rehearsed:
        return max(self.ranks.values(), key=lambda rank: rank.seconds)

    @property
    def step_seconds(self) -> float:
        """The ring's step, extrapolated: the slowest rehearsed rank, or the busiest by the plan at the slowest pace.

        Waiting is for links alone: ranks that are late, now one and now another, also wait for one another.
        """
        pace = max((rank.working / rank.work for rank in self.ranks.values() if rank.work), default=0.0)
        waiting = max(rank.waiting for rank in self.ranks.values())
        return max(self.slowest.seconds, pace * self.most_work + waiting)

    @property
    def peak_growth(self) -> int:
        return max(rank.peak_growth for rank in self.ranks.values())

    @property
    def bytes_as_planned(self) -> bool:
        return all(rank.bytes_as_planned for rank in self.ranks.values())


def ranks_worth_rehearsing(plan: RingPlan) -> dict[str, int]:
    """First, middle, last, and worst by the plan: the one with the most work; each rank once.

    >>> from ringspan.geometry import Documents, Full
    >>> from ringspan.layout import Layout
    >>> from ringspan.planning import Sizes
    >>> ring = RingPlan(Full(), Documents((4096,)), Layout("contiguous", 4096, 8), True, "relay", Sizes())
    >>> ranks_worth_rehearsing(ring)
    {'first': 0, 'middle': 4, 'last, worst': 7}
    """
    size = plan.layout.ring_size
    worst = max(plan.sample, key=plan.work)
    reasons: dict[int, list[str]] = {}
    for reason, rank in (("first", 0), ("middle", size // 2), ("last", size - 1), ("worst", worst)):
        reasons.setdefault(rank, []).append(reason)
    return {", ".join(names): rank for rank, names in reasons.items()}


def rehearse_ring(
    plan: RingPlan,
    ranks: dict[str, int],
    network: Network,
    dtype: torch.dtype,
    *,
    backward: bool,
    threads: int,
    timeout_seconds: float,
    on_rank: Callable[[str, Rehearsed], None] | None = None,
) -> RehearsedRing:
    """Rehearse some ranks, one after the other, each in a fresh process with so many threads."""
    found: dict[str, Rehearsed] = {}
    for reason, rank in ranks.items():
        (found[reason],) = run_local_ranks(
            1, _task, plan, rank, network, dtype, backward, threads=threads, timeout_seconds=timeout_seconds
        )
        if on_rank is not None:
            on_rank(reason, found[reason])
    return RehearsedRing(found, max(plan.work(rank) for rank in plan.sample))


def _task(plan: RingPlan, rank: int, network: Network, dtype: torch.dtype, backward: bool) -> Rehearsed:
    return rehearse_rank(plan, rank, network, dtype, backward=backward)
