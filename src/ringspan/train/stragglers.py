"""Who keeps the others waiting: from heartbeats while a step goes on, and from waiting times when it is done."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import get_args

from ringspan.train.heartbeats import Beat, Doing

SILENT = 10.0  # seconds without a heartbeat
LONG = 5.0  # seconds that a rank is waited for
LATE = 0.2  # of a step: what the others waited longer than the rank they waited for

_ORDER = get_args(Doing)


@dataclass(frozen=True)
class Straggler:
    """A rank that keeps the others waiting, where it stands, and how that is known."""

    rank: int
    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


def stragglers(beats: list[Beat]) -> list[Straggler]:
    """Ranks that give no sign of life; that others wait for while they wait for nobody; that are a phase behind.

    >>> stuck = Beat(1, "node", 7, 3, "forward", 20.0, "parcels of hop 1", (), 0.0, 0.0, 0)
    >>> waits = Beat(0, "node", 6, 3, "forward", 20.0, "parcels of hop 2", (1,), 19.0, 19.0, 0)
    >>> [str(found) for found in stragglers([waits, stuck])]
    ['rank 1 (node, process 7): step 3, forward, parcels of hop 1: rank 0 has waited for it for 19 s']
    """
    by_rank = {beat.rank: beat for beat in beats}
    found: dict[int, str] = {}
    for beat in beats:
        if beat.silent_seconds > SILENT:
            found[beat.rank] = f"no heartbeat for {beat.silent_seconds:.0f} s"
    for beat in beats:
        for peer in beat.waits_for:
            waited_for = by_rank.get(peer)
            if beat.waits_seconds > LONG and waited_for is not None and not waited_for.waits_for:
                found.setdefault(peer, f"rank {beat.rank} has waited for it for {beat.waits_seconds:.0f} s")
    front = max(map(_place, beats), default=(0, 0))
    for beat in beats:
        if _place(beat) < front and beat.doing_seconds > LONG and not beat.waits_for:
            found.setdefault(beat.rank, f"it has been at that for {beat.doing_seconds:.0f} s, and others are further")
    return [Straggler(rank, str(by_rank[rank]), why) for rank, why in sorted(found.items())]


def late_rank(waits: list[float], ring_size: int, seconds: float) -> int | None:
    """The rank that the others of its ring waited for in a step; None where they hardly waited.

    In a ring everybody is as fast as the slowest, and who waits least is the one that is waited for.

    >>> late_rank([0.1, 0.1, 2.1, 0.0], ring_size=2, seconds=4.0)
    3
    """
    gaps = []
    for first in range(0, len(waits), ring_size):
        ring = waits[first : first + ring_size]
        least = min(range(len(ring)), key=ring.__getitem__)
        others = [wait for rank, wait in enumerate(ring) if rank != least]
        gaps.append((statistics.median(others) - ring[least] if others else 0.0, first + least))
    gap, rank = max(gaps)
    return rank if gap > LATE * seconds else None


def _place(beat: Beat) -> tuple[int, int]:
    return beat.step, _ORDER.index(beat.doing) if beat.doing in _ORDER else 0
