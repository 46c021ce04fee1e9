"""The mail of a rehearsal: sends go nowhere, and what is awaited is there at once, filled with stand-in rows.

Buffers, bytes and messages are those of a real ring; only the contents are not. Filling them takes no time of the
clock, since on a real ring the network does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringspan.rehearse.network import Clock, Network
from ringspan.ring.mail import Counters, Letters

_POOL_NUMBERS = 2**14  # few, since they count as memory of the rank


class StandInMail:
    """One rank's access to a ring that is not there."""

    def __init__(self, rank: int, network: Network, device: torch.device, synchronize: Callable[[], None]) -> None:
        self.rank, self.network, self.counters, self.synchronize = rank, network, Counters(), synchronize
        self._pool = torch.randn(_POOL_NUMBERS, generator=torch.Generator().manual_seed(0)).to(device)
        self.clock = Clock(network)

    def post(self, sends: Letters, receives: Letters, label: str) -> StandInFlight:
        self.synchronize()
        with self.clock.aside():
            self.counters.count(sends, receives)
            sizes = {across: max(self._bytes(way, across) for way in (sends, receives)) for across in (False, True)}
            for _, buffer in receives:
                self._fill(buffer)
            self.synchronize()
            return StandInFlight(self, self.clock.arrival(sizes))

    def _bytes(self, letters: Letters, across: bool) -> int:
        return sum(x.nbytes for peer, x in letters if self.network.is_across(self.rank, peer) == across)

    def _fill(self, buffer: Tensor) -> None:
        numbers = buffer.view(-1)
        for start in range(0, len(numbers), _POOL_NUMBERS):
            some = numbers[start : start + _POOL_NUMBERS]
            some.copy_(self._pool[: len(some)])


@dataclass(frozen=True)
class StandInFlight:
    mail: StandInMail
    arrival: float

    def wait(self) -> None:
        self.mail.synchronize()
        with self.mail.clock.aside():
            self.mail.counters.waiting_seconds += self.mail.clock.wait_until(self.arrival)
