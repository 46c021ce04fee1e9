"""Supervision of a run: heartbeats, stragglers, the watchdog thread that ends orphaned workers, and the folder's lock.

Each rank writes a small heartbeat file once a second. The files remain after a crash and show what each rank was doing.

Only one run writes to a folder at a time. Rank 0 holds a lock of the operating system, which ends with the process,
however it dies. Some file systems do not share such locks between machines, or have none. There, the modification time
of the file decides: the holder refreshes it with every heartbeat.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import secrets
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import torch
import torch.distributed as dist

from ringspan.runtime.collectives import all_gather_json, run_on_all_ranks
from ringspan.runtime.files import write_atomic
from ringspan.runtime.settings import RunError, check_types

if TYPE_CHECKING:
    from ringspan.train.distributed import DistributedContext

HEARTBEATS = "heartbeats"
HEARTBEAT_SECONDS = 1.0
ORPHANED = 3  # exit status of a worker whose launcher died, or whose folder another run took over
SILENT_SECONDS = 10.0  # without a heartbeat, after which a rank is a straggler
LONG_WAIT_SECONDS = 5.0  # for which a rank is waited for, or stays in a phase, before it is a straggler
SLOW_FRACTION = 0.2  # of a step that the rest of a ring waited longer than its slowest rank

Phase = Literal["starting", "loading", "reading", "forward", "backward", "updating", "saving"]
_PHASES = get_args(Phase)

LOCK = "run.lock"
WAIT_SECONDS = 5.0  # for a run that is about to end
STALE_SECONDS = 30.0  # without a refresh, after which a run on another machine counts as dead
_FILE_BYTES = 1024  # fixed, so that a reader never sees a partial write
_POLL_SECONDS = 0.5


@dataclass
class RankStatus:
    """What this rank is doing. The training loop updates it; the watchdog's thread reads it."""

    step: int = 0
    phase: Phase = "starting"
    since: float = field(default_factory=time.perf_counter)

    def enter(self, step: int, phase: Phase) -> None:
        self.step, self.phase, self.since = step, phase, time.perf_counter()


@dataclass(frozen=True)
class Heartbeat:
    """The state of a rank at one moment. ``step`` counts from 1, as progress bars do."""

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    phase_seconds: float  # since the phase began
    transfer: str  # label of the latest transfer in its ring
    waiting_for: tuple[int, ...]  # ranks whose data it is blocked on
    wait_seconds: float  # for how long it has been blocked
    waited_seconds: float  # in this step so far
    memory_bytes: int  # peak
    age_seconds: float = 0.0  # when it was read

    def __str__(self) -> str:
        transfer = f", {self.transfer}" if self.transfer else ""
        return f"rank {self.rank} ({self.host}, process {self.pid}): step {self.step}, {self.phase}{transfer}"


@dataclass(frozen=True)
class Straggler:
    """A rank that other ranks wait for: where it is, and why it counts as a straggler."""

    rank: int
    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


OnHeartbeats = Callable[[list[Heartbeat], list[Straggler]], None]


def current_heartbeat(status: RankStatus, context: DistributedContext) -> Heartbeat:
    """The heartbeat of this rank, now."""
    now, counters = time.perf_counter(), context.ring.counters
    wait = counters.wait
    blocked = 0.0 if wait is None else now - wait.since
    peers = () if wait is None else tuple(dist.get_global_rank(context.ring.group, peer) for peer in wait.peers)
    return Heartbeat(
        rank=context.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        step=status.step + 1,
        phase=status.phase,
        phase_seconds=now - status.since,
        transfer=counters.posted,
        waiting_for=peers,
        wait_seconds=blocked,
        waited_seconds=counters.waiting_seconds + blocked,
        memory_bytes=context.device.peak_bytes(),
    )


def write_heartbeat(folder: Path, heartbeat: Heartbeat) -> None:
    """Write a heartbeat into the run's folder."""
    path = _heartbeat_path(folder, heartbeat.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(dataclasses.asdict(heartbeat)) + "\n", durable=False)


