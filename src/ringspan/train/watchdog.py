"""Heartbeats: where each rank stands, once a second, in a small file of its own that anybody can read.

After a crash the files are still there, and tell what every rank was doing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

import torch.distributed as dist

from ringspan.runtime.files import write_atomic
from ringspan.runtime.settings import RunError, check_kinds
from ringspan.train.lock import RunLock

if TYPE_CHECKING:
    from ringspan.train.distributed import Crew
    from ringspan.train.trainer import Trainer


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
    write_atomic(place / f"rank-{beat.rank:05d}.json", json.dumps(dataclasses.asdict(beat)) + "\n", durable=False)


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


BEAT = 1.0  # seconds
ORPHANED = 3  # exit status of a worker whose launcher has died, or whose folder has been taken

Told = Callable[["list[Beat]", "list[Straggler]"], None]


class Guard:
    """Holds the lock of ``folder`` (rank 0 does) for as long as the block lasts.

    ``launcher`` is the process whose death ends this one; None if nobody launched it. While it is `following` a
    trainer, the rank's heartbeat is written, and rank 0 reads those of all.
    """

    def __init__(self, folder: Path, rank: int, launcher: int | None) -> None:
        self.folder, self.rank, self.launcher = folder, rank, launcher
        self.lock = RunLock(folder)
        self._is_locked = False
        self._trainer: Trainer | None = None
        self._tell: Told = lambda beats, late: None
        self._began = 0.0
        self._turn = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ringspan guard", daemon=True)

    def __enter__(self) -> Guard:
        if self.launcher is not None and not _may_launch(self.launcher):
            self._end("the launcher is gone")
        self._thread.start()
        if self.rank == 0:
            self._take_lock()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._end_if_orphaned()  # a peer that stopped first is not the cause: say what is
        self._over.set()
        self._thread.join()
        self.lock.release()

    def _take_lock(self) -> None:
        try:
            self.lock.take()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self._is_locked = True

    @contextmanager
    def following(self, trainer: Trainer, tell: Told) -> Iterator[None]:
        """Write this rank's heartbeat; rank 0 is told, at every beat, of all beats and who keeps others waiting."""

        with self._turn:
            write_beat(self.folder, feel(trainer.pulse, trainer.crew))
            self._began, self._tell, self._trainer = last_written(self.folder, self.rank), tell, trainer
        try:
            yield
        finally:
            with self._turn:
                self._trainer = None

    def _watch(self) -> None:
        while not self._over.wait(BEAT):
            self._end_if_orphaned()
            try:
                if self._is_locked:
                    self.lock.beat()
                with self._turn:
                    if self._trainer is not None:
                        self._beat(self._trainer)
            except RunError as error:
                self._end(str(error))
            except OSError:
                continue  # a full disk, or a file server that hesitates: the training itself will say so if it lasts

    def _beat(self, trainer: Trainer) -> None:

        write_beat(self.folder, feel(trainer.pulse, trainer.crew))
        if self.rank == 0:
            beats = read_beats(self.folder, trainer.crew.world, self._began)
            self._tell(beats, stragglers(beats))

    def _end_if_orphaned(self) -> None:
        if self.launcher is not None and os.getppid() != self.launcher:
            self._end(f"the launcher (process {self.launcher}) is gone")

    def _end(self, why: str) -> NoReturn:
        """End the process, whatever its main thread waits for."""
        sys.stderr.write(f"rank {self.rank}: {why}: stopping. The last checkpoint is safe; go on with --resume auto.\n")
        sys.stderr.flush()
        os._exit(ORPHANED)


def _may_launch(process: int) -> bool:
    """Whether a parent may be the launcher, which is a Python of ours; one that adopts orphans is not.

    A launcher may die before its workers first look who their parent is.
    """
    if not Path("/proc/self/exe").exists():
        return True  # not Linux: nobody can tell
    try:
        program = Path(f"/proc/{process}/exe").readlink().name
    except OSError:  # gone, or somebody else's
        return False
    return "python" in program or "pypy" in program
