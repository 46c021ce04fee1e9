"""The network of a rehearsal: nothing is sent, so how long parcels would have travelled is computed.

Work is measured by the clock; waiting is what a rank would have waited at given bandwidths, with the work as it was
measured. The two are kept apart, and reports say which is which.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ringspan.planning.shared import node_of


@dataclass(frozen=True, slots=True)
class Network:
    """What a rank's links carry each way (bytes/s), and what a hop costs, however small (seconds).

    With ``ranks_per_node``, ``bandwidth`` is that inside a node, and ``bandwidth_across`` that of a rank's share of the
    links between nodes; with 0, all links are alike.
    """

    bandwidth: float
    latency: float = 20e-6
    ranks_per_node: int = 0
    bandwidth_across: float = 0.0

    def __post_init__(self) -> None:
        wanted = ["bandwidth", "bandwidth_across"] if self.ranks_per_node else ["bandwidth"]
        for name in wanted:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: a rate is more than 0, and finite")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency={self.latency}: must be at least 0 seconds, and finite")

    def is_across(self, rank: int, peer: int) -> bool:
        """Whether a message between two ranks leaves its node."""
        return bool(self.ranks_per_node) and node_of(rank, self.ranks_per_node) != node_of(peer, self.ranks_per_node)

    def seconds(self, size: int, across: bool) -> float:
        """How long so many bytes take over one link, alone."""
        return self.latency + size / (self.bandwidth_across if across else self.bandwidth)


class Clock:
    """Time as the rank would have seen it: measured while it works, computed while it waits.

    Each link carries one flight after the other.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._free_at = {False: 0.0, True: 0.0}  # by whether the link leaves the node
        self.working = self.waiting = 0.0
        self._since = time.perf_counter()

    @property
    def now(self) -> float:
        return self.working + self.waiting

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens in this block would not have happened on a real ring: it takes no time."""
        self.working += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()

    def arrival(self, sizes: dict[bool, int]) -> float:
        """When a flight that is posted now will be over: so many bytes on each kind of link, the busier way."""
        over = self.now
        for across, size in sizes.items():
            if size:
                start = max(self.now, self._free_at[across])
                self._free_at[across] = start + self._network.seconds(size, across)
                over = max(over, self._free_at[across])
        return over

    def wait_until(self, arrival: float) -> float:
        """Wait, without waiting; for how long it would have been."""
        missing = max(0.0, arrival - self.now)
        self.waiting += missing
        return missing