def read_heartbeats(folder: Path, ranks: int, not_before: float = 0.0) -> list[Heartbeat]:
    """The last heartbeat of each rank, in order of rank. Those older than ``not_before`` belong to another run.

    Ages follow the clock of the file system. The newest file is taken as now: rank 0 has just written its own.
    """
    found: dict[int, tuple[float, Heartbeat]] = {}
    for rank in range(ranks):
        try:
            values = json.loads(_heartbeat_path(folder, rank).read_bytes())
            written = heartbeat_time(folder, rank)
            heartbeat = Heartbeat(**{**values, "waiting_for": tuple(values["waiting_for"])})
            check_types(heartbeat)
        except (OSError, KeyError, TypeError, ValueError, RecursionError):
            continue  # not written yet, being replaced, or not a heartbeat
        if written >= not_before:
            found[rank] = written, heartbeat
    now = max((written for written, _ in found.values()), default=0.0)
    return [dataclasses.replace(heartbeat, age_seconds=now - written) for written, heartbeat in found.values()]


def heartbeat_time(folder: Path, rank: int) -> float:
    """When a rank's heartbeat was written, by the clock of the file system."""
    return _heartbeat_path(folder, rank).stat().st_mtime


def _heartbeat_path(folder: Path, rank: int) -> Path:
    return folder / HEARTBEATS / f"rank-{rank:05d}.json"


def find_stragglers(heartbeats: list[Heartbeat]) -> list[Straggler]:
    """Ranks without a heartbeat, ranks that others wait for while they wait for no one, and ranks a phase behind.

    >>> stuck = Heartbeat(1, "node", 7, 3, "forward", 20.0, "parcels of hop 1", (), 0.0, 0.0, 0)
    >>> waits = Heartbeat(0, "node", 6, 3, "forward", 20.0, "parcels of hop 2", (1,), 19.0, 19.0, 0)
    >>> [str(found) for found in find_stragglers([waits, stuck])]
    ['rank 1 (node, process 7): step 3, forward, parcels of hop 1: rank 0 has waited for it for 19 s']
    """
    by_rank = {heartbeat.rank: heartbeat for heartbeat in heartbeats}
    reasons: dict[int, str] = {}
    for heartbeat in heartbeats:
        if heartbeat.age_seconds > SILENT_SECONDS:
            reasons[heartbeat.rank] = f"no heartbeat for {heartbeat.age_seconds:.0f} s"
    for heartbeat in heartbeats:
        for peer in heartbeat.waiting_for:
            blocking = by_rank.get(peer)
            if heartbeat.wait_seconds > LONG_WAIT_SECONDS and blocking is not None and not blocking.waiting_for:
                reasons.setdefault(peer, f"rank {heartbeat.rank} has waited for it for {heartbeat.wait_seconds:.0f} s")
    furthest = max(map(_position, heartbeats), default=(0, 0))
    for heartbeat in heartbeats:
        is_behind = _position(heartbeat) < furthest and not heartbeat.waiting_for
        if is_behind and heartbeat.phase_seconds > LONG_WAIT_SECONDS:
            reasons.setdefault(
                heartbeat.rank, f"in this phase for {heartbeat.phase_seconds:.0f} s, while other ranks are ahead"
            )
    return [Straggler(rank, str(by_rank[rank]), why) for rank, why in sorted(reasons.items())]


def _position(heartbeat: Heartbeat) -> tuple[int, int]:
    return heartbeat.step, _PHASES.index(heartbeat.phase) if heartbeat.phase in _PHASES else 0


