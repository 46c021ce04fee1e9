"""Transport of parcels between ranks: one asynchronous batch of sends and receives per hop, and its counters.

Uses tensors and process groups, but no plans, kernels or softmax.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from ringspan.ring.recorder import Recorder

Messages = Sequence[tuple[int, Tensor]]  # (peer, contiguous buffer)


class RingError(RuntimeError):
    """The ring cannot be created, the ranks disagree, or a peer was lost."""


class PendingWork(Protocol):
    """Buffers in transfer. Until `wait` returns, do not change sent buffers or read received ones."""

    def wait(self) -> None:
        """Return when everything has been sent and received."""


class Transport(Protocol):
    """One rank's access to its ring."""

    @property
    def counters(self) -> Counters:
        """What this rank has sent and received, and how long it waited."""

    def send_receive(self, sends: Messages, receives: Messages, label: str) -> PendingWork:
        """Start sending and receiving buffers. Both peers must list their messages in the same order."""


@dataclass(frozen=True)
class Wait:
    """What a rank is blocked on: the label of the transfer, its peers, and since when (`time.perf_counter`)."""

    label: str
    peers: tuple[int, ...]
    since: float


@dataclass
class Counters:
    """What a rank sent and received, how long it waited, and how much memory it held.

    ``waiting_seconds`` is time of the host, which on NCCL hardly waits: there, use a profiler.

    ``peak_parcel_bytes`` is the peak of parcel buffers. ``peak_bytes`` also counts the rank's rows of every tensor, the
    accumulators, and the results of kernel calls, each for as long as a call holds it.
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
    posted: str = ""  # the label of the latest transfer: it is pending, or has just completed
    wait: Wait | None = None  # what the rank is blocked on at this moment; None while it computes
    recorder: Recorder | None = field(default=None, repr=False)  # while the rank is traced

    def count(self, sends: Messages, receives: Messages) -> None:
        self.messages_sent += len(sends)
        self.messages_received += len(receives)
        self.bytes_sent += sum(buffer.nbytes for _, buffer in sends)
        self.bytes_received += sum(buffer.nbytes for _, buffer in receives)

    def hold_parcel(self, buffer_bytes: int) -> None:
        """Count a parcel buffer as allocated or, if negative, as freed."""
        self.live_parcel_bytes += buffer_bytes
        self.peak_parcel_bytes = max(self.peak_parcel_bytes, self.live_parcel_bytes)
        self.hold_bytes(buffer_bytes)
        if self.recorder is not None:
            self.recorder.hold(self.live_parcel_bytes)

    def hold(self, *tensors: Tensor | None) -> int:
        """Count tensors as live. Returns their bytes: pass the negative to `hold_bytes` when they are freed."""
        size = sum(x.nbytes for x in tensors if x is not None)
        self.hold_bytes(size)
        return size

    @contextmanager
    def holding(self, *tensors: Tensor | None) -> Iterator[None]:
        """Count tensors as live inside the block."""
        size = self.hold(*tensors)
        try:
            yield
        finally:
            self.hold_bytes(-size)

    def hold_bytes(self, more: int) -> None:
        self.live_bytes += more
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def create_communicator(group: dist.ProcessGroup, device: torch.device) -> None:
    """The first use of a group: one all-reduce of a number.

    NCCL creates a group's communicator when the group is first used, and waits for all of its ranks. A hop may concern
    only some of them, and would hang.
    """
    try:
        dist.all_reduce(torch.zeros(1, dtype=torch.int32, device=device), group=group)
    except RuntimeError as error:
        raise RingError(f"the all-reduce before the first messages failed: a rank is gone or stuck: {error}") from error


@dataclass(frozen=True)
class GroupTransport:
    """Point-to-point messages over a process group. Errors name the lost peer.

    ``used`` holds the group once all of its ranks have used it together. Until then, the first `send_receive` of a
    rank, even an empty one, calls `create_communicator`.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    counters: Counters
    device: torch.device
    used: WeakSet[dist.ProcessGroup]
    hosts: tuple[str, ...] = ()  # of each rank, for errors; empty if they are not known

    def send_receive(self, sends: Messages, receives: Messages, label: str) -> GroupWork:
        if self.group not in self.used:
            create_communicator(self.group, self.device)
            self.used.add(self.group)
        self.counters.count(sends, receives)
        self.counters.posted = label
        # Receives first: gloo announces them on the connection that carries the data. If the announcement queued behind
        # a large message of this rank, the peer could not send before that has arrived: half of a link's bandwidth.
        operations = [
            dist.P2POp(operation, buffer, dist.get_global_rank(self.group, peer), self.group)
            for operation, messages in ((dist.irecv, receives), (dist.isend, sends))
            for peer, buffer in messages
        ]
        peers = [("receiving from", peer) for peer, _ in receives] + [("sending to", peer) for peer, _ in sends]
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:  # a connection that is already closed
            raise self.lost_peer(label, peers, error) from error
        return GroupWork(self, works, peers, label)

    def lost_peer(self, label: str, peers: list[tuple[str, int]], error: RuntimeError) -> RingError:
        on_host = [f" on {host}" for host in self.hosts] or [""] * self.size
        failed = ", ".join(f"{what} rank {peer}{on_host[peer]}" for what, peer in peers)
        return RingError(
            f"rank {self.rank} of {self.size}{on_host[self.rank]}: {label}: {failed} failed: that rank exited, did not "
            f"answer within the group's timeout, or waits for a rank that did not ({error})"
        )


@dataclass(frozen=True)
class GroupWork:
    """A hop's messages over a process group.

    Callers keep the buffers referenced and unchanged until `wait`. With NCCL, `wait` orders the current stream after
    the transfer and returns; what later reuses their memory is queued on that stream (docs/nccl.md).
    """

    transport: GroupTransport
    works: list[dist.Work]
    peers: list[tuple[str, int]]
    label: str

    def wait(self) -> None:
        counters, start = self.transport.counters, time.perf_counter()
        counters.wait = Wait(self.label, tuple(dict.fromkeys(peer for _, peer in self.peers)), start)
        try:
            for i, work in enumerate(self.works):
                self._wait_for(work, i)
        finally:
            counters.wait = None
            counters.waiting_seconds += time.perf_counter() - start

    def _wait_for(self, work: dist.Work, i: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            # NCCL returns one work for a whole batch: then any of these peers may be the lost one.
            peers = self.peers if len(self.works) < len(self.peers) else [self.peers[i]]
            raise self.transport.lost_peer(self.label, peers, error) from error
