"""Traces of a ring: what each rank did, on one clock, in one file that Perfetto shows.

Ranks on several hosts have several clocks. Nobody leaves a barrier before everybody has entered it: each barrier bounds
the difference of two clocks from both sides, and a few barriers before and after the trace bound it closely.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.ring.recorder import Recorder
from ringspan.ring.transport import Counters, GroupTransport, RingError
from ringspan.runtime.collectives import all_gather_json
from ringspan.runtime.trace_file import lane_text, write_trace

if TYPE_CHECKING:
    from ringspan.ring.ring import Ring
    from ringspan.ring.simulated import SimulatedRing

_BARRIERS = 20
Barriers = list[tuple[int, int]]  # when a rank entered and left each, on its own clock


class Trace:
    """A trace that is being recorded."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self.recorders = recorders

    def phase(self, name: str, **details: str | int | float) -> None:
        """Begin a phase of the program, such as "forward"; it ends where the next one begins, or with the trace."""
        for recorder in self.recorders:
            recorder.phase(name, details)


@contextmanager
def trace_virtual_ranks(ring: SimulatedRing, path: Path) -> Iterator[Trace]:
    """Trace all ranks of a simulated ring."""
    start = Recorder().now()
    with _attached(ring.counters, lambda: ring.counters) as recorders:
        yield Trace(recorders)
    lanes = [recorder.lane(rank, ring.size, f"rank {rank} (simulated)") for rank, recorder in enumerate(recorders)]
    texts = (lane_text(lane.at(lambda time: time - start)) for lane in lanes)
    write_trace(path, texts, {"ring": repr(ring)})


@contextmanager
def trace_group(ring: Ring, path: Path, group: dist.ProcessGroup) -> Iterator[Trace]:
    """Trace all ranks of a group, which contains the ring of this rank. A collective on entry and on exit.

    After an exception nothing is written, and no collective is called: other ranks may be gone.
    """
    _agree_to_write(path, group)
    with _attached([ring.counters], lambda: [ring.counters]) as recorders:
        (recorder,) = recorders
        before = _pass_barriers(group, recorder.now)
        yield Trace(recorders)
        after = _pass_barriers(group, recorder.now)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    clock = Clock(before, after, _of_first_rank(before, group), _of_first_rank(after, group))
    name = f"rank {rank} ({socket.gethostname()})"
    lane = recorder.lane(rank, size, name, lambda peer: _rank_in(group, ring.group, peer))
    parts = _parts(lane_text(replace(lane.at(clock.time), note=clock.note)), group)
    if rank == 0:
        write_trace(path, parts, {"ring": repr(ring), "ranks": size})
    else:
        list(parts)


@contextmanager
def _attached(counters: Sequence[Counters], current: Callable[[], Sequence[Counters]]) -> Iterator[list[Recorder]]:
    """Give each counter a recorder, which `reset_counters` passes on; inside the block, ranks are traced."""
    if any(each.recorder is not None for each in counters):
        raise RingError("the ring is being traced already: traces of one ring cannot be nested")
    for each in counters:
        each.recorder = Recorder()
    try:
        yield [each.recorder for each in counters if each.recorder is not None]
    finally:
        for each in current():
            each.recorder = None


class Clock:
    """A rank's clock as seen by rank 0, from the barriers that both passed before and after a trace.

    Rank 0 left a barrier after this rank had entered it, and the other way round. If all bounds allow that both clocks
    are the same, they are, as on one host. Otherwise the difference is the middle of its bounds, and between the two
    ends of the trace it changes linearly. ``error`` is how wrong it can be at the ends, in nanoseconds.
    """

    def __init__(self, before: Barriers, after: Barriers, first_before: Barriers, first_after: Barriers) -> None:
        bounds = [_bounds(before, first_before), _bounds(after, first_after)]
        self.is_shared = all(low <= 0 <= high for low, high in bounds)
        self.differences = [0 if self.is_shared else (low + high) // 2 for low, high in bounds]
        self.error = max((high - low) / 2 for low, high in bounds)
        self._start, self._seconds = before[-1][1], max(1, after[0][0] - before[-1][1])
        self._zero = first_before[-1][0]

    def time(self, time: int) -> int:
        """A time of this rank's clock as the time of rank 0's since the trace began."""
        start, end = self.differences
        return time - start - (end - start) * (time - self._start) // self._seconds - self._zero

    @property
    def note(self) -> str:
        return "clock of rank 0" if self.is_shared else f"clock within {self.error / 1000:.0f} µs of rank 0's"


def _bounds(own: Barriers, first: Barriers) -> tuple[int, int]:
    """The least and the largest difference of a clock to that of the first rank that these barriers allow."""
    pairs = list(zip(own, first, strict=True))
    low = max(entered - first_left for (entered, _), (_, first_left) in pairs)
    high = min(left - first_entered for (_, left), (first_entered, _) in pairs)
    return low, high


def _pass_barriers(group: dist.ProcessGroup, now: Callable[[], int]) -> Barriers:
    found = []
    for _ in range(_BARRIERS):
        entered = now()
        dist.barrier(group)
        found.append((entered, now()))
    return found


def _of_first_rank(own: Barriers, group: dist.ProcessGroup) -> Barriers:
    """The barriers of the first rank of the group. A collective."""
    times = torch.tensor(own, dtype=torch.int64, device=_device(group))
    dist.broadcast(times, dist.get_global_rank(group, 0), group)
    return [(entered, left) for entered, left in times.tolist()]


def _parts(text: str, group: dist.ProcessGroup) -> Iterator[str]:
    """On rank 0, the texts of all ranks, one at a time; other ranks send theirs and get nothing. A collective."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    device = _device(group)
    transport = GroupTransport(group, rank, size, Counters(), device, WeakSet([group]))  # used: for barriers

    def move(peer: int, buffer: Tensor) -> Tensor:
        message = [(peer, buffer)]
        transport.send_receive(*((message, []) if rank else ([], message)), "the events of a trace").wait()
        return buffer

    if rank:
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
        move(0, torch.tensor([content.numel()], device=device))
        move(0, content)
        return
    yield text
    for peer in range(1, size):
        length = int(move(peer, torch.empty(1, dtype=torch.int64, device=device)))
        received = bytearray(length)
        torch.frombuffer(received, dtype=torch.uint8).copy_(
            move(peer, torch.empty(length, dtype=torch.uint8, device=device))
        )
        yield received.decode()


def _agree_to_write(path: Path, group: dist.ProcessGroup) -> None:
    """Raise on all ranks if rank 0 cannot write the file."""
    problem = ""
    if dist.get_rank(group) == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() or not os.access(path.parent, os.W_OK):
                problem = "it is a folder" if path.is_dir() else "permission denied"
        except OSError as error:
            problem = error.strerror or type(error).__name__
    (problem, *_) = all_gather_json(problem, group=group, device=_device(group))
    if problem:
        raise RingError(f"{path}: rank 0 cannot write the trace there ({problem}): name a file that it can write")


def _rank_in(group: dist.ProcessGroup, ring: dist.ProcessGroup, rank: int) -> int:
    """The number in ``group`` of a rank of the ring."""
    return dist.get_group_rank(group, dist.get_global_rank(ring, rank))


def _device(group: dist.ProcessGroup) -> torch.device:
    is_nccl = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