def find_slowest_rank(waits: list[float], ring_size: int, seconds: float) -> int | None:
    """The rank that the rest of its ring waited for in a step; None if they hardly waited.

    A ring is as fast as its slowest rank, and the rank that waits least is the one the others wait for.

    >>> find_slowest_rank([0.1, 0.1, 2.1, 0.0], ring_size=2, seconds=4.0)
    3
    """
    gaps = []
    for first in range(0, len(waits), ring_size):
        ring = waits[first : first + ring_size]
        least = min(range(len(ring)), key=ring.__getitem__)
        others = [wait for rank, wait in enumerate(ring) if rank != least]
        gaps.append((statistics.median(others) - ring[least] if others else 0.0, first + least))
    gap, rank = max(gaps)
    return rank if gap > SLOW_FRACTION * seconds else None


class Watchdog:
    """A thread that keeps the folder's lock alive (on rank 0) and ends this process if its launcher dies.

    ``launcher`` is the parent process of a worker of torchrun; None if there is no launcher. Inside `monitoring`, the
    thread also writes this rank's heartbeat, rank 0 reads those of all ranks, and losing the lock ends the process.
    """

    def __init__(self, folder: Path, rank: int, launcher: int | None) -> None:
        self.folder, self.rank, self.launcher = folder, rank, launcher
        self._run_lock = RunLock(folder)
        self._is_locked = False
        self._heartbeat: Callable[[], None] | None = None
        self._heartbeat_lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ringspan watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread and, on rank 0, lock the folder. Raises RunError if another run holds the lock."""
        if self.launcher is not None and not _can_be_launcher(self.launcher):
            self._end("the launcher is gone")
        self._thread.start()
        if self.rank == 0:
            try:
                self._run_lock.acquire()
            except BaseException:
                self.stop()
                raise
            self._is_locked = True

    def stop(self, *, failed: bool = False) -> None:
        """Stop the thread and release the lock. With ``failed``, first check whether a dead launcher is the cause."""
        if failed:
            self._end_if_orphaned()
        self._stopping.set()
        self._thread.join()
        self._is_locked = False
        self._run_lock.release()

    @contextmanager
    def monitoring(
        self, status: RankStatus, context: DistributedContext, on_heartbeats: OnHeartbeats
    ) -> Iterator[None]:
        """Write this rank's heartbeat while the block runs; rank 0 calls ``on_heartbeats`` at every heartbeat."""
        write_heartbeat(self.folder, current_heartbeat(status, context))
        began = heartbeat_time(self.folder, self.rank)

        def heartbeat() -> None:
            write_heartbeat(self.folder, current_heartbeat(status, context))
            if self.rank == 0:
                heartbeats = read_heartbeats(self.folder, context.world_size, began)
                on_heartbeats(heartbeats, find_stragglers(heartbeats))

        with self._heartbeat_lock:
            self._heartbeat = heartbeat
        try:
            yield
        finally:
            with self._heartbeat_lock:
                self._heartbeat = None

    def _watch(self) -> None:
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            self._end_if_orphaned()
            try:
                if self._is_locked:
                    self._run_lock.refresh()
                with self._heartbeat_lock:
                    if self._heartbeat is not None:
                        self._heartbeat()
            except RunError as error:
                if self._heartbeat is not None:
                    self._end(str(error))
            except OSError:
                continue  # a full disk, or a slow file server: if it lasts, the training loop reports it

    def _end_if_orphaned(self) -> None:
        if self.launcher is not None and os.getppid() != self.launcher:
            self._end(f"the launcher (process {self.launcher}) is gone")

    def _end(self, why: str) -> NoReturn:
        """End the process, even if its main thread is blocked."""
        sys.stderr.write(
            f"rank {self.rank}: {why}: stopping. The last checkpoint is intact; continue with --resume auto.\n"
        )
        sys.stderr.flush()
        os._exit(ORPHANED)


