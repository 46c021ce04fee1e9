"""The lock of a run's folder: only one run writes to it at a time.

Rank 0 holds a lock of the operating system, which ends with the process, however it dies. Some file systems do not
share such locks between machines, or have none. There, the modification time of the file decides: the holder refreshes
it with every heartbeat.
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
WAIT_SECONDS = 5.0  # for a run that is about to end
STALE_SECONDS = 30.0  # without a refresh, after which a run on another machine counts as dead
_FILE_BYTES = 1024  # fixed, so that a reader never sees a partial write
_POLL_SECONDS = 0.5


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
