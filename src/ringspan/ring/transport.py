"""The one error of rings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class RingError(RuntimeError):
    """A ring that cannot be had, ranks that disagree, or a peer that is gone. Nothing falls back in silence."""


Letters = Sequence[tuple[int, Tensor]]  # (peer, contiguous buffer)


class Flight(Protocol):
    """Buffers on their way: until it is over, what is sent must not change and what arrives must not be read."""

    def wait(self) -> None:
        """Return when everything has arrived and gone."""


class Mail(Protocol):
    """One rank's access to its ring."""

    @property
    def counters(self) -> Counters:
        """What this rank has sent, received and waited for."""

    def post(self, sends: Letters, receives: Letters, label: str) -> Flight:
        """Send and await buffers; the peer's post lists the same letters in the same order."""


@dataclass(frozen=True)
class Wait:
    """A rank that cannot go on: the post it waits for, the peers in it, and since when (`time.perf_counter`)."""

    label: str
    peers: tuple[int, ...]
    since: float


@dataclass
class Counters:
    """What really went over the wire, and what it cost: so that a user can see that the ring is real.

    ``peak_parcel_bytes`` is the most memory that buffers of parcels took at a time; ``peak_bytes`` adds the rank's rows
    of every tensor, the accumulators, and the results of kernel calls, for as long as a walk held each of them.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    waiting_seconds: float = 0.0
    live_parcel_bytes: int = 0
    peak_parcel_bytes: int = 0
    live_bytes: int = 0
    peak_bytes: int = 0
    posted: str = ""  # the latest post: its parcels are in flight, or have just arrived
    wait: Wait | None = None  # what the rank waits for at this moment; None while it works

    def count(self, sends: Letters, receives: Letters) -> None:
        self.messages_sent += len(sends)
        self.messages_received += len(receives)
        self.bytes_sent += sum(buffer.nbytes for _, buffer in sends)
        self.bytes_received += sum(buffer.nbytes for _, buffer in receives)

    def hold_parcel(self, buffer_bytes: int) -> None:
        """A buffer for parcels was made or, if negative, let go."""
        self.live_parcel_bytes += buffer_bytes
        self.peak_parcel_bytes = max(self.peak_parcel_bytes, self.live_parcel_bytes)
        self._hold(buffer_bytes)

    @contextmanager
    def holding(self, *tensors: Tensor | None) -> Iterator[None]:
        """Count tensors for as long as the block lasts."""
        size = sum(x.nbytes for x in tensors if x is not None)
        self._hold(size)
        try:
            yield
        finally:
            self._hold(-size)

    def _hold(self, more: int) -> None:
        self.live_bytes += more
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