def check_folder_is_shared(folder: Path, device: torch.device, seconds: float) -> None:
    """Raise RunError on all ranks if one does not see a new file of rank 0 within ``seconds``. A collective."""
    name = all_gather_json(f"shared-{secrets.token_hex(8)}", device=device)[0]
    path, is_main = folder / name, dist.get_rank() == 0

    def see() -> None:
        deadline = time.monotonic() + seconds
        while not path.exists():
            if time.monotonic() > deadline:
                raise RunError(f"{folder} on {socket.gethostname()} is not that of rank 0: all hosts must share --out")
            time.sleep(_POLL_SECONDS)

    run_on_all_ranks(lambda: write_atomic(path, "") if is_main else None, device)
    try:
        run_on_all_ranks(see, device)
    finally:
        if is_main:
            path.unlink(missing_ok=True)


def _can_be_launcher(process: int) -> bool:
    """Whether the parent can be torchrun, which is a Python process; the process that adopts orphans is not.

    Needed because a launcher may die before its workers first read their parent's id.
    """
    if not Path("/proc/self/exe").exists():
        return True  # not Linux: unknown
    try:
        program = Path(f"/proc/{process}/exe").readlink().name
    except OSError:  # gone, or owned by another user
        return False
    return "python" in program or "pypy" in program


class RunLock:
    """The lock of a run's folder. `acquire` waits briefly and then raises; `refresh` shows that the run is alive."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LOCK
        self.token = secrets.token_hex(8)
        self._descriptor = -1

    def acquire(self) -> None:
        """Take the lock. Raises RunError, which names the holder, if another run is alive."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            self._wait_until_free()
            holder = dict(token=self.token, pid=os.getpid(), host=socket.gethostname(), started=time.ctime())
            os.pwrite(self._descriptor, json.dumps(holder).encode().ljust(_FILE_BYTES), 0)
        except OSError as error:
            raise RunError(f"{self.folder}: cannot be written ({error}): give another --out") from error

    def refresh(self) -> None:
        """Update the time of the file. Raises RunError if another run took the lock, or the file was removed."""
        try:
            holder = _parse_holder(self.path.read_bytes())  # OSError: an unreachable server does not mean a lost lock
        except FileNotFoundError:
            holder = {}
        if holder.get("token") != self.token:
            raise RunError(f"{self.path} no longer belongs to this run ({_describe(holder)}): this run stops")
        os.utime(self._descriptor)

    def release(self) -> None:
        """Release the lock. The blank file stays: removing it could remove the lock of another run."""
        if self._descriptor < 0:
            return
        if self._holder().get("token") == self.token:
            os.pwrite(self._descriptor, b" " * _FILE_BYTES, 0)
        os.close(self._descriptor)
        self._descriptor = -1

    def _wait_until_free(self) -> None:
        start, first_seen = time.monotonic(), self._refreshed()
        while True:
            waited = time.monotonic() - start  # read before the check, so that a check after the wait decides
            if self._is_free():
                return
            if waited > (STALE_SECONDS + _POLL_SECONDS if self._refreshed() == first_seen else WAIT_SECONDS):
                raise RunError(
                    f"{self.folder} is in use by another run ({_describe(self._holder())}): wait until it ends, stop "
                    f"it, or give another --out"
                )
            time.sleep(_POLL_SECONDS)

    def _is_free(self) -> bool:
        """Whether no live run holds the lock. Also takes the operating system's lock, if there is one."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            held = False
        holder = self._holder()
        if not holder or (held and holder.get("host") == socket.gethostname()):
            return True
        with tempfile.TemporaryFile(dir=self.folder) as now:  # compare times by the clock of the file system
            return os.fstat(now.fileno()).st_mtime - self._refreshed() > STALE_SECONDS

    def _refreshed(self) -> float:
        return os.fstat(self._descriptor).st_mtime

    def _holder(self) -> dict[str, Any]:
        """The current content of the file; empty if it is blank or missing."""
        try:
            return _parse_holder(self.path.read_bytes())
        except OSError:
            return {}


def _parse_holder(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "no holder"
    where = f"process {holder.get('pid')} on {holder.get('host')}"
    is_own = holder.get("pid") == os.getpid() and holder.get("host") == socket.gethostname()
    return f"{where}, since {holder.get('started')}" + (", which is this process: close its Trainer" if is_own else "")
