"""One run writes a folder: a lock that its first rank holds, with a heartbeat that others can see from any machine.

The system's own file lock is let go when the process dies, however it dies. Where a file system does not share such
locks between machines, or has none, the file's time tells: it is set anew with every heartbeat.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from ringspan.runtime.settings import RunError

LOCK = "run.lock"
PATIENCE = 5.0  # seconds to wait for a run that is just ending
STALE = 30.0  # seconds without a heartbeat after which a run on another machine is taken for dead
_BYTES = 1024  # of the file: a fixed size, so that a reader never sees half of it
_LOOK = 0.5  # seconds between two looks


class RunLock:
    """The lock of a run's folder. `take` waits a little and then raises; `beat` says that the run is alive."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LOCK
        self.token = secrets.token_hex(8)
        self._descriptor = -1

    def take(self) -> None:
        """Hold the lock, or raise and say who holds it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            self._wait()
            mine = dict(token=self.token, pid=os.getpid(), host=socket.gethostname(), started=time.ctime())
            os.pwrite(self._descriptor, json.dumps(mine).encode().ljust(_BYTES), 0)
        except OSError as error:
            raise RunError(f"{self.folder}: cannot be written ({error}): give another --out") from error

    def beat(self) -> None:
        """Say that the run is alive; RunError if the folder has been taken by another run, or removed."""
        try:
            holder = _read_holder(self.path.read_bytes())  # a server that does not answer says nothing of the holder
        except FileNotFoundError:
            holder = {}
        if holder.get("token") != self.token:
            raise RunError(f"{self.path} is no longer this run's ({_described(holder)}): this run stops")
        os.utime(self._descriptor)

    def release(self) -> None:
        """Let others have the folder. The file stays, blank: who removes a lock may remove somebody else's."""
        if self._descriptor < 0:
            return
        if self._holder().get("token") == self.token:
            os.pwrite(self._descriptor, b" " * _BYTES, 0)
        os.close(self._descriptor)
        self._descriptor = -1

    def _wait(self) -> None:
        start, first_seen = time.monotonic(), self._beaten()
        while True:
            waited = time.monotonic() - start  # before looking: a look after the wait decides
            if self._is_free():
                return
            if waited > (STALE + _LOOK if self._beaten() == first_seen else PATIENCE):
                raise RunError(
                    f"{self.folder} is being written by another run ({_described(self._holder())}): wait until it "
                    f"ends, stop it, or give another --out"
                )
            time.sleep(_LOOK)

    def _is_free(self) -> bool:
        """Whether nobody alive holds it; if the system has locks, it is held from here on."""
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
        with tempfile.TemporaryFile(dir=self.folder) as now:  # by the clock of the file system, whoever set it
            return os.fstat(now.fileno()).st_mtime - self._beaten() > STALE

    def _beaten(self) -> float:
        return os.fstat(self._descriptor).st_mtime

    def _holder(self) -> dict[str, Any]:
        """What the file says now; nothing if it is blank or gone."""
        try:
            return _read_holder(self.path.read_bytes())
        except OSError:
            return {}


def _read_holder(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _described(holder: dict[str, Any]) -> str:
    if not holder:
        return "nobody holds it"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('started')}"
