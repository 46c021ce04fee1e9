"""Heartbeats: where each rank stands, once a second, in a small file of its own that anybody can read.

After a crash the files are still there, and tell what every rank was doing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from ringspan.described import check_kinds
from ringspan.train.files import write_whole

if TYPE_CHECKING:
    from ringspan.train.mesh import Crew

FOLDER = "heartbeats"
Doing = Literal["starting", "loading", "reading", "forward", "backward", "updating", "saving"]


@dataclass
class Pulse:
    """What this rank is doing; the training loop says so, and the heartbeat's thread reads it."""

    step: int = 0
    doing: Doing = "starting"
    since: float = field(default_factory=time.perf_counter)

    def at(self, step: int, doing: Doing) -> None:
        self.step, self.doing, self.since = step, doing, time.perf_counter()


@dataclass(frozen=True)
class Beat:
    """Where a rank stood when it last gave a sign. ``step`` counts from 1, as progress bars do."""

    rank: int
    host: str
    pid: int
    step: int
    doing: str
    doing_seconds: float  # for how long it has been doing that
    hop: str  # the latest post of its ring
    waits_for: tuple[int, ...]  # ranks whose parcels it waits for at this moment
    waits_seconds: float  # for how long, at this moment
    waiting_seconds: float  # in this step so far
    memory_bytes: int  # its peak
    silent_seconds: float = 0.0  # since it gave this sign, for whoever reads it

    def __str__(self) -> str:
        hop = f", {self.hop}" if self.hop else ""
        return f"rank {self.rank} ({self.host}, process {self.pid}): step {self.step}, {self.doing}{hop}"


def feel(pulse: Pulse, crew: Crew) -> Beat:
    """This rank's beat, as of now."""
    now, counters = time.perf_counter(), crew.ring.counters
    wait = counters.wait
    waited = 0.0 if wait is None else now - wait.since
    return Beat(
        rank=crew.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        step=pulse.step + 1,
        doing=pulse.doing,
        doing_seconds=now - pulse.since,
        hop=counters.posted,
        waits_for=() if wait is None else tuple(dist.get_global_rank(crew.ring.group, peer) for peer in wait.peers),
        waits_seconds=waited,
        waiting_seconds=counters.waiting_seconds + waited,
        memory_bytes=crew.device.peak_bytes(),
    )


def write_beat(folder: Path, beat: Beat) -> None:
    """Put a beat where all ranks can see it."""
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / f"rank-{beat.rank:05d}.json", json.dumps(dataclasses.asdict(beat)) + "\n", synced=False)


def read_beats(folder: Path, ranks: int, not_before: float = 0.0) -> list[Beat]:
    """The last beat of each rank, in order of rank; those older than ``not_before`` are of another run.

    Ages are by the clock of the file system: rank 0's own beat, which it has just written, is now.
    """
    found: dict[int, tuple[float, Beat]] = {}
    for rank in range(ranks):
        path = folder / FOLDER / f"rank-{rank:05d}.json"
        try:
            values = json.loads(path.read_bytes())
            when = path.stat().st_mtime
            beat = Beat(**{**values, "waits_for": tuple(values["waits_for"])})
            check_kinds(beat)
        except (OSError, KeyError, TypeError, ValueError, RecursionError):
            continue  # not written yet, just being replaced, or not a beat
        if when >= not_before:
            found[rank] = when, beat
    now = max((when for when, _ in found.values()), default=0.0)
    return [dataclasses.replace(beat, silent_seconds=now - when) for when, beat in found.values()]


def last_written(folder: Path, rank: int) -> float:
    """When a rank's beat was written, by the clock of the file system."""
    return (folder / FOLDER / f"rank-{rank:05d}.json").stat().st_mtime
